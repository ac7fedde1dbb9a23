"""AdamW in one pass: the kernel against the `Optimizer` of step 1, and against the reference beside it."""

import pytest
import torch
from torch import nn

from common.config import TrainConfig
from common.model import at_least_float32
from common.parameter import attach_specs
from step01_single_gpu.mixed_precision import Optimizer
from step08_5d.kernels.adamw import adamw, adamw_reference
from tests.mechanisms.step08.kernels.compare import DEVICE, BytesMoved, difference, needs_triton, random

LLAMA = {"betas": (0.9, 0.95), "eps": 1e-5}  # as in step 1
# The narrow copies may differ by the last digit where the masters lie on either side of a middle
CASES = {"float64": (torch.float64, 1e-14), "float32": (torch.float32, 1e-6), "bfloat16": (torch.bfloat16, 1e-6)}


def scalar(value: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE, dtype=dtype)


def both(dtype: torch.dtype) -> tuple[Optimizer, dict[str, torch.Tensor]]:
    """The Optimizer of step 1 for one matrix of 37 x 29, and the same tensors for the kernel."""
    model = nn.Linear(29, 37, bias=False, device=DEVICE, dtype=dtype)
    attach_specs(model, {"": 0.02})
    model.weight.data.copy_(random(37, 29))
    optimizer = Optimizer([model.weight], TrainConfig(dtype=str(dtype).split(".")[1], weight_decay=0.1))
    master = optimizer.masters[0].detach().clone()
    ours = {"master": master, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
    return optimizer, ours | {"copy": model.weight.detach().clone() if dtype != master.dtype else None}


@needs_triton
@pytest.mark.parametrize("function", [adamw, adamw_reference])
@pytest.mark.parametrize("dtype,tolerance", CASES.values(), ids=CASES)
def test_same_as_step_1(dtype, tolerance, function):
    optimizer, ours = both(dtype)
    wide, step = at_least_float32(dtype), scalar(0)
    for update in range(4):
        gradient = random(37, 29, seed=10 + update).to(wide) * 10 ** (update - 2)
        lr, factor, skip = 1e-2 / (1 + update), scalar(0.3 + update, wide), scalar(float(update == 1))
        skipping = None if dtype == torch.float64 else skip
        step += 1 - skip if skipping is not None else 1
        function(**ours, gradient=gradient.clone(), step=step, lr=scalar(lr, wide), factor=factor, skip=skipping,
                 weight_decay=0.1, **LLAMA)  # fmt: skip
        optimizer.step([gradient], lr, factor, skipping)
        (master,), (weight,) = optimizer.masters, optimizer.parameters
        state = optimizer.inner.state[master]
        assert difference(ours["master"], master) < tolerance
        assert all(difference(ours[name], state[name]) < tolerance for name in ("exp_avg", "exp_avg_sq"))
        assert state["step"] == step
        if ours["copy"] is not None:
            assert difference(ours["copy"], weight) < 8e-3 and ours["copy"].dtype == dtype


def shard(size: int, dtype: torch.dtype, copy: torch.dtype | None) -> dict[str, torch.Tensor]:
    tensors = {name: random(size, dtype=dtype, seed=seed) for seed, name in enumerate(("master", "exp_avg"))}
    tensors["exp_avg_sq"] = random(size, dtype=dtype, seed=2).square()
    return tensors | {"copy": None if copy is None else torch.zeros(size, dtype=copy, device=DEVICE)}


@needs_triton
@pytest.mark.parametrize("size", [0, 1, 1024, 2500])
@pytest.mark.parametrize("dtype,narrow", [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)])
def test_narrow_gradients_and_every_size(size, dtype, narrow):
    ours, theirs = shard(size, dtype, narrow), shard(size, dtype, narrow)
    gradient = random(size, dtype=narrow, seed=5)
    for function, tensors in ((adamw, ours), (adamw_reference, theirs)):
        function(**tensors, gradient=gradient, step=scalar(3), lr=scalar(0.1), weight_decay=0.0, **LLAMA)
    for name, tolerance in {"master": 1e-6, "exp_avg": 1e-6, "exp_avg_sq": 1e-6, "copy": 8e-3}.items():
        assert difference(ours[name], theirs[name]) < tolerance, name


@needs_triton
def test_a_skipped_update_changes_nothing():
    ours, before = shard(9, torch.float32, torch.float16), shard(9, torch.float32, torch.float16)
    gradient = torch.full((9,), torch.nan, device=DEVICE)
    adamw(**ours, gradient=gradient, step=scalar(1), lr=scalar(0.1), factor=scalar(torch.nan), skip=scalar(1.0),
          weight_decay=0.1, **LLAMA)  # fmt: skip
    assert all(ours[name].equal(before[name]) for name in ours)


def test_eager_bytes():
    with torch.device("meta"):
        tensors = {name: torch.empty(4096) for name in ("master", "exp_avg", "exp_avg_sq", "gradient")}
        tensors["copy"] = torch.empty(4096, dtype=torch.bfloat16)
        scalars = {name: torch.empty(()) for name in ("step", "lr", "factor")}
        with BytesMoved() as moved:
            adamw_reference(**tensors, **scalars, weight_decay=0.1, **LLAMA)
    assert moved.total // 4096 == 118
