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
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step01_single_gpu.data.batches import load_batches
from step01_single_gpu.experiments.tools import OneProcess
from step01_single_gpu.mixed_precision import GradientSums, LossScaler
from step02_data_parallel.data_parallel import DataParallel
from step03_zero.apply_zero import apply_zero
from step04_tensor_parallel.apply_tensor_parallel import apply_tensor_parallel
from tests.harness.observing import configure, mesh_of
from tests.parity.runs import SMALL, Result, assert_parity, reference

BASE = "--global-batch 4 --micro-batch 2"


def parameter(values, dtype=torch.bfloat16) -> nn.Parameter:
    result = nn.Parameter(torch.tensor(values, dtype=dtype))
    result.spec = ParameterSpec("p", tuple(result.shape), tuple((0, size) for size in result.shape), None)
    return result


def test_gradients_add_up_in_float32_and_unused_parameters_get_zeros():
    used, unused, silent = (parameter([1.0, 1.0]) for _ in range(3))
    gradients = GradientSums([used, unused, silent])

    class NoGradient(torch.autograd.Function):  # still fires the hook of its argument, with grad None
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: None)

    for value in (256.0, 1.0, 1.0, 1.0):  # bfloat16 would stay at 256: its step there is 2
        (used * torch.tensor([value, 0.5], dtype=torch.bfloat16) + NoGradient.apply(silent)).sum().backward()
        assert used.grad is None
    total = gradients.finish()
    assert [each.tolist() for each in total] == [[259.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert all(each.dtype == torch.float32 for each in total)
    assert gradients.finish()[0].tolist() == [0.0, 0.0]  # starts over


@pytest.mark.parametrize("frozen", ["embedding", "layers.0.attention.o_proj", "layers.0.mlp.gate_proj", "norm"])
def test_a_frozen_parameter_is_named(frozen):
    """Also if it was frozen before it was cut into parts and got its memory: it does not thaw without a word."""
    config = configure(4, f"{SMALL} {BASE} --zero 1", 1)
    mesh = mesh_of(config)
    for wrap in (
        lambda model: GradientSums(list(model.parameters())),
        lambda model: DataParallel(list(model.parameters()), mesh.dp_cp),
        lambda model: apply_zero(model, config, mesh),
    ):
        model = Decoder(config.model_config)
        model.get_submodule(frozen).weight.requires_grad = False
        apply_tensor_parallel(model, config, mesh)
        materialise(model, config.torch_dtype, mesh.device, random_values(0))
        with pytest.raises(ValueError, match=f"^{frozen}.weight is frozen"):
            wrap(model)


def test_scale_halves_on_overflow_and_doubles_after_the_interval(capsys):
    scaler = LossScaler(torch.float16, interval=3)
    norms = (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0)
    taken, scales = zip(*((scaler.accept(norm), scaler.scale / 2**16) for norm in norms))
    assert taken == (True, True, False, True, True, True, False, True)
    assert scales == (1, 1, 0.5, 0.5, 0.5, 1, 0.5, 0.5)
    for norm in (*[math.nan] * 9, 1.0, *[math.inf] * 6, 1.0):  # 15 halvings in all, from 2^15
        scaler.accept(norm)
    assert scaler.scale == 1 and capsys.readouterr().err == "", "nine in a row may happen"
    assert not scaler.accept(math.inf) and scaler.accept(1.0), "a single one at a scale of 1 is skipped, too"
    scaler.scale = 2.0**16
    for _ in range(16):
        scaler.accept(math.nan)
    assert scaler.scale == 1 and capsys.readouterr().err.startswith("warning: float16 has skipped 10 steps in a row")
    with pytest.raises(UsageError, match="skipped 17 steps in a row, .*--dtype bfloat16"):
        scaler.accept(math.nan)
    wide = LossScaler(torch.bfloat16)
    assert wide.accept(math.inf) and wide.scale == 1


@pytest.mark.parametrize("optimizer, clip", [("adamw", 0.5), ("sgd", 0.5), ("sgd", 100), ("sgd", 0)])
def test_training_equals_a_plain_torch_loop(optimizer, clip):
    """Of which torch clips, and lets only matrices decay."""
    flags = f"{BASE} --steps 4 --lr 3e-3 --warmup 2 --clip {clip} --optimizer {optimizer}"
    config = configure(1, f"{SMALL} {flags}")
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
    assert_parity(reference(flags), Result(losses, norms, parameters), flags, 1e-12)
    assert all((norm > clip) == (clip < 100) for norm in norms)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_from_the_norm_to_the_update_the_host_does_not_wait(dtype):
    run = OneProcess(TrainConfig(dtype=dtype, seq_len=16, micro_batch=2, global_batch=2), "cuda")
    run.step()  # makes the optimizer's state
    gradients = run.gradients()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = gradient_norm(run.parameters, gradients, run.mesh) / run.scaler.scale
        factor = clip_factor(norm, 1.0) / run.scaler.scale
        run.optimizer.step(gradients, 1e-3, factor, run.scaler.overflow(norm))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 5e-3)])
def test_narrower_runs_follow_float64(dtype, tolerance):
    """SGD would show it, and Adam hide it, if gradients were clipped before they are unscaled: 65536 times too small
    a step. Distances of weights are relative to how far the float64 run has moved."""
    flags = f"{BASE} --optimizer sgd --lr 1 --clip 0.5 --steps 3 --warmup 0 --weight-decay 0 --dtype"
    start = reference(f"{flags} float64 --steps 1 --lr 1e-30").parameters
    exact, narrow = (reference(f"{flags} {each}") for each in ("float64", dtype))
    moved, off = (
        sum(np.square(weights - other[name]).sum() for name, weights in exact.parameters.items())
        for other in (start, narrow.parameters)
    )
    assert exact.losses[-1] < exact.losses[0] - 0.1 and min(exact.norms) > 0.5, "it learns, and the clip acts"
    assert narrow.losses == pytest.approx(exact.losses, rel=tolerance)
    assert narrow.norms == pytest.approx(exact.norms, rel=tolerance)
    assert (off / moved) ** 0.5 < 10 * tolerance
