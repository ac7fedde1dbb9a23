"""`python -m tests.lockstep`: write mutants.md, the table of what `common.lockstep` says of each mutant."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded

# isort: split
from tests.lockstep.mutants import near, rows, table

PAGE = Path(__file__).parent / "mutants.md"
TEXT = """# What lockstep says of each mutant

`python -m common.lockstep` compares a run with one process, tensor by tensor. Here are the known-wrong variants of
`tests/mutants` that change numbers, and the bugs of the lessons' hunts. Each is planted in the real code, which then
trains for two steps on the ranks and with the flags that `tests/mutants/test_trained.py` has for it.

*is in* is where the changed code is: the first place at which a step comes through it. *named first* is the first
tensor, in the order of computation, that is not what one process has. **{near} of {all}** are named within one module
of where they are; of the others, the second column is bold.

Not in the table are mutants that compute the same at a higher price, and those that show only in narrow types, FP8
among them: both runs compute in float64.

{table}

*Written by `python -m tests.lockstep`.*
"""


def page() -> str:
    """The text of the page."""
    found = rows()
    return TEXT.format(near=near(found), all=len(found), table="\n".join(table(found)))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
