"""Step 1: recomputation costs the FLOPs that it is said to cost. Parity shows that it changes no number."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.counts import count_flops
from step01_single_gpu.experiments.tools import Run


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_flops_are_those_counted(mode):
    """With the naive core: FlopCounterMode does not know the CPU's flash kernel."""
    shape = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, "seq_len": 16}
    run = Run(TrainConfig(**shape, attention="naive", recompute=mode, micro_batch=2, global_batch=2))
    with FlopCounterMode(display=False) as counter:
        run.gradients()
    assert counter.get_total_flops() == 2 * count_flops(run.config.model_config, 16).hardware(mode)
