"""How fast each kernel of step 8 is, beside eager, torch.compile, Liger, PyTorch and a ceiling."""

from collections.abc import Callable

import pytest
import torch

from step08_5d.gpu_ladder.machine import UNITS
from step08_5d.kernels.launching import HAS_TRITON
from tests.gpu_check.findings import on_devices
from tests.gpu_check.timing import ceilings, take_turns
from tests.mechanisms.step08.kernels.case import BOTH, Case, Maker
from tests.mechanisms.step08.kernels.cases import KERNELS
from tests.mechanisms.step08.kernels.compare import tuple_of

ROUNDS = 30
TARGET = 0.8  # of the speed of a copy, for what waits for memory alone
TIMED = [name for name, kernel in KERNELS.items() if kernel.timed]
HEADER = ["kernel", "pass", "unit", "ours", "of the ceiling", "eager", "torch.compile", "Liger", "PyTorch", "target"]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is missing")
@on_devices(TIMED, quick=["swiglu", "cross_entropy", "grouped_matmul of gradients"])
def test_speed(found, item):
    kernel, top = KERNELS[item], ceilings(found.device)
    case = kernel.case(Maker(torch.bfloat16, found.device), *(kernel.sizes[0] if found.quick else kernel.timed))
    for each in case.inputs if case.gradients else ():
        each.requires_grad_()
    for unit, speed in top.items():
        found.note(f"ceiling, {unit}{' in bfloat16' if 'FLOP' in unit else ''}", f"{speed / UNITS[unit]:,.0f}")
    functions = {"ours": case.ours, "eager": case.reference}
    functions |= {"torch.compile": torch.compile(case.reference, dynamic=False)}
    functions |= {"Liger": case.liger, "PyTorch": case.pytorch}
    for which, work in case.work.items():
        contestants = {name: prepared(case, each, which) for name, each in functions.items() if each}
        seconds, errors = take_turns(contestants, 1 if found.quick else ROUNDS)
        for name, error in errors.items():
            found.note(f"{item}, {which}: {name}", error)
        cells = ["-"] * 7
        if top:
            speed = {name: work / took for name, took in seconds.items()}
            numbers = [f"{speed[name] / UNITS[case.unit]:,.0f}" if name in speed else "-" for name in functions]
            share, target = speed.get("ours", 0.0) / top[case.unit], "-"
            if case.unit == "GB/s":
                target = "reached" if share >= TARGET and speed["ours"] >= speed.get("Liger", 0.0) else "missed"
            cells = [numbers[0], f"{share:.0%}", *numbers[1:], target]
        found.row("work per second in bfloat16", HEADER, [item, which, case.unit, *cells])
        assert "ours" not in errors, errors["ours"]


def prepared(case: Case, function: Callable, which: str) -> Callable[[], Callable]:
    """What prepares a forward, a backward, or both."""

    def forward() -> tuple[torch.Tensor, ...]:
        return tuple_of(function(*case.inputs, *case.settings))

    def both() -> None:
        outputs = forward()
        torch.autograd.grad(outputs, case.inputs, [torch.ones_like(each) for each in outputs])

    def backward() -> Callable:
        outputs = forward()
        gradients = [each.detach() for each in outputs]
        return lambda: torch.autograd.grad(outputs, case.inputs, gradients)

    return {"backward": backward, BOTH: lambda: both}.get(which, lambda: forward)
