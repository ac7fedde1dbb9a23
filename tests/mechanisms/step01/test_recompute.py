"""Step 1: recomputation changes neither loss nor gradients, and costs the FLOPs that it is said to cost."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.counts import count_flops
from step01_single_gpu.experiments.tools import Run
from step01_single_gpu.recompute import recomputed

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, "seq_len": 16}


@pytest.mark.parametrize("attention", ["naive", "fused"])
@pytest.mark.parametrize("tie", [False, True])
def test_same_loss_and_gradients(attention, tie):
    """And every parameter's hook fires once per micro-batch."""
    results = {}
    for mode, micro_batch in itertools.product(("none", "selective", "full"), (4, 1)):
        config = TrainConfig(**SHAPE, tie_embeddings=tie, dtype="float64", attention=attention, recompute=mode)
        config.global_batch, config.micro_batch = 4, micro_batch
        run, fired = Run(config), Counter()
        for parameter in run.parameters:
            parameter.register_post_accumulate_grad_hook(lambda p, fired=fired: fired.update([p]))
        gradients = run.gradients()
        results[mode, micro_batch] = run.numbers["loss"], gradients
        assert fired == dict.fromkeys(run.parameters, 4 // micro_batch), (mode, micro_batch)
    loss, gradients = results["none", 4]
    for case, (other_loss, others) in results.items():
        assert abs(other_loss / loss - 1) < 1e-12, case
        for gradient, other in zip(gradients, others, strict=True):
            assert (gradient - other).norm() <= 1e-12 * gradient.norm(), case


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_flops_are_those_counted(mode):
    """With the naive core: FlopCounterMode does not know the CPU's flash kernel."""
    run = Run(TrainConfig(**SHAPE, attention="naive", recompute=mode, micro_batch=2, global_batch=2))
    with FlopCounterMode(display=False) as counter:
        run.gradients()
    flops = count_flops(run.config.model_config, SHAPE["seq_len"])
    assert counter.get_total_flops() == 2 * flops.hardware(mode)


def test_recomputed_function_of_mixed_arguments():
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    calls = []

    def function(x, power, nothing, y):
        calls.append(torch.is_grad_enabled())
        assert nothing is None
        return (x @ weight) ** power * y

    x, y = (torch.randn(3, 3, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    plain = torch.autograd.grad(function(x, 2, None, y).sum(), (x, weight))
    calls.clear()
    result = recomputed(function)(x, 2, None, y)
    assert calls == [False]
    result.sum().backward()
    assert calls == [False, True]
    assert torch.equal(plain[0], x.grad) and torch.equal(plain[1], weight.grad) and y.grad is None
