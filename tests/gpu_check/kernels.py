"""The kernels of step 8: right in bfloat16 and float32, and how fast beside PyTorch's and Liger's."""

import math
from collections.abc import Callable

import torch

from step08_5d.gpu_ladder.machine import UNITS, difference
from step08_5d.kernels.launching import can_launch
from tests.gpu_check.findings import Findings
from tests.gpu_check.kernel_cases import BOTH, CASES, CHECKED, TIMED, TINY, Case, Maker
from tests.gpu_check.rows import measure_rows
from tests.gpu_check.timing import ceilings, take_turns

BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of ||a - b|| / ||b||, for any output or gradient
ROUNDS = 30
TARGET = 0.8  # of the speed of a copy, for what waits for memory alone
TIME = 90  # seconds for a kernel, with all compilers
HEADER = ["kernel", "pass", "unit", "ours", "of the ceiling", "eager", "torch.compile", "Liger", "PyTorch", "target"]


def kernels(found: Findings) -> None:
    """Each kernel of step 8 against its formula: right, and its speed beside eager, torch.compile, Liger, PyTorch."""
    if not can_launch(torch.empty(0, device=found.device)):
        found.check("skipped", True, "Triton is missing, or launches nothing on this device")
        return
    measure_rows(found, __name__, list(CASES), TIME)


def measure(found: Findings, name: str) -> None:
    """Check a kernel, and time it."""
    for dtype, bound in BOUNDS.items():
        case = CASES[name](Maker(found.device, dtype), TINY if found.quick else CHECKED)
        functions = {name: case.ours}
        if dtype == torch.bfloat16 and case.default:  # what PyTorch multiplies in no other type
            functions |= {f"{name} of PyTorch": case.pytorch}
        for each, function in functions.items():
            worst = error_of(case, function)
            found.check(f"{each}, {str(dtype)[6:]}: as in float64 within {bound:g}", worst < bound, f"{worst:.1e}")
    size = TINY if found.quick else TIMED
    case = CASES[name](Maker(found.device, torch.bfloat16), size)
    for each in case.inputs if case.has_gradients else ():
        each.requires_grad_()
    top = ceilings(found.device)
    for kind, speed in top.items():
        title = f"ceiling, {kind} in bfloat16" if kind == "TFLOP/s" else f"ceiling, {kind}"
        if all(line["what"] != title for line in found.lines):
            found.note(title, f"{speed / UNITS[kind]:,.0f}")
    for which, work in case.work.items():
        found.row(
            f"work per second in bfloat16, {size}",
            HEADER,
            [name, which, case.unit, *speeds(found, name, case, which, work)],
        )


def error_of(case: Case, function: Callable) -> float:
    """The largest difference of any output or gradient of a function from what the formula gives in float64."""

    def wide(value):
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    exact = results(case, case.eager, [wide(each).detach() for each in case.inputs], map(wide, case.settings))
    found = results(case, function, [each.detach().clone() for each in case.inputs], case.settings)
    differences = [difference(ours, theirs) for ours, theirs in zip(found, exact, strict=True)]
    return max(math.inf if math.isnan(each) else each for each in differences)


def results(case: Case, function: Callable, inputs: list, settings) -> list[torch.Tensor]:
    """The outputs and, where the kernel has a backward, the gradients for random ones of the outputs."""
    if not case.has_gradients:
        return _tuple(function(*inputs, *settings))
    outputs = _tuple(function(*[each.requires_grad_() for each in inputs], *settings))
    make = Maker(outputs[0].device, case.inputs[0].dtype)
    gradients = [make(*each.shape).to(each.dtype) for each in outputs]
    return [*(each.detach().clone() for each in outputs), *torch.autograd.grad(outputs, inputs, gradients)]


def _tuple(outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def speeds(found: Findings, name: str, case: Case, which: str, work: float) -> list[str]:
    """The cells of a pass behind the unit."""
    functions = {"ours": case.ours, "eager": case.eager, "torch.compile": torch.compile(case.eager, dynamic=False)}
    functions |= {"Liger": case.liger, "PyTorch": case.pytorch}
    there = {each: _pass(case, function, which) for each, function in functions.items() if function}
    seconds, errors = take_turns(there, found.device, 1 if found.quick else ROUNDS)
    for each, error in errors.items():
        found.check(f"{name}, {which}: {each}", False if each == "ours" else None, error)
    top = ceilings(found.device).get(case.unit)
    if top is None:
        return ["-"] * (len(HEADER) - 3)
    speed = {each: work / took for each, took in seconds.items()}
    cells = {each: f"{speed[each] / UNITS[case.unit]:,.0f}" if each in speed else "-" for each in functions}
    share, target = speed.get("ours", 0.0) / top, "-"
    if case.unit == "GB/s":
        target = "reached" if share >= TARGET and speed["ours"] >= speed.get("Liger", 0.0) else "missed"
    return [cells.pop("ours"), f"{share:.0%}", *cells.values(), target]


def _pass(case: Case, function: Callable, which: str) -> Callable[[], Callable]:
    """What prepares a forward, a backward, or both."""

    def forward() -> tuple[torch.Tensor, ...]:
        return _tuple(function(*case.inputs, *case.settings))

    def both() -> None:
        outputs = forward()
        torch.autograd.grad(outputs, case.inputs, [torch.ones_like(each) for each in outputs])

    def backward() -> Callable:
        outputs = forward()
        gradients = [each.detach() for each in outputs]
        return lambda: torch.autograd.grad(outputs, case.inputs, gradients)

    return {"backward": backward, BOTH: lambda: both}.get(which, lambda: forward)
