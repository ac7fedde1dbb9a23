"""Products with one matrix for each expert, and the experts made of them.

The rows of an expert are neighbors, so that each of its three matrices multiplies them in one go, however many there
are. PyTorch has a kernel that does so for all experts at once (`grouped_mm`); for types and widths that it does not
take, a loop over the experts does the same.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model import silu_and_multiply
from step04_tensor_parallel.linear import linear


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


def has_kernel(*tensors: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these tensors: not float64, no rows at all, or rows of odd lengths.

    On GPUs it is one kernel on Hopper alone: older ones loop over the experts on the host, and on Blackwell experts
    without rows get wrong gradients (pytorch issue 172439).
    """
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if tensors[0].is_cuda:
        dtypes = (torch.bfloat16,) if torch.cuda.get_device_capability(tensors[0].device) == (9, 0) else ()
    aligned = all(each.shape[-1] * each.element_size() % 16 == 0 for each in tensors)
    return tensors[0].dtype in dtypes and len(tensors[0]) > 0 and aligned


def multiply(x: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    """The rows of each expert times its matrix: x (rows, in), matrices (experts, in, out) -> (rows, out)."""
    if has_kernel(x, matrices, matrices.mT):
        return F.grouped_mm(x, matrices, offs=counts.ends)
    out = x.new_empty(len(x), matrices.shape[-1])
    for rows, matrix in zip(counts.rows, matrices, strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def multiply_transposed(y: Tensor, x: Tensor, counts: Counts) -> Tensor:
    """The transposed rows of each expert in y times those in x: (rows, out), (rows, in) -> (experts, out, in)."""
    if has_kernel(y, x):
        return F.grouped_mm(y.T, x, offs=counts.ends)
    out = x.new_empty(len(counts.on_device), y.shape[-1], x.shape[-1])
    for rows, matrix in zip(counts.rows, out, strict=True):
        torch.mm(y[rows].T, x[rows], out=matrix)
    return out


class Grouped:
    """`Dense` for a weight (experts, out, in) and rows that are sorted by expert."""

    @staticmethod
    def output(x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """x (rows, in) -> (rows, out)."""
        return multiply(x, weight.mT, counts)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """gradient (rows, out) -> (rows, in)."""
        return multiply(gradient.contiguous(), weight, counts)  # the kernel takes no expanded tensor

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, counts: Counts) -> Tensor:
        """(rows, out) and (rows, in) -> (experts, out, in)."""
        return multiply_transposed(gradient.contiguous(), x, counts)


class Experts(nn.Module):
    """SwiGLUs of the same width, each for the rows of one expert."""

    def __init__(self, count: int, hidden: int, ffn: int):
        super().__init__()
        self.activation = silu_and_multiply
        self.gate_proj = nn.Parameter(torch.empty(count, ffn, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, ffn))

    def forward(self, x, counts):  # (rows, hidden), sorted by expert -> (rows, hidden)
        gate = linear(x, self.gate_proj, counts, default=Grouped)
        up = linear(x, self.up_proj, counts, default=Grouped)
        return linear(self.activation(gate, up), self.down_proj, counts, default=Grouped)
