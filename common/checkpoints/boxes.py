"""What a checkpoint holds: boxes of named tensors, written and read by torch.distributed.checkpoint (DCP).

Which rank held a box when it was saved does not matter to the ranks that load it. A planner tells DCP which boxes a
rank has or wants; DCP writes and reads them in parallel, writes equal boxes once, and refuses other overlaps.

So PyTorch's own tools open a checkpoint as a flat dictionary of whole tensors, by these names and without padding:

    python -m torch.distributed.checkpoint.format_utils dcp_to_torch RUN_DIR/checkpoints/step-00000020 tensors.pt

What is no tensor (the step, the model's shape) is in `extra.json`, of which DCP knows nothing.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.errors import UsageError, communication_errors
from common.launching.all_ranks import from_rank_0, in_touch
from common.parameter import ParameterSpec
from common.process_groups import Mesh


@dataclass
class SavedBox:
    """A box of a named tensor, as one rank holds it.

    name: in the checkpoint, such as `exp_avg/layers.0.mlp.up_proj.weight`. global_shape: of the whole tensor.
    box: (start, stop) along each axis of the whole tensor. What exceeds global_shape is padding, never saved or loaded.
    tensor: the values, of the box's shape, on any device and with any strides.
    owner: this rank saves the box. The owned boxes of all ranks must cover the tensor; equal boxes are written once.
    """

    name: str
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    tensor: torch.Tensor
    owner: bool = True

    def __post_init__(self):
        shape = tuple(stop - start for start, stop in self.box)
        if len(shape) != len(self.global_shape) or shape != tuple(self.tensor.shape):
            raise ValueError(f"{self.name}: shape {tuple(self.tensor.shape)} is not that of the box {self.box}")

    @classmethod
    def of(cls, kind: str, spec: ParameterSpec, tensor: torch.Tensor) -> "list[SavedBox]":
        """The boxes that `tensor` consists of, given its spec.

        `kind` is "parameter", "exp_avg" or "exp_avg_sq". A tensor whose spec says `state` has that kind instead.
        """
        name, shape = f"{'state' if spec.state else kind}/{spec.name}", spec.global_shape
        return [cls(name, shape, box, part, spec.owner) for box, part in spec.boxes(tensor)]


def write(folder: Path, boxes: Iterable[SavedBox], mesh: Mesh) -> None:
    """Each rank writes the boxes that it owns into one file, and rank 0 writes the index `.metadata`.

    All ranks of `mesh` call it together. On all of them it raises UsageError when one cannot write, and ValueError
    when owned boxes overlap or, with several ranks, leave holes.
    """
    import torch.distributed.checkpoint as dcp  # not above: it takes long, and most runs save nothing
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    tensors, items = {}, []
    for box, chunk, tensor in _chunks(boxes):
        index = MetadataIndex(box.name, chunk.offsets)
        if box.owner and index not in tensors:  # a rank may hold a box twice
            data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(box.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            tensors[index] = tensor

    class Planner(dcp.DefaultSavePlanner):  # its global plan keeps one of several equal boxes and refuses overlaps
        def create_local_plan(self):
            return SavePlan(items)

        def resolve_data(self, item):
            return tensors[item.index]

    # Copying ahead would make each background writer open a CUDA context of its own on GPU 0
    writer, planner = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0), Planner(flatten_state_dict=False)
    # DCP's ranks would wait for each other's disks in silence, and one of them may write the whole model
    writer.write_data, finish, index = partial(in_touch, mesh, writer.write_data), writer.finish, []
    writer.finish = lambda *arguments, **options: index.append(partial(finish, *arguments, **options))  # on rank 0
    group = mesh.world.handle
    with clear_errors():
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=not group)
        from_rank_0(mesh, lambda: index[0]())


def read(reader, boxes: Iterable[SavedBox], mesh: Mesh | None = None) -> list[str]:
    """Fill the tensors of `boxes` with what DCP's storage `reader` finds of them, whichever boxes were written.

    All ranks of `mesh` call it together; without a mesh, each process reads on its own. Returns the names of state that
    is missing, and stays as it is. Raises UsageError when another tensor is missing, when one is incomplete or of
    another shape, or a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    wanted, missing = defaultdict(list), []
    for box, chunk, tensor in _chunks(boxes):
        wanted[box.name].append((tuple(box.global_shape), chunk, tensor))

    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            items = []
            for name, held in wanted.items():
                (shape, *_), chunks, tensors = zip(*held)
                saved = self.metadata.state_dict_metadata.get(name)
                if saved is None and name.startswith("state/"):
                    missing.append(name.removeprefix("state/"))
                    continue
                if saved is None:
                    raise UsageError(f"it holds no {name}")
                if tuple(saved.size) != shape:
                    raise UsageError(f"{name} has shape {tuple(saved.size)} there and {shape} in this run")
                found = create_read_items_for_chunk_list(name, saved, chunks)
                if sum(math.prod(item.lengths) for item in found) != sum(tensor.numel() for tensor in tensors):
                    raise UsageError(f"it holds only a part of {name}, or several versions")
                items += found
            return LoadPlan(items)

        def lookup_tensor(self, index):
            return wanted[index.fqn][index.index][2]

    group = mesh.world.handle if mesh else None
    if mesh:  # DCP calls them, and shares their errors
        reader.read_metadata = partial(in_touch, mesh, reader.read_metadata)
        reader.read_data = partial(in_touch, mesh, reader.read_data)
    with clear_errors():
        dcp.load({}, storage_reader=reader, planner=Planner(), process_group=group, no_dist=not group)
    return missing


def _chunks(boxes: Iterable[SavedBox]) -> Iterator[tuple]:
    """Each box that is not all padding, how DCP describes it, and a view of its values without the padding."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    for each in boxes:
        offsets = torch.Size(start for start, _ in each.box)
        inside = tuple(slice(max(0, size - start)) for start, size in zip(offsets, each.global_shape))
        tensor = each.tensor.detach()[inside]
        if tensor.numel():
            yield each, ChunkStorageMetadata(offsets, tensor.shape), tensor


@contextmanager
def clear_errors(what: str = "") -> Iterator[None]:
    """Turn what goes wrong in here into a UsageError of one line that begins with `what`, or a CommunicationError."""
    from torch.distributed.checkpoint.api import CheckpointException

    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP warns a process that is alone
    try:
        with communication_errors():
            try:
                yield
            except CheckpointException as collected:  # from all ranks; every rank raises the lowest one's
                _, (error, _) = min(collected.failures.items())
                raise error from collected
    except (UsageError, OSError) as error:
        raise (type(error) if isinstance(error, UsageError) else UsageError)(f"{what}{error}") from error
    except RuntimeError as error:
        if "unexpected pos" in str(error):  # torch.save's words for a write that the operating system refused
            raise UsageError(f"{what}a file could not be written; is the disk full?") from error
        raise
