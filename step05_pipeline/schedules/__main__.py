"""`python -m step05_pipeline.schedules --schedule 1f1b --pp 4`: draw a schedule."""

import sys

from step05_pipeline.schedules.timeline import main

sys.exit(main())
