"""ParameterSpec: one description that follows a parameter through initialisation, reduction, clipping, checkpoints,
export.

Each parallel technique edits the spec, and nothing else has to know the technique.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from common import collectives
from common.config import UsageError
from common.process_groups import Group, Mesh

ROW = 1 << 14  # elements of a gradient whose squares are added up in one go on the CPU
CHUNK = 1 << 22  # elements drawn at once, so that temporaries stay small however large the tensor is


@dataclass
class ParameterSpec:
    """What a parameter is in the whole, single-process model, and which part of it this rank holds.

    name: in the whole model; the same on every rank that holds a part.
    global_shape: shape there. Rows of `box` beyond it are padding: zero, never saved, exported or counted.
    box: (start, stop) along each axis of the whole tensor: the slice that this rank holds.
    init_std: standard deviation of the initial normal distribution; None: ones.
    shard_group: name of the mesh group over which its gradient is reduced (and over which ZeRO shards it).
    extra_groups: names of further groups over which its gradient is a partial sum.
    owner: this rank counts and saves the elements (the lowest rank of every set of replicas).
    piece: [start, stop) of the flattened box, for a one-dimensional tensor that holds these elements and no others (as
        ZeRO shards do); None: the whole box, in its shape.
    """

    name: str
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    init_std: float | None
    shard_group: str = "dp_cp"
    extra_groups: tuple[str, ...] = ()
    owner: bool = True
    piece: tuple[int, int] | None = None

    def boxes(self, tensor: torch.Tensor) -> list[tuple["Box", torch.Tensor]]:
        """The boxes of the whole tensor that `tensor`, which this spec describes, consists of, with views of them."""
        if self.piece is None:
            return [(self.box, tensor)]
        origin, found, done = [start for start, _ in self.box], [], 0
        for local in _flat_boxes([stop - start for start, stop in self.box], *self.piece):
            shape = [stop - start for start, stop in local]
            box = tuple((low + start, low + stop) for low, (start, stop) in zip(origin, local, strict=True))
            found.append((box, tensor[done : done + math.prod(shape)].view(shape)))
            done += math.prod(shape)
        return found

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, not to the gains of norms (which have one axis)."""
        return len(self.global_shape) > 1


Box = tuple[tuple[int, int], ...]


def _flat_boxes(shape: list[int], start: int, stop: int) -> list[list[tuple[int, int]]]:
    """Boxes, in order, that cover [start, stop) of a flattened tensor: at most 2 * len(shape) - 1 of them."""
    if len(shape) == 1:
        return [[(start, stop)]] if start < stop else []
    row, found = math.prod(shape[1:]), []
    while start < stop:
        index, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:  # whole rows
            found.append([(index, stop // row), *((0, size) for size in shape[1:])])
            start = stop // row * row
        else:  # a part of one row
            end = min(stop, (index + 1) * row)
            found += [[(index, index + 1), *box] for box in _flat_boxes(shape[1:], inside, end - index * row)]
            start = end
    return found


def describe(module: nn.Module, init_std: dict[str, float | None]) -> None:
    """Give every parameter of a single-process `module` its spec; `init_std` is looked up by the end of the name."""
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        std = next(value for suffix, value in init_std.items() if name.endswith(suffix))
        parameter.spec = ParameterSpec(name, shape, tuple((0, size) for size in shape), std)


def materialise(
    module: nn.Module, seed: int, dtype: torch.dtype, device: torch.device, init_from: str | None = None
) -> None:
    """Replace the parameters of a module built on the meta device by initial values, in place.

    Each rank draws the boxes that it holds and nothing else, or reads them from the Hugging Face weights `init_from`.
    Raises UsageError when they do not fit into memory.
    """
    with enough_memory(module, device):
        place(module, lambda parameter: torch.empty(parameter.shape, dtype=dtype, device=device))
        fill(module, list(module.parameters()), seed, init_from)


@contextmanager
def enough_memory(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Turns an allocation of `module`'s parameters that fails in here into a UsageError."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, the CPU's allocator has no type of its own
        if "allocate" not in str(error):
            raise
        count = sum(parameter.numel() for parameter in module.parameters())
        raise UsageError(f"the model's {count:,} parameters do not fit into the memory of {device}") from None


def place(module: nn.Module, allocate: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Replace every parameter of a module built on the meta device by one that lies in `allocate(parameter)`.

    A parameter that occurs twice (tied) stays one.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        values = allocate(parameter)
        made[parameter] = nn.Parameter(torch.empty(0, dtype=values.dtype, device=values.device))
        made[parameter].data = values
        made[parameter].spec = parameter.spec
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = made[parameter]


@torch.no_grad()
def fill(module: nn.Module, tensors: Iterable[torch.Tensor], seed: int, init_from: str | None = None) -> None:
    """Give `tensors`, whose specs are those of (parts of) `module`'s parameters, their initial values.

    They are drawn, in float32, or read from the Hugging Face weights `init_from`.
    """
    if init_from is not None:
        from common.huggingface import load_weights

        load_weights(module, init_from, tensors)
        return
    for tensor in tensors:
        for box, part in tensor.spec.boxes(tensor):
            part.copy_(draw(replace(tensor.spec, box=box, piece=None), seed, tensor.device))


def draw(spec: ParameterSpec, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Initial values of `spec.box` in float32, whatever slice it is and whatever the layout of the run.

    Element i of a tensor is a function of (seed, name, i) alone: SplitMix64 (Steele, Lea, Flood 2014) turns the counter
    i, started at a hash of seed and name, into 64 random bits, and the inverse normal distribution function into a
    sample.
    """
    box_shape = tuple(stop - start for start, stop in spec.box)
    inside = tuple(
        max(0, min(stop, size) - start) for (start, stop), size in zip(spec.box, spec.global_shape, strict=True)
    )
    result = torch.zeros(box_shape, dtype=torch.float32, device=device)
    if spec.init_std is None:
        result[tuple(slice(size) for size in inside)] = 1.0
        return result
    digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    columns = math.prod(inside[1:])
    rows = max(1, CHUNK // max(1, columns))
    for first in range(0, inside[0], rows):
        last = min(first + rows, inside[0])
        index = torch.zeros((1,) * len(inside), dtype=torch.int64, device=device)
        for axis, ((start, _), size) in enumerate(zip(spec.box, inside, strict=True)):
            low, high = (start + first, start + last) if axis == 0 else (start, start + size)
            stride = math.prod(spec.global_shape[axis + 1 :])
            positions = torch.arange(low, high, dtype=torch.int64, device=device) * stride
            index = index + positions.view([-1 if other == axis else 1 for other in range(len(inside))])
        result[(slice(first, last), *(slice(size) for size in inside[1:]))] = _normal(index, key) * spec.init_std
    return result


def _signed(value: int) -> int:
    """A 64-bit constant as torch's int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's int64 has only the arithmetic one."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _normal(index: torch.Tensor, key: int) -> torch.Tensor:
    """Standard normal samples (float32) for counters `index` (int64) under `key`."""
    bits = (index + 1) * _signed(0x9E3779B97F4A7C15) + key  # int64 arithmetic wraps, as the generator wants it
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift_right(bits, 31)
    uniform = (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return torch.special.ndtri(uniform).to(torch.float32)


def sum_extra_groups(parameters: list[torch.Tensor], gradients: list[torch.Tensor], mesh: Mesh) -> None:
    """Add up, in place, the gradients of which the ranks of another group hold summands too: `spec.extra_groups`.

    After the sum over the data-parallel ranks; sums commute. One all-reduce for each such group. A rank may itself hold
    several copies of a parameter (step 5: both ends of a model with one matrix for both), whose gradients are summands
    as well. Ranks that hold the same parameters in another order agree on that of their names.
    """
    for name in sorted({name for parameter in parameters for name in parameter.spec.extra_groups}):
        held: dict[tuple, list[torch.Tensor]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if name in parameter.spec.extra_groups:
                held.setdefault((parameter.spec.name, parameter.spec.piece or ()), []).append(gradient)
        partial = [held[key] for key in sorted(held)]
        joined = torch.cat([sum(copies[1:], copies[0]).flatten() for copies in partial])
        collectives.all_reduce(joined, getattr(mesh, name))
        parts = joined.split([copies[0].numel() for copies in partial])
        pairs = [(copy, part.view_as(copy)) for part, copies in zip(parts, partial, strict=True) for copy in copies]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def gradient_norm(parameters: list[torch.Tensor], gradients: list[torch.Tensor], world: Group) -> torch.Tensor:
    """Global 2-norm of the gradient, the same 0-d float64 tensor on every rank.

    Every rank sums the squares of the elements that it owns; one all-reduce adds them up. `gradients` are the finished
    ones (already reduced), one for each parameter, which need no more than a spec.
    """
    owned = [gradient for parameter, gradient in zip(parameters, gradients, strict=True) if parameter.spec.owner]
    norms = torch.cat([norm.view(-1) for norm in _norms(owned)]) if owned else torch.zeros(0)
    total = norms.to(gradients[0].device, torch.float64).square().sum()
    collectives.all_reduce(total, world)
    return total.sqrt()


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """2-norms of all elements, in parts: their squares add up. In at least float32.

    The CPU adds up a whole tensor in a few running sums, which in float32 rounds more the longer it is; rows of bounded
    length do not.
    """
    dtype, norms, rest = torch.promote_types(tensors[0].dtype, torch.float32), [], tensors
    if not tensors[0].is_cuda:  # whose sums are trees
        rest = []
        for flat in (tensor.flatten() for tensor in tensors):
            rows = flat.numel() // ROW
            if rows:
                norms.append(torch.linalg.vector_norm(flat[: rows * ROW].view(rows, ROW), dim=1, dtype=dtype))
            if rows * ROW < flat.numel():
                rest.append(flat[rows * ROW :])
    return norms + list(torch._foreach_norm(rest, dtype=dtype) if rest else [])
