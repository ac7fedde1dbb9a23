"""A schedule of your own as a table (--schedule-file): CSV, one line per rank, laid out like the pictures in papers.

    F0,F1,,B0,F2,B1

A cell is an action (`I2`, `W2`, `F0.1` for chunk 1) or empty. A line that begins with `#` is a comment, and two kinds
of comment have a meaning. One says which rank holds which stage. By default that is `# placement: looped`, with as many
stages per rank as the cells name chunks. The other choices are

    # placement: v               0 1 2 3 3 2 1 0
    # placement: bidirectional   two copies, 0 1 2 3 and 3 2 1 0
    # placement: 0 1 1 0         the rank of each stage; copies are separated by `;`

The other, `# overlapped: yes`, lets an F and the B of another stage right behind it hide each other's messages, as
DualPipe's do (`Schedule.overlapped`).

A file of torch.distributed.pipelining (`0F0`, `7B3`) is recognised by its cells: see `torch_files.py`.
"""

import re
from pathlib import Path

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, Placement, Schedule
from step05_pipeline.schedules.further import torch_files
from step05_pipeline.schedules.further.placements import PLACEMENTS

CELL = re.compile(r"([FBIW])(\d{1,6})(?:\.(\d{1,3}))?")


def read_schedule(path: str | Path, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule in a CSV file, named after the file.

    Raises UsageError, with one line, if the file cannot be read or was written for other numbers than these. Whether
    the schedule can run is not checked here; `validator.check_schedule` does that.
    """
    path = Path(path)
    if path.suffix != ".csv":
        raise UsageError(f"--schedule-file {path} must end with .csv")
    if not path.is_file():
        raise UsageError(f"--schedule-file {path} does not exist")
    schedule = read_csv(path)
    source = " (--micro-batches; in training, --global-batch / (--micro-batch x dp))"
    for flag, value, wanted, where in (
        ("--pp", schedule.ranks, ranks, ""),
        ("--virtual-stages", schedule.stages // schedule.ranks, chunks, ""),
        ("a number of micro-batches of", schedule.micro_batches, micro_batches, source),
    ):
        if wanted not in (None, value):
            raise UsageError(f"--schedule-file {path} is for {flag} {value}, not {wanted}{where}")
    return schedule


def read_csv(path: str | Path) -> Schedule:
    """The schedule in a CSV file, for whatever numbers of ranks and micro-batches it was written."""
    path, table, placement, overlapped = Path(path), [], None, None
    for number, line in enumerate(_lines(path), 1):
        if line.startswith("#"):
            placement = _value_in(line, "placement", placement)
            overlapped = _value_in(line, "overlapped", overlapped)
        elif line.strip():
            cells = [cell.strip() for cell in line.split(",")]
            table.append((f"{path}, line {number}", [cell for cell in cells if cell]))
    if not table or not all(cells for _, cells in table):
        some = any(cells for _, cells in table)
        raise UsageError(f"{path} has no action for {'one of its ranks' if some else 'any rank'}")
    if torch_files.is_of_torch(table[0][1][0]):
        if (placement, overlapped) != (None, None):
            raise UsageError(f"{path}: the cells of a file of PyTorch say what '# placement' or '# overlapped' would")
        return torch_files.schedule_of(path, table)
    placement, overlapped = "looped" if placement is None else placement, "no" if overlapped is None else overlapped
    rows = [[_action(cell, where) for cell in cells] for where, cells in table]
    actions = [action for row in rows for action in row]
    micro_batches, chunks = (1 + max(getattr(each, name) for each in actions) for name in ("micro_batch", "chunk"))
    if overlapped not in ("yes", "no"):
        raise UsageError(f"{path}: overlapped {overlapped!r} is neither yes nor no")
    placed = _placement(placement, len(rows), chunks, path)
    return Schedule(path.stem, placed, micro_batches, tuple(map(tuple, rows)), overlapped == "yes")


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule as a table that `read_csv` and spreadsheets read."""
    placement = "; ".join(" ".join(map(str, row)) for row in schedule.placement)
    lines = [f"# placement: {placement}", *["# overlapped: yes"] * schedule.overlapped]
    lines += [",".join(map(str, row)) for row in schedule.actions]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _value_in(comment: str, wanted: str, otherwise: str | None) -> str | None:
    """What follows `# wanted:`, or `otherwise` if the comment says something else."""
    key, colon, value = comment[1:].rstrip(",").partition(":")  # spreadsheets fill up lines with commas
    return value.strip() if colon and key.strip() == wanted else otherwise


def _action(cell: str, where: str) -> Action:
    match = CELL.fullmatch(cell)
    if not match:
        if ";" in cell:
            raise UsageError(f"{where}: cells are separated by commas, and here are semicolons ({cell:.40})")
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
