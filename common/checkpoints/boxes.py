"""What a checkpoint holds: boxes of named tensors, written and read by torch.distributed.checkpoint (DCP).

Which rank held which box at the time does not matter when they are loaded. Two small planners tell DCP which boxes
there are; it does the rest: files written and read in parallel, equal boxes written once, overlaps refused.
"""

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import UsageError
from common.parameter import ParameterSpec
from common.process_groups import Mesh


@dataclass
class SavedBox:
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
    def of(cls, kind: str, spec: ParameterSpec, tensor: torch.Tensor) -> "list[SavedBox]":
        """What `spec` describes, of kind "parameter", "exp_avg" and so on. A flat piece is several boxes."""
        name, shape = f"{kind}/{spec.name}", spec.global_shape
        return [cls(name, shape, box, part, spec.owner) for box, part in spec.boxes(tensor)]

    def inside(self) -> tuple[tuple[int, ...], torch.Tensor]:
        """Offsets of the box in the whole tensor, and a view of its values without the padding."""
        offsets = tuple(start for start, _ in self.box)
        kept = tuple(slice(max(0, size - start)) for start, size in zip(offsets, self.global_shape))
        return offsets, self.tensor.detach()[kept]


def write(folder: Path, slices: Iterable[SavedBox], mesh: Mesh, background: bool = False) -> Future | None:
    """Every rank writes its owned boxes to one file, and rank 0 `.metadata`; with progress on a terminal.

    With `background`, DCP copies the boxes to the CPU, and a thread of its own writes the copies. The Future that this
    returns tells when it is done; until then `mesh.world` belongs to that thread.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.staging import BlockingAsyncStager
    from tqdm import tqdm

    tensors, items = {}, []
    for each in slices:
        offsets, tensor = each.inside()
        if each.owner and tensor.numel() and (each.name, offsets) not in tensors:
            chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(each.global_shape))
            items.append(WriteItem(MetadataIndex(each.name, offsets), WriteItemType.SHARD, tensor_data=data))
            tensors[each.name, offsets] = tensor

    total, quiet = sum(tensor.nbytes for tensor in tensors.values()), mesh.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(total=total, desc=folder.stem, unit="B", unit_scale=True, leave=False, disable=quiet)

    class Planner(dcp.DefaultSavePlanner):  # whose global plan keeps one of equal boxes and refuses overlaps
        def create_local_plan(self):
            return SavePlan(items)

        def resolve_data(self, item):
            tensor = self.state_dict["boxes"][item.index.fqn, tuple(item.index.offset)]  # in the background, a copy
            bar.update(tensor.nbytes)
            return tensor

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:  # a full disk makes torch.save say "unexpected pos"
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    where = {"storage_writer": Writer(folder), "planner": planner, **_ranks(mesh)}
    if background:  # this stager copies the views alone; the default one copies all of the storage behind them
        future = dcp.async_save({"boxes": tensors}, async_stager=BlockingAsyncStager(), **where)
        future.add_done_callback(lambda _: bar.close())
        return future
    with bar, one_error():
        dcp.save({"boxes": tensors}, **where)


def read(reader, slices: Iterable[SavedBox], mesh: Mesh | None = None) -> None:
    """Fill the tensors of `slices` with what DCP's storage `reader` finds of them, in whichever files.

    All ranks of `mesh` call it together; without a mesh, each process reads on its own. Raises UsageError when a
    tensor is missing or has another shape or a file cannot be read (with a mesh, on all ranks).
    """
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

    with one_error():
        dcp.load({}, storage_reader=reader, planner=Planner(), **_ranks(mesh))


@contextmanager
def one_error() -> Iterator[None]:
    """Of the errors that DCP collects from all ranks, raise the lowest rank's. An OSError becomes a UsageError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as collected:
        _, (error, _) = min(collected.failures.items())
        raise (UsageError(str(error)) if isinstance(error, OSError) else error) from collected


def _ranks(mesh: Mesh | None) -> dict:
    """Which ranks save or load together, as DCP wants to be told."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP warns of it where a process is alone
    if mesh is None or mesh.world.size == 1:
        return {"no_dist": True}
    return {"process_group": mesh.world.handle}
