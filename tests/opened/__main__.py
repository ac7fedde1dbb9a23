"""Which files one micro-batch goes through: what a reader opens in order to follow it.

    python -m tests.opened 5                        # the files that step 5 enters, with their lines
    python -m tests.opened                          # how many there are, of every step
    python -m tests.opened 8 --ranks 4 --pp 2 --experts 8 --ep 2    # with other flags of the step's train.py

A step's default command (that of `make stepNN`) really runs, on synthetic text and with one micro-batch for each
data-parallel rank. Every function of this project is noted that begins between the start and the end of `train_step`,
on any of the ranks and in any thread. What builds the model is not among them, nor are functions of libraries.
"""

import sys

from common.drawing.tables import aligned
from common.errors import UsageError
from common.launching.command_line import STEP_NAMES, OneLineParser, one_line_errors, summary
from tests.opened.entered import default_command, on_ranks, table, totals

COLUMNS = ("files", "lines", "functions", "their lines")


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Print the files of the step that the command line names, or a row for every step."""
    parser = OneLineParser(prog="python -m tests.opened", description=summary(__doc__), allow_abbrev=False)
    parser.add_argument("step", nargs="?", type=int, choices=range(1, 9), help="1 to 8; by default all of them")
    parser.add_argument("--ranks", type=int, help="instead of those of the step's default command")
    known, flags = parser.parse_known_args(argv)
    if known.step is None:
        if flags or known.ranks:
            raise UsageError("say which step these flags are for: python -m tests.opened STEP")
        rows = [[STEP_NAMES[n - 1], *totals(table(on_ranks(n, *default_command(n))))] for n in range(1, 9)]
        shown = [["step", *COLUMNS], *rows]
    else:
        given = (known.ranks or 1, " ".join(flags)) if known.ranks or flags else default_command(known.step)
        rows = table(on_ranks(known.step, *given))
        shown = [["file", *COLUMNS[1:]], *rows, [f"files: {totals(rows)[0]:,}", *totals(rows)[1:]]]
    print("\n".join(aligned([[f"{each:,}" if isinstance(each, int) else each for each in row] for row in shown])))


if __name__ == "__main__":
    sys.exit(main())
