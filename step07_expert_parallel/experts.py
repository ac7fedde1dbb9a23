"""Products with one matrix for each expert, and the experts made of them.

The rows of an expert are neighbors, so that each of its three matrices multiplies them in one go, however many there
are. PyTorch has a kernel that does so for all experts at once (`grouped_mm`); for types and widths that it does not
take, a loop over the experts does the same.
"""

from collections.abc import Callable
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model import silu_and_multiply
from step04_tensor_parallel.linear import weight_gradient


def to_host(counts: Tensor) -> list[int]:
    """Wait for the device until it has computed `counts`. Nothing else in this layer reads numbers from it."""
    return counts.tolist()


class Counts:
    """How many rows belong to each expert, in rows that are sorted by expert.

    Args:
        on_device: (experts,) int64.
        read: what brings such numbers to the host. Where tensors hold none, as in a dry run, it is another function.
    """

    def __init__(self, on_device: Tensor, read: Callable[[Tensor], list] = to_host):
        self.on_device, self.read = on_device, read

    @cached_property
    def on_host(self) -> list[int]:
        """The same, where Python can read it."""
        return self.read(self.on_device)

    @cached_property
    def ends(self) -> Tensor:
        """Behind the last row of each expert: (experts,) int32, on the device."""
        return self.on_device.cumsum(0, dtype=torch.int32)

    @property
    def rows(self) -> list[slice]:
        """The rows of each expert."""
        return [slice(*ends) for ends in pairwise(accumulate(self.on_host, initial=0))]


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these tensors: not float64, no rows at all, or rows of odd lengths.

    On GPUs it is one kernel on Hopper alone: older ones loop over the experts on the host, and on Blackwell experts
    without rows get wrong gradients (pytorch issue 172439).
    """
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if tensors[0].is_cuda:
        dtypes = (torch.bfloat16,) if torch.cuda.get_device_capability(tensors[0].device) == (9, 0) else ()
    aligned = all(each.shape[-1] * each.element_size() % 16 == 0 for each in tensors)
    return tensors[0].dtype in dtypes and len(tensors[0]) > 0 and aligned


class Kernels(NamedTuple):
    """What may compute, in place of the loops below, the products for which PyTorch has no kernel."""

    multiply: Callable
    multiply_transposed: Callable


def multiply(x: Tensor, matrices: Tensor, counts: Counts, kernels: Kernels | None = None) -> Tensor:
    """The rows of each expert times its matrix: x (rows, in), matrices (experts, in, out) -> (rows, out)."""
    if _has_kernel(x, matrices, matrices.mT):
        return F.grouped_mm(x, matrices, offs=counts.ends)
    if kernels:
        return kernels.multiply(x, matrices, counts)
    out = x.new_empty(len(x), matrices.shape[-1])
    for rows, matrix in zip(counts.rows, matrices, strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def multiply_transposed(y: Tensor, x: Tensor, counts: Counts, kernels: Kernels | None = None) -> Tensor:
    """The transposed rows of each expert in y times those in x: (rows, out), (rows, in) -> (experts, out, in)."""
    if _has_kernel(y, x):
        return F.grouped_mm(y.T, x, offs=counts.ends)
    if kernels:
        return kernels.multiply_transposed(y, x, counts)
    out = x.new_empty(len(counts.on_device), y.shape[-1], x.shape[-1])
    for rows, matrix in zip(counts.rows, out, strict=True):
        torch.mm(y[rows].T, x[rows], out=matrix)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, kernels):
        ctx.weight, ctx.counts, ctx.kernels = weight, counts, kernels
        ctx.save_for_backward(x)
        return multiply(x, weight.mT, counts, kernels)

    @staticmethod
    def backward(ctx, gradient):
        (x,), gradient = ctx.saved_tensors, gradient.contiguous()  # the kernel takes no expanded tensor
        weight, counts, kernels = ctx.weight, ctx.counts, ctx.kernels
        dw = weight_gradient(weight, gradient, x, partial(multiply_transposed, counts=counts, kernels=kernels))
        return multiply(gradient, weight, counts, kernels), dw, None, None


class Experts(nn.Module):
    """SwiGLUs of the same width, each for the rows of one expert."""

    def __init__(self, count: int, hidden: int, ffn: int):
        super().__init__()
        self.activation, self.kernels = silu_and_multiply, None
        self.gate_proj = nn.Parameter(torch.empty(count, ffn, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, ffn))

    def forward(self, x, counts):  # (rows, hidden), sorted by expert -> (rows, hidden)
        gate = _GroupedLinear.apply(x, self.gate_proj, counts, self.kernels)
        up = _GroupedLinear.apply(x, self.up_proj, counts, self.kernels)
        return _GroupedLinear.apply(self.activation(gate, up), self.down_proj, counts, self.kernels)
