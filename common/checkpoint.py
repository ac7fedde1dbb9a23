"""Checkpoints: written by all ranks in parallel, loaded into any other layout, complete or not there at all.

What is stored is boxes of named tensors (`Slice`). Which rank held which box at the time does not matter when
they are loaded. torch.distributed.checkpoint (DCP) writes and reads the boxes that two small planners name.
DCP loads a flipped bit without a word, so a manifest with the size and SHA-256 of every file is written last.

    RUN_DIR/checkpoints/step-00000040/
        __0_0.distcp, __1_0.distcp ...  what each rank wrote
        .metadata                       where each box lies (a pickle: load only checkpoints that you trust)
        extra.json                      step, loss scale, configuration ...
        manifest.json                   size and SHA-256 of all of them

A checkpoint grows in `step-00000040.tmp` and gets its name in one rename, when everything is on the disk.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common import collectives
from common.config import UsageError
from common.parameter import ParameterSpec
from common.process_groups import Mesh

MANIFEST, EXTRA = "manifest.json", "extra.json"
PIECE = 1 << 22  # bytes hashed at once
_NAME = re.compile(r"step-(\d{8,})")


@dataclass
class Slice:
    """A box of a named tensor, as one rank holds it.

    name: in the checkpoint, such as `exp_avg/layers.0.mlp.up_proj.weight`.
    global_shape: shape of the whole tensor.
    box: (start, stop) along each axis of the whole tensor. What lies beyond global_shape is padding, which is
        neither saved nor loaded.
    tensor: the values, of the box's shape, on any device and with any strides.
    owner: this rank saves the box. The owned boxes of all ranks together cover the tensor. Where several
        ranks own equal boxes, one of them writes it; other overlaps are refused.
    """

    name: str
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    tensor: torch.Tensor
    owner: bool = True

    def __post_init__(self):
        shape = tuple(stop - start for start, stop in self.box)
        if len(shape) != len(self.global_shape) or shape != tuple(self.tensor.shape):
            found = f"a tensor of shape {tuple(self.tensor.shape)}"
            raise ValueError(f"{self.name}: {found} is not the box {self.box} of {self.global_shape}")

    @classmethod
    def of(cls, kind: str, spec: ParameterSpec, tensor: torch.Tensor) -> "list[Slice]":
        """What `spec` describes, of kind "parameter", "exp_avg" and so on. A flat piece is several boxes."""
        name, shape = f"{kind}/{spec.name}", spec.global_shape
        return [cls(name, shape, box, part, spec.owner) for box, part in spec.boxes(tensor)]

    def inside(self) -> tuple[tuple[int, ...], torch.Tensor]:
        """Offsets of the box in the whole tensor, and a view of its values without the padding."""
        offsets = tuple(start for start, _ in self.box)
        kept = tuple(slice(max(0, size - start)) for start, size in zip(offsets, self.global_shape))
        return offsets, self.tensor.detach()[kept]


# ---- where checkpoints are ---------------------------------------------------------------------------------


def newest(run_dir: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `run_dir`, or None."""
    found = []
    for manifest in Path(run_dir).glob(f"checkpoints/step-*/{MANIFEST}"):
        if match := _NAME.fullmatch(manifest.parent.name):
            found.append((int(match[1]), manifest.parent))
    return max(found)[1] if found else None


def resolve(resume: str, run_dir: str | Path | None) -> Path | None:
    """The checkpoint that `--resume` means. "auto": the newest of `run_dir`; None (start afresh) without one.

    Anything else is the path of a checkpoint, or of a run folder, which means its newest. Raises UsageError
    when there is none.
    """
    if resume == "auto":
        return newest(run_dir) if run_dir is not None else None
    path = Path(resume)
    if not path.is_dir():
        raise UsageError(f"--resume {resume}: there is no such folder")
    found = path if (path / MANIFEST).is_file() else newest(path)
    if found is None:
        raise UsageError(f"--resume {resume}: no complete checkpoint, nor a run folder that holds one")
    return found


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


# ---- save and load -----------------------------------------------------------------------------------------


def save(run_dir: str | Path, step: int, slices: Iterable[Slice], extra: dict, mesh: Mesh) -> Path:
    """Write a checkpoint after `step` optimizer steps; all ranks call it together. Returns its folder.

    Dying half-way leaves the checkpoint before it as the newest; the leftovers disappear with the next save.
    One of the same step is replaced.

    Args:
        slices: what this rank holds.
        extra: JSON-able, as rank 0 has it; `load` returns it. "step" is added.

    Raises UsageError on all ranks when one of them cannot write; ValueError when owned boxes overlap or, with
    several ranks, leave holes.
    """
    folder = Path(run_dir) / "checkpoints" / f"step-{step:08d}"
    growing, replaced = folder.with_suffix(".tmp"), folder.with_suffix(".old.tmp")

    def prepare() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        growing.mkdir()
        _write(growing / EXTRA, {**extra, "step": step})

    def describe_mine() -> dict[str, dict]:
        mine = list(growing.glob(f"__{mesh.rank}_*"))
        if mesh.rank == 0:
            mine += [growing / ".metadata", growing / EXTRA]
        return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in mine}

    def finish() -> None:
        for name, file in files.items():
            if not (growing / name).is_file() or (growing / name).stat().st_size != file["bytes"]:
                raise UsageError(f"rank 0 does not see {name}; all ranks must share the storage of --run-dir")
        _write(growing / MANIFEST, files)
        _flush(growing)
        if folder.exists():
            folder.rename(replaced)
        growing.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    with _clear_errors(f"cannot save {folder}"):
        on_all_ranks(mesh, prepare if mesh.rank == 0 else None)
        _write_boxes(growing, slices, mesh)
        files = {}
        for part in on_all_ranks(mesh, describe_mine):
            files |= part
        on_all_ranks(mesh, finish if mesh.rank == 0 else None)
    return folder


def load(folder: str | Path, slices: Iterable[Slice], mesh: Mesh, identity: dict | None = None) -> dict:
    """Fill the tensors of `slices` in place, whatever boxes were saved by whatever ranks. Returns `extra`.

    All ranks call it together, each with what it holds (`owner` does not matter). Values are converted to the
    dtype of the slice. Whatever else is in the checkpoint is not read. `identity`, if given, must equal the entry of
    that name in `extra`: what makes it the same run.

    Raises UsageError, the same on all ranks: a file is missing, truncated or corrupt (checked before anything
    is loaded, a share of the files by each rank); a slice is not in the checkpoint, or its tensor has another
    shape there.
    """
    folder = Path(folder)
    with _clear_errors(f"cannot load {folder}"):
        verdicts = on_all_ranks(mesh, lambda: _verify(folder, mesh.rank, mesh.world.size))
        if len({manifest for manifest, _ in verdicts}) > 1:
            raise UsageError("the ranks see different checkpoints there")
        if damaged := sorted(line for _, lines in verdicts for line in lines):
            raise UsageError(damaged[0])
        extra = json.loads((folder / EXTRA).read_text())
        if identity is not None:
            check_compatible(extra.get("identity", {}), identity)
        _read_boxes(folder, slices, mesh)
        return extra


def _verify(folder: Path, rank: int, world: int) -> tuple[str, list[str]]:
    """Check this rank's share of the files. Returns the manifest's digest and a line for each damaged one."""
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"{MANIFEST} is missing, so it is no complete checkpoint")
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        files = sorted((file["bytes"], name, file["sha256"]) for name, file in content.items())
        if not content.keys() >= {EXTRA, ".metadata"}:
            raise KeyError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(f"{MANIFEST} is corrupt") from None
    damaged = []
    for size, name, sha256 in files[rank::world]:
        path = folder / name
        if not path.is_file():
            damaged.append(f"{name} is missing")
        elif path.stat().st_size != size:
            damaged.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif _sha256(path) != sha256:
            damaged.append(f"{name} is corrupt: its SHA-256 is not that of {MANIFEST}")
    return _sha256(folder / MANIFEST), damaged


# ---- torch.distributed.checkpoint --------------------------------------------------------------------------


def _write_boxes(folder: Path, slices: Iterable[Slice], mesh: Mesh) -> None:
    """Every rank writes its owned boxes to one file, and rank 0 `.metadata`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    tensors, items = {}, []
    for each in slices:
        offsets, tensor = each.inside()
        index = MetadataIndex(each.name, offsets)
        if each.owner and tensor.numel() and index not in tensors:
            chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(each.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            tensors[index] = tensor

    class Planner(dcp.DefaultSavePlanner):  # whose global plan keeps one of equal boxes and refuses overlaps
        def create_local_plan(self):
            return SavePlan(items)

        def resolve_data(self, item):
            return tensors[item.index]

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:  # a full disk makes torch.save say "unexpected pos"
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    planner = Planner(flatten_state_dict=False)
    dcp.save({}, storage_writer=Writer(folder), planner=planner, no_dist=mesh.world.size == 1)


def _read_boxes(folder: Path, slices: Iterable[Slice], mesh: Mesh) -> None:
    """Every rank reads, from whichever files, the parts of saved boxes that overlap with its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    shapes, chunks, tensors = {}, defaultdict(list), defaultdict(list)
    for each in slices:
        offsets, tensor = each.inside()
        shapes[each.name] = tuple(each.global_shape)
        if tensor.numel():
            chunks[each.name].append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
            tensors[each.name].append(tensor)

    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            items = []
            for name, shape in shapes.items():
                saved = self.metadata.state_dict_metadata.get(name)
                if saved is None:
                    raise UsageError(f"it holds no {name}")
                if tuple(saved.size) != shape:
                    raise UsageError(f"{name} has shape {tuple(saved.size)} there and {shape} in this run")
                found = create_read_items_for_chunk_list(name, saved, chunks[name])
                wanted = sum(tensor.numel() for tensor in tensors[name])
                if sum(math.prod(item.lengths) for item in found) != wanted:
                    raise UsageError(f"it holds only a part of {name}")
                items += found
            return LoadPlan(items)

        def lookup_tensor(self, index):
            return tensors[index.fqn][index.index]

    reader = dcp.FileSystemReader(folder)
    dcp.load({}, storage_reader=reader, planner=Planner(), no_dist=mesh.world.size == 1)


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
    results = [(value, error)]
    if mesh.world.size > 1:
        results = [None] * mesh.world.size
        dist.all_gather_object(results, (value, error), group=mesh.world.handle)
    for _, error in results:
        if error:
            raise UsageError(error)
    return [value for value, _ in results]


@contextmanager
def _clear_errors(what: str) -> Iterator[None]:
    """A UsageError says that it was `what`; of the errors that DCP collects, the lowest rank's is raised."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is with one rank
                yield
        except CheckpointException as collected:
            _, (error, _) = min(collected.failures.items())
            raise (UsageError(str(error)) if isinstance(error, OSError) else error) from collected
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error
    except RuntimeError as error:
        raise collectives.explain(error) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _write(path: Path, content: dict) -> None:
    """Write JSON; it is on the disk when this returns."""
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """The names in `folder` are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
