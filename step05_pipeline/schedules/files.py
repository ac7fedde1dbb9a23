"""A schedule of your own from a file (--schedule-file): a table, or a function.

A table is CSV, one line a rank, and reads like the pictures in papers: `F0,F1,,B0,F2,B1`. A cell is an action (`I2`,
`W2`, `F0.1` for chunk 1) or empty. A line that begins with `#` is a comment, of which one may say where the stages lie;
default is `# placement: looped`, with as many stages as the chunks that the cells name:

    # placement: v               0 1 2 3 3 2 1 0
    # placement: bidirectional   two copies, 0 1 2 3 and 3 2 1 0
    # placement: 0 1 1 0         the rank of each stage; copies are separated by `;`

A function is that of a Python file, with `@schedule("name")` before it, as those in `schedules.py`.
"""

import csv
import importlib.util
import re
from pathlib import Path

from common.errors import UsageError
from step05_pipeline.schedules.actions import PLACEMENTS, SCHEDULES, Action, Placement, Schedule
from step05_pipeline.schedules.messages import check

CELL = re.compile(r"([FBIW])(\d{1,6})(?:\.(\d{1,3}))?")


def read(path: str | Path, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule in a file, of which the name ends with .csv or .py.

    Raises UsageError, with one line, when there is none or it is for other numbers than these. What a table says is not
    checked here; `messages.check` does that.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".py"):
        raise UsageError(f"--schedule-file {path} must end with .csv or .py")
    if not path.is_file():
        raise UsageError(f"--schedule-file {path} does not exist")
    if path.suffix == ".py":
        return _call(path, ranks, micro_batches, chunks)
    schedule = read_csv(path)
    for flag, value, wanted in (
        ("--pp", schedule.ranks, ranks),
        ("--virtual-stages", schedule.stages // schedule.ranks, chunks),
        ("a number of micro-batches of", schedule.micro_batches, micro_batches),
    ):
        if wanted not in (None, value):
            raise UsageError(f"--schedule-file {path} is for {flag} {value}, not {wanted}")
    return schedule


def _call(path: Path, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    """Run the file, and the function that it registers."""
    before = dict(SCHEDULES)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        added = [name for name in SCHEDULES if name not in before]
        if len(added) != 1:
            raise UsageError(
                f"--schedule-file {path} registers {len(added)} schedules; "
                'it needs one function with @schedule("name") before it'
            )
        schedule = SCHEDULES[added[0]].build(ranks, micro_batches, chunks)
        check(schedule)  # here, where whatever it stumbles over is the file's fault
        return schedule
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever is wrong in it
        what = (str(error).splitlines() or [""])[0]
        raise UsageError(f"--schedule-file {path}: {type(error).__name__}: {what}") from error
    finally:  # the file may be read again
        SCHEDULES.clear()
        SCHEDULES.update(before)


def read_csv(path: str | Path) -> Schedule:
    """The table in a file. Its name is that of the file."""
    path, rows, named = Path(path), [], None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            key, colon, value = line[1:].rstrip(",").partition(":")  # spreadsheets fill up lines with commas
            named = value.strip() if colon and key.strip() == "placement" else named
        elif line.strip():
            try:
                cells = [cell.strip() for cell in next(csv.reader([line]))]
            except csv.Error as error:
                raise UsageError(f"{path}, line {number}: {error}") from None
            rows.append([_action(cell, f"{path}, line {number}") for cell in cells if cell])
    rows_with = sum(map(bool, rows))
    if not rows or rows_with < len(rows):
        raise UsageError(f"{path} has no action for {'any rank' if not rows_with else 'one of its ranks'}")
    actions = [action for row in rows for action in row]
    placement = _placement(named or "looped", len(rows), 1 + max(action.chunk for action in actions), path)
    micro_batches = 1 + max(action.micro_batch for action in actions)
    return Schedule(path.stem, placement, micro_batches, tuple(map(tuple, rows)))


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """As a table that `read_csv` reads, or a spreadsheet."""
    placement = "; ".join(" ".join(map(str, row)) for row in schedule.placement)
    lines = [f"# placement: {placement}", *(",".join(map(str, row)) for row in schedule.actions)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _action(cell: str, where: str) -> Action:
    match = CELL.fullmatch(cell)
    if not match:
        raise UsageError(f"{where}: {cell!r} is no action; F0, B3, I2 or W2.1 (micro-batch 2 of chunk 1) are")
    kind, micro_batch, chunk = match.groups()
    return Action(kind, int(micro_batch), int(chunk or 0))


def _placement(text: str, ranks: int, chunks: int, path: Path) -> Placement:
    if text in PLACEMENTS:
        return PLACEMENTS[text](ranks, chunks)
    try:
        rows = tuple(tuple(map(int, row.split())) for row in text.split(";"))
    except ValueError:
        rows = ()
    if not rows or len({len(row) for row in rows}) > 1 or {rank for row in rows for rank in row} != set(range(ranks)):
        raise UsageError(
            f"{path}: placement {text!r} is none of {', '.join(PLACEMENTS)}, nor a list of the rank of each stage "
            f"(0 to {ranks - 1}) for one or more copies, separated by ';'"
        )
    return rows
