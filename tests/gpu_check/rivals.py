"""What Liger Kernel and PyTorch have for the kernels of step 8, to be timed beside ours."""

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.mechanisms.step08.kernels.case import Case
from tests.mechanisms.step08.kernels.cases import EPS


def rivals(name: str, case: Case) -> dict[str, Callable]:
    """By library, a function that computes what a case of KERNELS does from inputs and settings, if there is one."""
    found = {"Liger": of_liger(name), "PyTorch": of_pytorch(name, case)}
    return {library: function for library, function in found.items() if function}


def of_liger(name: str) -> Callable | None:
    if name == "rms_norm":
        return liger("rms_norm", eps=EPS, in_place=False)
    if name == "add_rms_norm":
        return liger("fused_add_rms_norm", eps=EPS, in_place=False)
    if name == "swiglu":
        return liger("swiglu")
    if name == "rotary":
        theirs = liger("rope")
        return theirs and (lambda q, k, cos, sin: theirs(q, k, cos[None].to(q.dtype), sin[None].to(q.dtype)))
    if name == "cross_entropy":
        theirs = liger("cross_entropy", reduction="sum")
        return theirs and (lambda logits, targets: theirs(logits.flatten(0, 1), targets.flatten()))
    if name == "linear_cross_entropy":
        theirs = liger("fused_linear_cross_entropy", reduction="sum")
        return theirs and (lambda x, weight, targets: theirs(x.flatten(0, 1), weight, targets.flatten()))
    return None


def liger(name: str, **settings) -> Callable | None:
    """A function of Liger Kernel, or None where that is not installed or has none."""
    try:
        function = getattr(importlib.import_module("liger_kernel.transformers.functional"), f"liger_{name}", None)
    except ImportError:
        return None
    return function and functools.partial(function, **settings)


def of_pytorch(name: str, case: Case) -> Callable | None:
    if name == "rms_norm":
        return lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)
    if name == "adamw":
        return fused_adamw(case.inputs[0], case.settings[2])
    return case.pytorch


def fused_adamw(like: Tensor, factor: Tensor) -> Callable:
    """PyTorch's update of a tensor like this one, which then has to be copied, too."""
    inner = torch.optim.AdamW([torch.zeros_like(like)], fused=True)
    inner.grad_scale = 1 / factor

    def update(master, exp_avg, exp_avg_sq, gradient, copy, *_):
        (theirs,) = inner.param_groups[0]["params"]
        theirs.grad = gradient
        inner.step()
        copy.copy_(theirs)

    return update
