"""Step 1: gradient sums, master weights, loss scaling, clipping and the optimizer, each against an independent form."""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from common.command_line import parse
from common.config import TrainConfig
from common.data.batches import load_batches
from common.model import Decoder, cross_entropy_sum
from common.parameter import ParameterSpec
from common.process_groups import Degrees, build_mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu import train as train_module
from step01_single_gpu.experiments.tools import Run
from step01_single_gpu.mixed_precision import GradientSums, LossScaler, Optimizer, clip_factor

FLAGS = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 24 --data synthetic"
FLAGS += " --device cpu --global-batch 4 --micro-batch 2 --warmup 0 --seed 3"


def parameter(values, dtype=torch.float32) -> nn.Parameter:
    result = nn.Parameter(torch.tensor(values, dtype=dtype))
    shape = tuple(result.shape)
    result.spec = ParameterSpec("p", shape, tuple((0, size) for size in shape), None)
    return result


def train(flags: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Parameters after train.py's train(), by name, and its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse(1, [*FLAGS.split(), *flags.split(), "--run-dir", folder])
        config.resolve_and_check(1)
        parameters = train_module.train(config, build_mesh(Degrees(), torch.device("cpu")))
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {p.spec.name: p.detach().clone() for p in parameters}, lines


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


def test_scale_halves_on_overflow_and_doubles_after_the_interval():
    scaler = LossScaler(torch.float16, interval=3)
    assert scaler.scale == 2**16
    norms = (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0)
    taken, scales = zip(*((scaler.accept(norm), scaler.scale / 2**16) for norm in norms))
    assert taken == (True, True, False, True, True, True, False, True)
    assert scales == (1, 1, 0.5, 0.5, 0.5, 1, 0.5, 0.5)
    for _ in range(40):
        scaler.accept(math.inf)
    assert scaler.scale == 1
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
    assert run.optimizer.updates == 0 and not run.optimizer.inner.state
    run.scaler.scale = 2.0**10
    assert run.step()[2] and not torch.equal(run.parameters[0], before[0])


def test_unscaled_before_the_clip(monkeypatch):
    """Clipping the scaled gradients would make the step up to 65536 times too small. SGD shows it, Adam hides it."""
    flags = "--optimizer sgd --lr 1 --clip 0.5 --steps 3 --weight-decay 0 --dtype "
    exact, lines = train(flags + "float32")
    start, _ = train(flags + "float32 --steps 1 --lr 1e-30")
    assert all(line["grad_norm"] > 0.5 for line in lines)  # so the clip acts

    def distance(others: dict) -> float:
        """Relative to how far the float32 run moved."""
        moved = sum((exact[name] - start[name]).square().sum() for name in exact).sqrt()
        off = sum((exact[name] - others[name].float()).square().sum() for name in exact).sqrt()
        return (off / moved).item()

    half, half_lines = train(flags + "float16")
    assert distance(half) < 0.05
    for line, other in zip(lines, half_lines, strict=True):
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=5e-3)
    monkeypatch.setattr(train_module, "clip_factor", lambda norm, limit: clip_factor(norm * 2**16, limit))
    assert distance(train(flags + "float16")[0]) > 0.9


# ---- clip and optimizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clip_factor_is_that_of_torch(limit):
    gradients = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(weights, limit).item()
    for weight, gradient in zip(weights, gradients):
        torch.testing.assert_close(weight.grad, gradient * clip_factor(norm, limit), rtol=1e-12, atol=0)
    assert clip_factor(norm, 0) == 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_equals_a_plain_torch_loop(optimizer):
    flags = f"--dtype float64 --steps 4 --lr 3e-3 --warmup 2 --clip 0.5 --optimizer {optimizer}"
    ours, lines = train(flags)
    config = parse(1, [*FLAGS.split(), *flags.split()])
    config.resolve_and_check(1)
    model = Decoder(config.model_config)
    materialise(model, torch.float64, torch.device("cpu"), random_values(config.seed))
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in model.parameters()]
    adamw = optimizer == "adamw"
    inner = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5) if adamw else torch.optim.SGD(groups)
    batches = load_batches(config, build_mesh(Degrees(), torch.device("cpu")))
    for step in range(4):
        tokens, targets = batches.micro_batch(step, 0, config.global_batch)
        loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in inner.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 2)
        inner.step()
        inner.zero_grad()
        assert lines[step]["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert lines[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
    for p in model.parameters():
        assert (p - ours[p.spec.name]).norm() < 1e-12 * p.norm(), p.spec.name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_only_on_matrices(optimizer):
    matrix, gain = parameter([[1.0, 2.0]]), parameter([1.0, 2.0])
    inner = Optimizer([matrix, gain], TrainConfig(optimizer=optimizer, weight_decay=0.5))
    inner.step([torch.zeros_like(matrix), torch.zeros_like(gain)], lr=0.1)
    assert gain.tolist() == [1.0, 2.0]
    torch.testing.assert_close(matrix.detach(), torch.tensor([[0.95, 1.9]]))


def test_master_weights_add_up_updates_too_small_for_bfloat16():
    """0.001 is less than half of bfloat16's step below 1, which is 0.0039."""
    narrow = parameter([1.0], torch.bfloat16)
    optimizer = Optimizer([narrow], TrainConfig(optimizer="sgd", weight_decay=0.0))
    seen = [(optimizer.step([torch.ones(1)], lr=1e-3), narrow.item())[1] for _ in range(5)]
    assert seen[0] == 1.0 and seen[-1] < 1.0
    assert optimizer.masters[0].item() == pytest.approx(0.995)
    assert (torch.tensor([1.0], dtype=torch.bfloat16) - 1e-3).item() == 1.0  # what it would be without


def test_wide_weights_are_their_own_masters():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        weight = parameter([1.0, 2.0], dtype)
        optimizer = Optimizer([weight], TrainConfig())
        assert (optimizer.masters[0].data_ptr() == weight.data_ptr()) == (dtype.itemsize >= 4)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_narrow_runs_follow_float32(dtype, tolerance):
    flags = "--steps 15 --lr 3e-3 --dtype "
    _, exact = train(flags + "float32")
    _, narrow = train(flags + dtype)
    assert exact[-1]["loss"] < exact[0]["loss"] - 0.3
    for line, other in zip(exact, narrow, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=tolerance)
