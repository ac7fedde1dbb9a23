"""What a case of a kernel is, and random tensors for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from common.layers import at_least_float32

BOTH = "forward and backward"  # in one call, where a kernel does the work of the backward in the forward
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Case:
    """Two functions that do the same to `inputs`, of which they give gradients or which they change, and `settings`.

    gradients: whether autograd knows the backward; else the functions return all there is.
    slack: how many times larger than usual the errors may be.
    work: bytes or FLOPs that a pass needs at least: "backward", BOTH, and any other name is one of the forward.
    pytorch: PyTorch's function, where we take that on some GPUs.
    """

    ours: Callable
    reference: Callable
    inputs: list[Tensor]
    settings: tuple = ()
    gradients: bool = True
    slack: float = 1.0
    work: dict[str, float] = field(default_factory=dict)
    unit: str = "GB/s"
    pytorch: Callable | None = None


class Kernel(NamedTuple):
    """What makes a case, and for which sizes: the first of them in all types; filling no tile; fitting no cache."""

    case: Callable[..., Case]
    sizes: list[tuple]
    checked: tuple = ()  # on a GPU
    timed: tuple = ()  # on a GPU, from layers of Llama 3.2 1B


class Maker:
    """Makes random tensors of one type."""

    def __init__(self, dtype: torch.dtype, device: torch.device = DEVICE, seed: int = 0):
        self.dtype, self.device, self.generator = dtype, device, torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        return torch.randn(shape, device=self.device, dtype=at_least_float32(dtype), generator=self.generator).to(dtype)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, device=self.device, generator=self.generator)
