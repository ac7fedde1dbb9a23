"""Kernel files without Triton, and the sizes that launches are cut into."""

import importlib
import pkgutil
import sys

import torch

import step08_5d.kernels
from step08_5d.kernels.launching import ceil_div, next_power_of_two, warps_for
from tests.harness.ranks import run_ranks


def test_sizes():
    assert [next_power_of_two(size) for size in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [ceil_div(size, 4) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [warps_for(elements) for elements in (1, 1024, 2048, 2**20)] == [4, 4, 8, 32]


def rank_without_triton() -> str:
    """Import every kernel file as if Triton were not installed, and launch a kernel: the error's message."""
    for name in [name for name in sys.modules if name.startswith("step08_5d.kernels.")]:
        del sys.modules[name]
    sys.modules["triton"] = None
    names = [each.name for each in pkgutil.iter_modules(step08_5d.kernels.__path__)]
    modules = {name: importlib.import_module(f"step08_5d.kernels.{name}") for name in names}
    x, weight = torch.ones(2, 4), torch.ones(4)
    assert not modules["launching"].HAS_TRITON and not modules["launching"].can_launch(x), "Triton is there"
    assert modules["rms_norm"].rms_norm_reference(x, weight, 0.0).equal(x), "the reference needs no Triton"
    try:
        modules["rms_norm"].rms_norm(x, weight, 0.0)
    except ImportError as error:
        return str(error)


def test_without_triton_only_the_launch_of_a_kernel_fails():
    (message,) = run_ranks(1, rank_without_triton)
    assert message.startswith("_forward_kernel is a Triton kernel, and Triton is not installed")
