"""What a student's file hides from the notes behind features of PyTorch: it is counted all the same, or refused."""

import pytest
import torch

from common.labs.closed import Closed, is_refusal
from common.labs.seen import Watching
from tests.labs.test_notes import student_of

HEAD = """import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

x, y = torch.ones(2, 3), torch.ones(3, 4)

def work(*_):
    return x @ y

class Box(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (1,))
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return work()

class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        work()
        return super().__torch_function__(function, types, args, kwargs or {})

class Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, dy):
        work()
        return dy

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.neg.default:
            work()
        return function(*args, **(kwargs or {}))

class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.neg:
            work()
        return function(*args, **(kwargs or {}))

below = Mode()
"""
COUNTED = {  # what does the product of 2 x 3 by 3 x 4 once
    "an operator of a tensor of its own": "torch.neg(Box())",
    "one among others": "torch.cat([x[0], Box()])",
    "a function of a tensor of its own": "torch.neg(torch.ones(1).as_subclass(Named))",
    "a backward": "Call.apply(torch.ones(1, requires_grad=True)).backward()",
    "a hook": "z = torch.ones(1, requires_grad=True); z.register_hook(lambda _: 0 * work()[:1, 0]); z.sum().backward()",
    "a mode": "with Mode(): torch.neg(x)",
    "a mode of functions": "with Function(): torch.neg(x)",
    "inference": "with torch.inference_mode(): work()",
    "inference in a mode": "with torch.inference_mode(), Mode(): torch.neg(x)",
    "no gradients": "with torch.no_grad(): work()",
    "einsum": "with torch.inference_mode(): torch.einsum('ij,jk->ik', x, y)",
    "a map": "torch.vmap(lambda row: row @ y)(x)",
    "a checkpoint": "torch.utils.checkpoint.checkpoint(work, x, use_reentrant=False)",
    "a vector": "torch.addmv(torch.ones(6), torch.ones(6, 4), torch.ones(4))",
    "a sum of products": "torch.addbmm(torch.ones(2, 4), x[None], y[None])",
}


@pytest.mark.parametrize("way", COUNTED)
def test_counted(way, tmp_path):
    student = student_of(tmp_path / "student.py", f"{HEAD}def run():\n    {COUNTED[way]}\n")
    with Watching(student.__file__) as notes:
        student.run()
    assert (notes.products, notes.multiplied) == (1, 24)


def test_memory_of_an_operator_of_a_tensor_is_counted(tmp_path):
    code = HEAD.replace("return x @ y", "return torch.ones(1000) + 1")
    student = student_of(tmp_path / "student.py", f"{code}def run():\n    torch.neg(Box())\n")
    with Watching(student.__file__) as notes:
        student.run()
    assert notes.peak == 8000


@pytest.mark.parametrize("way", ["a mode below", "a mode in the place of PyTorch's own", "an operator of its own"])
def test_refused(way, tmp_path):
    code = f"""{HEAD}
@torch.library.custom_op('labs_test::{tmp_path.name}', mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    work()
    return x.clone()
def run():
    operator(x) if {way == "an operator of its own"} else torch.neg(x)
"""
    student, said = student_of(tmp_path / "student.py", code), []

    def refuse(why):
        said.append(why)
        raise Closed(why)

    below = student.below
    if "place" in way:
        below._mode_key = torch._C._TorchDispatchModeKey.FAKE
    if "mode" in way:
        below.__enter__()
    try:
        with Watching(student.__file__, refuse=refuse) as notes, pytest.raises(Closed):
            student.run()
    finally:
        if "mode" in way:
            below.__exit__(None, None, None)
    assert is_refusal(said[0]) and notes.products == 0
