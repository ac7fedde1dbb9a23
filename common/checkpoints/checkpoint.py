"""Checkpoints: saved by all ranks in parallel, and loaded into any other layout.

`boxes.py` says what a checkpoint holds, `files.py` in which files and how a complete one is told from a damaged one.
"""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from common.checkpoints import boxes, files
from common.checkpoints.boxes import SavedBox
from common.checkpoints.files import DamagedCheckpoint
from common.errors import UsageError
from common.launching.agreement import agree
from common.launching.all_ranks import from_rank_0, on_all_ranks
from common.process_groups import Mesh


def save(run_dir: str | Path, step: int, held: Iterable[SavedBox], extra: dict, mesh: Mesh, keep: int = 0) -> Path:
    """Write a checkpoint after `step` optimizer steps and return its folder. All ranks call it together.

    `held` are the boxes of this rank. `extra`, of rank 0, is saved as JSON with "step" added. Once the checkpoint is
    complete, all but the newest `keep` are removed (0: none). If a process dies before that, the previous checkpoint
    is still the newest. Errors are those of `boxes.write`, the same on all ranks.
    """
    folder = Path(run_dir, "checkpoints", f"step-{step:08d}")
    with boxes.clear_errors(f"cannot save {folder}: "):
        temporary = from_rank_0(mesh, lambda: files.begin(folder, {**extra, "step": step}))
        boxes.write(temporary, held, mesh)
        described = on_all_ranks(mesh, lambda: files.describe(temporary, mesh.rank))
        written = {name: file for each in described for name, file in each.items()}
        from_rank_0(mesh, lambda: files.finish(temporary, written, keep))
    return folder


def load(folder: Path, held: Iterable[SavedBox], mesh: Mesh, identity: dict | None = None) -> dict:
    """Fill the tensors of `held` in place, whichever boxes were saved by whichever ranks, and return `extra`.

    All ranks call it together. Values are converted to the tensors' types. Before anything is loaded, each rank checks
    its share of the files; all raise DamagedCheckpoint when one is missing, truncated or corrupt. They raise UsageError
    as `boxes.read` does, and when `identity` is given and is not the one in `extra`. A value of it may be {"sha256":
    hash, "of": what is hashed, for the message}, of which only the hash must be equal.
    """
    import torch.distributed.checkpoint as dcp

    with boxes.clear_errors(f"cannot load {folder}: "):
        agree(mesh, lambda: files.verify(folder, mesh.rank, mesh.world.size))
        extra = json.loads((folder / files.EXTRA).read_text(encoding="utf-8"))
        saved, now = extra.get("identity", {}), identity or {}
        lines = []
        for name in sorted(saved.keys() | now.keys()):
            a, b = saved.get(name), now.get(name)
            if _part(a, "sha256") != _part(b, "sha256"):
                lines.append(f"{name} is {_part(a, 'of')} in the checkpoint and {_part(b, 'of')} in this run")
        if identity is not None and lines:
            raise UsageError("cannot resume: " + "; ".join(lines))
        missing = boxes.read(dcp.FileSystemReader(folder), held, mesh)
        if missing and mesh.rank == 0:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            print(f"{folder.name} was saved without {missing[0]}{others}, which therefore start anew")
        return extra


def _part(value, name: str):
    return value.get(name, value) if isinstance(value, dict) else value


def load_intact(folders: list[Path], held: Iterable[SavedBox], mesh: Mesh, identity: dict) -> tuple[Path, dict]:
    """`load` the first of `folders` that is not damaged, and return that folder and its `extra`.

    Rank 0 names and renames the damaged ones before it. Raises DamagedCheckpoint, and renames none, if all are damaged.
    """
    held, damaged = list(held), {}
    for folder in folders:
        try:
            extra = load(folder, held, mesh, identity)
        except DamagedCheckpoint as error:
            damaged[folder] = error
            continue
        for each, error in damaged.items():
            from_rank_0(mesh, partial(files.set_aside, each, f"{error}; going on from {folder.name}"))
        return folder, extra
    raise DamagedCheckpoint("; ".join(map(str, damaged.values())))
