"""Every schedule by its name, which is the value of --schedule.

To add your own, write a function like those in `whole_backward.py` and add a line to `SCHEDULES`. A table in a CSV file
needs no code at all: see `further/csv_files.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import UsageError
from step05_pipeline.schedules import split_backward, whole_backward
from step05_pipeline.schedules.actions import Action, Placement, Schedule, looped
from step05_pipeline.schedules.further import dualpipe, several_stages, zero_bubble
from step05_pipeline.schedules.further.placements import bidirectional, v_shaped

CHUNKS = 2


@dataclass(frozen=True)
class Entry:
    """One schedule of the catalogue.

    function: (ranks, micro_batches, chunks) -> the actions of each rank, in order.
    placement: (ranks, chunks) -> which rank holds which stage.
    chunks: stages per rank, of one copy of the model; None if --virtual-stages decides (by default `CHUNKS`).
    overlapped: see `Schedule`.
    """

    function: Callable[..., list[list[Action]]]
    placement: Callable[[int, int], Placement] = looped
    chunks: int | None = 1
    overlapped: bool = False


SCHEDULES = {
    "naive": Entry(whole_backward.naive),
    "afab": Entry(whole_backward.all_forward_all_backward),
    "1f1b": Entry(whole_backward.one_forward_one_backward),
    "breadth-first": Entry(several_stages.breadth_first, chunks=None),
    "llama3": Entry(several_stages.llama3, chunks=None),
    "interleaved": Entry(whole_backward.interleaved, chunks=None),
    "zb-h1": Entry(split_backward.zero_bubble_h1),
    "zb-h2": Entry(zero_bubble.zero_bubble_h2),
    "zbv": Entry(zero_bubble.zero_bubble_v, v_shaped, chunks=2),
    "dualpipe": Entry(dualpipe.dualpipe, bidirectional, overlapped=True),
    "dualpipev": Entry(dualpipe.dualpipe_v, v_shaped, chunks=2, overlapped=True),
}


def build_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None, consecutive: int | None = None
) -> Schedule:
    """The schedule of that name.

    Args:
        ranks: --pp, the ranks of the pipeline.
        chunks: --virtual-stages, the stages per rank (of one copy of the model). None: what the schedule asks for.
        consecutive: --consecutive, see `llama3`.

    Raises UsageError for an unknown name, and for numbers that the schedule cannot handle.
    """
    if name not in SCHEDULES:
        raise UsageError(f"--schedule {name} is unknown; there are {', '.join(sorted(SCHEDULES))}")
    entry, options = SCHEDULES[name], {}
    for flag, value in (("--pp", ranks), ("micro-batches:", micro_batches), ("--virtual-stages", chunks)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} must be at least 1")
    if entry.chunks and chunks not in (None, entry.chunks):
        stages = "1 stage" if entry.chunks == 1 else f"{entry.chunks} stages"
        raise UsageError(f"--virtual-stages {chunks}: --schedule {name} has {stages} on each rank")
    if consecutive is not None:
        if name != "llama3":
            raise UsageError(f"--consecutive {consecutive} needs --schedule llama3, not {name}")
        options["consecutive"] = consecutive
    chunks = chunks or entry.chunks or CHUNKS
    actions = entry.function(ranks, micro_batches, chunks, **options)
    return Schedule(name, entry.placement(ranks, chunks), micro_batches, tuple(map(tuple, actions)), entry.overlapped)
