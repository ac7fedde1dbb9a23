"""Formulas of memory and bytes that no test of a step counts, against what ranks really keep, hold and send.

All of it happens in one world of two ranks, with the counting functions of the experiments; or in this process.
"""

import time
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.model import fused_attention
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.slow_device import SlowDevice
from step04_tensor_parallel import cost as tensor
from step04_tensor_parallel.experiments import gpt
from step05_pipeline import cost as pipeline
from step05_pipeline.config import schedule_of
from step05_pipeline.experiments import memory as pipeline_memory
from step05_pipeline.stages import split_layers
from tests.harness.ranks import run_ranks

SMALL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256, "seq_len": 32, "warmup": 1}
SMALL |= {"data": "synthetic", "micro_batch": 1, "global_batch": 4, "pp": 2, "dp": 1}
PIPELINES = [SMALL | {"schedule": name} for name in ("1f1b", "interleaved", "zb-h1")]


def ranks_count() -> dict:
    mesh = build_mesh(Degrees(dp=2), torch.device("cpu"))
    found = {"gpt": gpt.look_into(mesh, lambda: None)}
    found["pipelines"] = [pipeline_memory.keep(mesh, flags)["kept"] for flags in PIPELINES]
    return found


@pytest.fixture(scope="module")
def counted() -> list[dict]:
    return run_ranks(2, ranks_count)


def test_a_divided_gpt_block(counted):
    """It keeps s b h (10 + 24/tp), with sequence parallelism 34/tp, and 5 a s² b/tp of scores. Unless its dropouts on
    the residual stream have equal masks on all ranks, or sequence parallelism, the ranks drift apart."""
    stream, scores = gpt.BATCH * gpt.SEQ * gpt.HIDDEN, 5 * gpt.HEADS * gpt.SEQ**2 * gpt.BATCH / 2
    for rank in counted:
        for split, kept in rank["gpt"]["kept"].items():
            assert kept == pytest.approx(tensor.gpt_block_activations(2, split) * stream + scores, rel=0.005), split
        apart = {cells[:3]: cells[-1] for cells in rank["gpt"]["seeds"]}
        assert apart["tp", "equal", "own"] == "0%" and int(apart["tp", "own", "own"][:-1]) > 10


def test_a_pipeline_keeps_what_the_formulas_say(counted):
    """Activations from F to B or I, operands of weight gradients from I to W, at the end of any action."""
    for index, flags in enumerate(PIPELINES):
        config = TrainConfig(**flags)
        schedule, model = schedule_of(config), config.model_config
        stages = [(*each, 1, 32, torch.float32) for each in split_layers(model, schedule.stages, 32)]
        kept, stored = (
            [formula(model, *each) for each in stages] for formula in (pipeline.stage_activations, pipeline.stage_store)
        )
        predicted = [pipeline.peak_kept(schedule, rank, kept, stored) for rank in range(2)]
        assert [rank["pipelines"][index] for rank in counted] == predicted, flags["schedule"]


def test_a_slow_device_takes_the_time_of_its_flops():
    """FLOPs of products as torch counts them; attention 4, and 10 in the backward, for a pair and element of q."""
    x, w = torch.randn(6, 10, requires_grad=True), torch.randn(10, 7, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))  # 8 tokens, 2 heads of 16: 256 numbers
    with FlopCounterMode(display=False) as counter, SlowDevice(1e12) as device:
        ((x @ w)[None] @ torch.randn(1, 7, 3)).sum().backward()
        torch.addmm(torch.zeros(3), torch.randn(5, 4), torch.randn(4, 3))
    with SlowDevice(1e12) as causal:
        fused_attention(q, k, v).sum().backward()
    with mock.patch.object(time, "sleep") as sleep, SlowDevice(1e3):
        x.detach() @ w.detach()
    assert device.flops == counter.get_total_flops() > 0
    assert causal.flops == (4 + 10) * 256 * 8 / 2
    assert sleep.call_args.args[0] == pytest.approx(2 * 6 * 10 * 7 / 1e3, abs=0.02)
