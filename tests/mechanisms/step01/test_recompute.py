"""Step 1: recomputation costs the FLOPs that it is said to cost. Parity shows that it changes no number."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.counts import count_flops
from step01_single_gpu.experiments.tools import Run
from step01_single_gpu.recompute import recomputed


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_flops_are_those_counted(mode):
    """With the naive core: FlopCounterMode does not know the CPU's flash kernel."""
    shape = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, "seq_len": 16}
    run = Run(TrainConfig(**shape, attention="naive", recompute=mode, micro_batch=2, global_batch=2))
    with FlopCounterMode(display=False) as counter:
        run.gradients()
    assert counter.get_total_flops() == 2 * count_flops(run.config.model_config, 16).hardware(mode)


def test_recomputed_function_of_mixed_arguments():
    weight, x, y = (torch.randn(3, 3, dtype=torch.float64, requires_grad=each < 2) for each in range(3))

    def function(x, power, nothing, y):
        assert nothing is None
        return (x @ weight) ** power * y

    plain = torch.autograd.grad(function(x, 2, None, y).sum(), (x, weight))
    recomputed(function)(x, 2, None, y).sum().backward()
    assert torch.equal(plain[0], x.grad) and torch.equal(plain[1], weight.grad) and y.grad is None
