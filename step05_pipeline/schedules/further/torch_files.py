"""Schedule files of torch.distributed.pipelining, in the format that it calls compute-only: CSV, one line per rank.

    0F0,0F1,,0I0,0W0,(0F7;7B3)OVERLAP_F_B

A cell names the stage, the kind of action and the micro-batch: `7B3` is the backward of micro-batch 3 through stage 7.
The cells also say which rank holds which stage. The last cell above is an F and a B that may run as one: if there is
such a pair, the schedule is `overlapped`, whose executor joins every F with the B of another stage right behind it.

In files of PyTorch 2.5, B is what was later called I, and a whole backward is called BW. So a B is read as I where the
same stage has a W of this micro-batch. PyTorch rejects such a file today.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.simulator import runs_as_one

CELL = re.compile(r"(\d{1,4})(F|BW?|I|W)(\d{1,6})")
PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")
OTHERS = re.compile(r"\d+(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class _Cell(NamedTuple):
    stage: int
    kind: str
    micro_batch: int


def is_of_torch(cell: str) -> bool:
    """Whether a cell looks like one of these files. Those of `csv_files.py` begin with a letter."""
    return cell[:1] in tuple("(0123456789")


def schedule_of(path: Path, rows: Sequence[tuple[str, list[str]]]) -> Schedule:
    """The schedule in such a file.

    Args:
        rows: for each rank, the place of its line for messages, and its cells, none of them empty.

    Raises UsageError, with one line, for a cell that is none of the format, and where the stages have no clear places.
    """
    parsed = [[action for cell in cells for action in _parse(cell, where)] for where, cells in rows]
    done = {action for row in parsed for action in row}
    ranks: dict[int, int] = {}  # by stage
    for rank, row in enumerate(parsed):
        for stage, *_ in row:
            if ranks.setdefault(stage, rank) != rank:
                both = f"ranks {ranks[stage]} and {rank}"
                raise UsageError(f"{path}: stage {stage} is on {both}; files of PyTorch have one copy of the model")
    if missing := set(range(max(ranks))) - ranks.keys():
        raise UsageError(f"{path} has actions for stage {max(ranks)}, but none for stage {min(missing)}")
    placement = tuple(ranks[stage] for stage in range(len(ranks)))
    chunks = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]
    actions = []
    for row in parsed:
        today = [each._replace(kind=_kind_today(each, done)) for each in row]
        actions.append(tuple(Action(each.kind, each.micro_batch, chunks[each.stage]) for each in today))
    micro_batches = 1 + max(each.micro_batch for each in done)
    overlapped = any(PAIR.fullmatch(cell) for _, cells in rows for cell in cells)
    return Schedule(path.stem, (placement,), micro_batches, tuple(actions), overlapped)


def write_torch_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule for `_PipelineScheduleRuntime._load_csv`.

    Raises UsageError if the schedule has copies of the model, or if micro-batches come to the last stage in another
    order than 0, 1, ...: the runtime of PyTorch 2.13 counts their losses in this order, and computes wrong gradients.
    """
    if len(schedule.placement) > 1:
        copies = f"{len(schedule.placement)} copies of the model"
        raise UsageError(f"schedule {schedule.name} keeps {copies}; files of PyTorch have one")
    rank, chunk = schedule.place_of(0, schedule.stages - 1)
    last = [each.micro_batch for each in schedule.actions[rank] if (each.kind, each.chunk) == ("F", chunk)]
    if last != sorted(last):
        order = f"micro-batches {', '.join(map(str, last))} in its last stage"
        raise UsageError(f"schedule {schedule.name} has {order}; PyTorch's runtime needs them in order")
    lines = []
    for rank, row in enumerate(schedule.actions):
        cells, joined = [], False  # joined: with the action before it
        for action, following in zip(row, [*row[1:], None], strict=True):
            stage = schedule.stage_of(rank, action.chunk)[1]
            text = f"{stage}{action.kind}{action.micro_batch}"
            if joined:
                cells[-1] = f"({cells[-1]};{text})OVERLAP_F_B"
            else:
                cells.append(text)
            joined = schedule.overlapped and not joined and following is not None and runs_as_one(action, following)
        lines.append(",".join(cells))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parse(cell: str, where: str) -> list[_Cell]:
    """The actions that a cell stands for: one, or the two of a pair."""
    pair = PAIR.fullmatch(cell)
    matches = [CELL.fullmatch(each) for each in (pair.groups() if pair else (cell,))]
    if all(matches):
        return [_Cell(int(stage), kind, int(micro_batch)) for stage, kind, micro_batch in (m.groups() for m in matches)]
    if OTHERS.fullmatch(cell):
        raise UsageError(
            f"{where}: {cell} is communication, which this executor places by itself; PyTorch leaves it out "
            'with `_dump_csv(file, format="compute_only")`'
        )
    raise UsageError(
        f"{where}: {cell!r} is no action of a file of torch.distributed.pipelining; 7F0 (micro-batch 0 through stage "
        "7), 7B0, 7I0, 7W0 and (0F7;7B0)OVERLAP_F_B are"
    )


def _kind_today(action: _Cell, done: set[_Cell]) -> str:
    """F, B, I or W, whichever version of PyTorch wrote the file."""
    if action.kind == "B" and action._replace(kind="W") in done and action._replace(kind="I") not in done:
        return "I"
    return action.kind[:1]
