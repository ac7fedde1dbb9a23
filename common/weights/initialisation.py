"""Initial values: every rank draws just the boxes that it holds, and all layouts get the same model."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from common.parameter import ParameterSpec

CHUNK = 1 << 22  # elements drawn at once, so that temporaries are small even for a large tensor
InitialValues = Callable[[Iterable[torch.Tensor]], None]  # fills tensors that have specs


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device, values: InitialValues) -> None:
    """Give memory and initial values to the parameters of a module that was built on the meta device."""
    allocate_parameters(module, lambda parameter: torch.empty(parameter.shape, dtype=dtype, device=device))
    values(list(module.parameters()))


def allocate_parameters(module: nn.Module, allocate: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Replace every parameter of a module on the meta device by one whose memory is the tensor `allocate(parameter)`.

    A parameter that two modules share (tied) is allocated once and still shared. Its attributes stay, such as the spec,
    and so does what is frozen.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        values = allocate(parameter)
        # set as `.data`, so that autograd does not take later writes to the memory behind it for changes of the weight
        empty = torch.empty(0, dtype=values.dtype, device=values.device)
        made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        made[parameter].data = values
        for name, value in vars(parameter).items():
            vars(made[parameter]).setdefault(name, value)  # fake tensors keep a device of their own there
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = made[parameter]


def values_from(weights: Mapping[str, torch.Tensor]) -> InitialValues:
    """A function that fills tensors from whole weights, by the names in their specs: a `state_dict`, for example."""

    @torch.no_grad()
    def fill(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for box, part in tensor.spec.boxes(tensor):
                part.copy_(weights[tensor.spec.name][tuple(slice(*each) for each in box)])

    return fill


def random_values(seed: int) -> InitialValues:
    """A function that fills each tensor from the normal distribution that its spec asks for, alike in all layouts."""

    @torch.no_grad()
    def fill(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for box, part in tensor.spec.boxes(tensor):
                part.copy_(random_box(replace(tensor.spec, box=box, flat_range=None), seed, tensor.device))

    return fill


def random_box(spec: ParameterSpec, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Initial values of `spec.box` in float32, the same in every layout.

    Element i of a tensor is a function of (seed, name, i) alone. SplitMix64 (Steele, Lea, Flood 2014) turns the counter
    i, started at a hash of seed and name, into 64 random bits, and the inverse normal distribution into a sample.
    """
    result = torch.zeros([stop - start for start, stop in spec.box], dtype=torch.float32, device=device)
    inside = [max(0, min(stop, size) - start) for (start, stop), size in zip(spec.box, spec.global_shape, strict=True)]
    others = [slice(size) for size in inside[1:]]  # beyond is padding
    if spec.init_std is None:
        result[(slice(inside[0]), *others)] = 1.0
        return result
    digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    parts = []  # of the index i, along each axis
    for axis, ((start, _), size) in enumerate(zip(spec.box, inside)):
        stride = math.prod(spec.global_shape[axis + 1 :])
        parts.append(torch.arange(start, start + size, dtype=torch.int64, device=device) * stride)
    rows = max(1, CHUNK // max(1, math.prod(inside[1:])))
    for first in range(0, inside[0], rows):
        index = parts[0][first : first + rows]
        last = first + len(index)
        for part in parts[1:]:
            index = index.unsqueeze(-1) + part
        result[(slice(first, last), *others)] = _normal(index, key) * spec.init_std
    return result


def _signed(value: int) -> int:
    """A 64-bit constant as torch's int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's int64 has only the arithmetic one."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _normal(index: torch.Tensor, key: int) -> torch.Tensor:
    """Standard normal samples (float32) for counters `index` (int64) under `key`."""
    bits = (index + 1) * _signed(0x9E3779B97F4A7C15) + key  # int64 arithmetic wraps, as the generator requires
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift_right(bits, 31)
    uniform = (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return torch.special.ndtri(uniform).to(torch.float32)
