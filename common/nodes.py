"""`python -m common.nodes --nodes 2 --ranks 2 --bandwidth 200mbit -- SCRIPT FLAGS`: torchrun on several nodes."""

from common.virtual.nodes import main

if __name__ == "__main__":
    raise SystemExit(main())
