"""`python -m common.tracer RUN_DIR`: report what a traced run computed, sent and waited for, and draw its timeline."""

from common.tracing.report import main

if __name__ == "__main__":
    raise SystemExit(main())
