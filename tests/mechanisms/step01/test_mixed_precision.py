"""Step 1: gradient sums, master weights, loss scaling, clipping and the optimizer, each against an independent form."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from common.config import TrainConfig
from common.errors import UsageError
from common.model import Decoder, cross_entropy_sum
from common.parameter import ParameterSpec
from common.weights.initialisation import materialise, random_values
from step01_single_gpu import train as train_module
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step01_single_gpu.data.batches import load_batches
from step01_single_gpu.experiments.tools import Run
from step01_single_gpu.mixed_precision import GradientSums, LossScaler, Optimizer
from tests.harness.observing import configure, mesh_of
from tests.parity.runs import SMALL, Result, assemble, assert_parity, train_case


def parameter(values, dtype=torch.float32) -> nn.Parameter:
    result = nn.Parameter(torch.tensor(values, dtype=dtype))
    shape = tuple(result.shape)
    result.spec = ParameterSpec("p", shape, tuple((0, size) for size in shape), None)
    return result


def train(flags: str) -> Result:
    """The result of train.py's train(), with two micro-batches a step."""
    return assemble([train_case(1, f"--global-batch 4 --micro-batch 2 --warmup 0 {flags}")])


# ---- Gradients ------------------------------------------------------------------------------------------------


def test_gradients_add_up_narrow_ones_in_float32():
    weight = parameter([1.0, 1.0], torch.bfloat16)
    gradients = GradientSums([weight])
    for value in (256.0, 1.0, 1.0, 1.0):  # bfloat16 would stay at 256: its step there is 2
        (weight * torch.tensor([value, 0.5], dtype=torch.bfloat16)).sum().backward()
        assert weight.grad is None
    (total,) = gradients.finish()
    assert total.dtype == torch.float32 and total.tolist() == [259.0, 2.0]
    assert gradients.finish()[0].tolist() == [0.0, 0.0]  # starts over


def test_unused_parameters_get_zeros_and_none_gradients_are_ignored():
    used, unused, silent = (parameter([1.0, 2.0], torch.bfloat16) for _ in range(3))
    gradients = GradientSums([used, unused, silent])

    class NoGradient(torch.autograd.Function):  # still fires the hook of its argument, with grad None
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: None)

    (used * 3 + NoGradient.apply(silent)).sum().backward()
    total = gradients.finish()
    assert [each.tolist() for each in total] == [[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
    assert all(each.dtype == torch.float32 for each in total)


def test_first_gradient_is_adopted_without_a_copy():
    weight = parameter([1.0, 2.0])
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    gradients = GradientSums([weight])
    (weight * weight).sum().backward()
    assert gradients.finish()[0].data_ptr() == seen[0]


# ---- LossScaler -----------------------------------------------------------------------------------------------


def test_scale_halves_on_overflow_and_doubles_after_the_interval(capsys):
    scaler = LossScaler(torch.float16, interval=3)
    assert scaler.scale == 2**16
    norms = (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0)
    taken, scales = zip(*((scaler.accept(norm), scaler.scale / 2**16) for norm in norms))
    assert taken == (True, True, False, True, True, True, False, True)
    assert scales == (1, 1, 0.5, 0.5, 0.5, 1, 0.5, 0.5)
    for norm in (*[math.nan] * 9, 1.0, *[math.inf] * 6, 1.0):  # 15 halvings in all, from 2^15
        scaler.accept(norm)
    assert scaler.scale == 1 and capsys.readouterr().err == "", "nine in a row may happen"
    scaler.scale = 2.0**16
    for _ in range(16):
        scaler.accept(math.nan)
    assert scaler.scale == 1 and capsys.readouterr().err.startswith("warning: float16 has skipped 10 steps in a row")
    with pytest.raises(UsageError, match="skipped 17 steps in a row, .* loss scale is down to 1; --dtype bfloat16"):
        scaler.accept(math.nan)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scaler = LossScaler(dtype)
        assert scaler.accept(math.inf) and scaler.scale == 1


def test_an_overflowing_step_changes_nothing_but_the_scale():
    run = Run(TrainConfig(dtype="float16", seq_len=16, micro_batch=2, global_batch=2))
    run.scaler.scale = 2.0**30
    before = [p.detach().clone() for p in run.parameters]
    _, norm, taken = run.step()
    assert not taken and not math.isfinite(norm) and run.scaler.scale == 2.0**29
    assert all(torch.equal(p, old) for p, old in zip(run.parameters, before))
    assert run.optimizer.updates == 0
    assert all(not value.any() for state in run.optimizer.inner.state.values() for value in state.values())
    run.scaler.scale = 2.0**10
    assert run.step()[2] and not torch.equal(run.parameters[0], before[0])


def test_unscaled_before_the_clip(monkeypatch):
    """Clipping the scaled gradients would make the step up to 65536 times too small. SGD shows it, Adam hides it."""
    flags = "--optimizer sgd --lr 1 --clip 0.5 --steps 3 --weight-decay 0 --dtype "
    exact, start = train(flags + "float32"), train(flags + "float32 --steps 1 --lr 1e-30").parameters
    assert all(norm > 0.5 for norm in exact.norms)  # so the clip acts

    def distance(others: dict) -> float:
        """Relative to how far the float32 run moved."""
        moved, off = (
            sum(np.square(weights - each[name]).sum() for name, weights in exact.parameters.items())
            for each in (start, others)
        )
        return (off / moved) ** 0.5

    half = train(flags + "float16")
    assert distance(half.parameters) < 0.05
    assert half.norms == pytest.approx(exact.norms, rel=5e-3)
    monkeypatch.setattr(train_module, "clip_factor", lambda norm, limit: clip_factor(norm * 2**16, limit))
    assert distance(train(flags + "float16").parameters) > 0.9


# ---- clip and optimizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, clip", [("adamw", 0.5), ("sgd", 0.5), ("sgd", 100), ("sgd", 0)])
def test_training_equals_a_plain_torch_loop(optimizer, clip):
    """Of which torch clips, and lets only matrices decay."""
    flags = f"--global-batch 4 --micro-batch 2 --steps 4 --lr 3e-3 --warmup 2 --clip {clip} --optimizer {optimizer}"
    ours, config = train(flags), configure(1, f"{SMALL} {flags}")
    model = Decoder(config.model_config)
    materialise(model, torch.float64, torch.device("cpu"), random_values(config.seed))
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in model.parameters()]
    adamw = optimizer == "adamw"
    inner = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5) if adamw else torch.optim.SGD(groups)
    batches, losses, norms = load_batches(config, mesh_of(config)), [], []
    for step in range(4):
        tokens, targets = batches.micro_batch(step, 0, config.global_batch)
        loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        for group in inner.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 2)
        inner.step()
        inner.zero_grad()
    parameters = {p.spec.name: p.detach().numpy() for p in model.parameters()}
    assert_parity(ours, Result(losses, norms, parameters), flags, 1e-12)
    assert all((norm > clip) == (clip < 100) for norm in norms)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_kernel_multiplies_and_skips(optimizer, dtype):
    """A step with a factor is a step with gradients multiplied before; a skipped one changes nothing."""
    values, gradient = torch.linspace(-1, 1, 9), torch.linspace(2, 3, 9, dtype=torch.float64)
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    taken = []
    for given, factors in ((gradient, factor), (gradient * factor, None)):
        weight = parameter(values.tolist(), getattr(torch, dtype))
        inner = Optimizer([weight], TrainConfig(optimizer=optimizer, dtype=dtype))
        wide = inner.masters[0].dtype
        for skip in (None, torch.tensor(1.0), torch.tensor(0.0)):
            before = inner.masters[0].clone()
            inner.step([given.to(wide, copy=True)], 0.1, factors, skip)
            assert torch.equal(inner.masters[0], before) == (skip is not None and skip.item() == 1)
        assert torch.equal(weight.detach(), inner.masters[0].to(weight.dtype))
        taken.append(inner.masters[0].double())
    assert torch.allclose(*taken, rtol=1e-14 if dtype == "float64" else 1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_from_the_norm_to_the_update_the_host_does_not_wait(dtype):
    run = Run(TrainConfig(dtype=dtype, seq_len=16, micro_batch=2, global_batch=2), "cuda")
    run.step()  # makes the optimizer's state
    gradients = run.gradients()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = gradient_norm(run.parameters, gradients, run.mesh.world) / run.scaler.scale
        factor = clip_factor(norm, 1.0) / run.scaler.scale
        run.optimizer.step(gradients, 1e-3, factor, run.scaler.overflow(norm))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_master_weights_add_up_updates_too_small_for_bfloat16():
    """0.001 is less than half of bfloat16's step below 1, which is 0.0039."""
    narrow = parameter([1.0], torch.bfloat16)
    optimizer = Optimizer([narrow], TrainConfig(optimizer="sgd", weight_decay=0.0))
    seen = [(optimizer.step([torch.ones(1)], lr=1e-3), narrow.item())[1] for _ in range(5)]
    assert seen[0] == 1.0 and seen[-1] < 1.0
    assert optimizer.masters[0].item() == pytest.approx(0.995)
    assert (torch.tensor([1.0], dtype=torch.bfloat16) - 1e-3).item() == 1.0  # what it would be without


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_narrow_runs_follow_float32(dtype, tolerance):
    exact, narrow = (train(f"--steps 15 --lr 3e-3 --dtype {each}").losses for each in ("float32", dtype))
    assert exact[-1] < exact[0] - 0.3
    assert narrow == pytest.approx(exact, rel=tolerance)
