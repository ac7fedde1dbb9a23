"""`python -m common.tracer RUN_DIR`: report what a traced run computed, sent and waited for, and draw its time line."""

import sys

from common.tracing.tracer import main

if __name__ == "__main__":
    sys.exit(main())
