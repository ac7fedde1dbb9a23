"""Checkpoints: written by all ranks in parallel, loaded into any other layout, complete or not there at all.

What one holds and how it is written stands in checkpoint_boxes.py, what its files are in checkpoint_files.py. DCP
loads a flipped bit without a word, so a manifest with the size and SHA-256 of every file is written last.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from common import collectives
from common.checkpoints import boxes, files
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.process_groups import Mesh


class DamagedCheckpoint(UsageError):
    """A file of a checkpoint is not what was written."""


# ---- save --------------------------------------------------------------------------------------------------


def save(run_dir: str | Path, step: int, slices: Iterable[SavedBox], extra: dict, mesh: Mesh, keep: int = 0) -> Path:
    """Write a checkpoint after `step` optimizer steps; all ranks call it together. Returns its folder.

    Dying half-way leaves the checkpoint before it as the newest; the leftovers disappear with the next save.
    One of the same step is replaced.

    Args:
        slices: what this rank holds.
        extra: JSON-able, as rank 0 has it; `load` returns it. "step" is added.
        keep: once this one is complete, older ones are removed so that at most so many are there; 0: none is.

    Raises UsageError on all ranks when one of them cannot write; ValueError when owned boxes overlap or, with
    several ranks, leave holes.
    """
    folder = files.folder_of(run_dir, step)
    with _clear_errors(f"cannot save {folder}"):
        from_rank_0(mesh, lambda: files.begin(folder, {**extra, "step": step}))
        boxes.write(files.growing(folder), slices, mesh)
        _complete(folder, mesh, keep)
    return folder


class BackgroundSaves:
    """`save` while training goes on. One checkpoint at a time is under way.

    DCP copies the boxes before its asynchronous save returns, so that later updates do not reach them. Its collectives
    and those of `_complete` fall between those of the training, at other places on every rank: they have a group of
    their own (gloo, since what they exchange lies on the CPU).
    """

    def __init__(self, mesh: Mesh, timeout: float = 600.0):
        handle = None
        if mesh.world.size > 1:
            handle = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
        self.mesh = replace(mesh, world=replace(mesh.world, handle=handle, backend="gloo"))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future | None = None

    def save(self, run_dir: str | Path, step: int, slices: Iterable[SavedBox], extra: dict, keep: int = 0) -> None:
        """Return when the tensors may change again, after the checkpoint before is complete.

        Arguments and errors are those of `checkpoint.save`; errors after the copy are raised by the next `wait`.
        """
        self.wait()
        folder, mesh = files.folder_of(run_dir, step), self.mesh
        with _clear_errors(f"cannot save {folder}"):
            from_rank_0(mesh, lambda: files.begin(folder, {**extra, "step": step}))
            written = boxes.write(files.growing(folder), slices, mesh, background=True)

        def complete() -> None:
            with _clear_errors(f"cannot save {folder}"):
                written.result()
                _complete(folder, mesh, keep)

        self.pending = self.thread.submit(complete)

    def wait(self) -> None:
        """Return when the last checkpoint is complete. Raises what went wrong with it, the same on all ranks."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


def _complete(folder: Path, mesh: Mesh, keep: int) -> None:
    """What follows when the boxes are written: the manifest and the rename, then older checkpoints go."""
    written = {}
    for part in on_all_ranks(mesh, lambda: files.describe(folder, mesh.rank)):
        written |= part
    from_rank_0(mesh, lambda: files.finish(folder, written, keep))


# ---- load --------------------------------------------------------------------------------------------------


def load(folder: str | Path, slices: Iterable[SavedBox], mesh: Mesh, identity: dict | None = None) -> dict:
    """Fill the tensors of `slices` in place, whatever boxes were saved by whatever ranks. Returns `extra`.

    All ranks call it together, each with what it holds (`owner` does not matter). Values are converted to the
    dtype of the slice. Whatever else is in the checkpoint is not read. `identity`, if given, must equal the entry of
    that name in `extra`: what makes it the same run.

    Raises, the same on all ranks: DamagedCheckpoint, a file is missing, truncated or corrupt (checked before anything
    is loaded, a share of the files by each rank); UsageError, a slice is not in the checkpoint, or its tensor has
    another shape there, or the identity differs.
    """
    import torch.distributed.checkpoint as dcp

    folder = Path(folder)
    with _clear_errors(f"cannot load {folder}"):
        verdicts = on_all_ranks(mesh, lambda: files.verify(folder, mesh.rank, mesh.world.size))
        if len({manifest for manifest, _ in verdicts}) > 1:
            raise UsageError("the ranks see different files there; all must share the storage of --run-dir")
        if damaged := sorted(line for _, lines in verdicts for line in lines):
            raise DamagedCheckpoint(damaged[0])
        extra = json.loads((folder / files.EXTRA).read_text())
        if identity is not None:
            check_compatible(extra.get("identity", {}), identity)
        boxes.read(dcp.FileSystemReader(folder), slices, mesh)
        return extra


def load_intact(
    folders: list[Path], slices: Iterable[SavedBox], mesh: Mesh, identity: dict | None = None
) -> tuple[Path, dict]:
    """`load` the first of `folders` that is not damaged. Returns which one, and its `extra`.

    The damaged ones before it are then renamed, and rank 0 says so. Raises UsageError as `load` does, and
    DamagedCheckpoint when all are damaged, which leaves everything where it is.
    """
    slices, damaged = list(slices), {}
    for folder in folders:
        try:
            extra = load(folder, slices, mesh, identity)
        except DamagedCheckpoint as error:
            damaged[folder] = str(error)
            continue
        break
    else:
        raise DamagedCheckpoint("; ".join(damaged.values()))

    def put_aside() -> None:
        for each, line in damaged.items():
            name = files.set_aside(each).name
            print(f"{line}; renamed to {name}, going on from {folder.name}", file=sys.stderr, flush=True)

    from_rank_0(mesh, put_aside)
    return folder, extra


def check_compatible(saved: dict, now: dict) -> None:
    """Raise UsageError with all fields in which two flat dictionaries differ; `saved` comes from `load`."""
    now = json.loads(json.dumps(now))  # as in `saved`, where tuples have become lists
    differing = [
        f"{name} is {saved.get(name)} in the checkpoint and {now.get(name)} in this run"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if differing:
        raise UsageError("cannot resume: " + "; ".join(differing))


# ---- helpers -----------------------------------------------------------------------------------------------


def on_all_ranks(mesh: Mesh, function: Callable | None) -> list:
    """Call `function` (None: nothing to do on this rank). Returns the results of all ranks, in rank order.

    A UsageError or OSError on any rank becomes the same UsageError on all of them.
    """
    value = error = None
    try:
        value = function() if function else None
    except (UsageError, OSError) as caught:
        error = str(caught)
    results = collectives.all_gather_objects((value, error), mesh.world)
    for _, error in results:
        if error:
            raise UsageError(error)
    return [value for value, _ in results]


def from_rank_0(mesh: Mesh, function: Callable):
    """What `function` returns on rank 0, which alone calls it; its errors are raised on all ranks."""
    return on_all_ranks(mesh, function if mesh.rank == 0 else None)[0]


@contextmanager
def _clear_errors(what: str) -> Iterator[None]:
    """A UsageError in here gets `what` before its line, and a lost rank becomes a CommunicationError."""
    try:
        with boxes.one_error():
            yield
    except UsageError as error:
        raise type(error)(f"{what}: {error}") from error
    except RuntimeError as error:
        raise collectives.as_communication_error(error) from error
