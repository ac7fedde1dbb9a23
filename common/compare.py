"""`python -m common.compare RUN RUN... [--tolerance 1e-5]`: lay runs on top of each other, fail if they differ."""

from common.record.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
