"""Formulas of memory and bytes that no test of a step counts, against what ranks really keep, hold and send.

All of it happens in one world of two ranks, with the counting functions of the experiments; or in this process.
"""

import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.group import Group
from common.model import fused_attention
from common.process_groups import Degrees, build_mesh
from common.tracing.tracer import Tracer
from step01_single_gpu.running.slow_device import SlowDevice
from step04_tensor_parallel import cost as tensor
from step04_tensor_parallel.experiments import gpt, numbers, orders
from step04_tensor_parallel.experiments.tools import SHAPE
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from step05_pipeline import cost as pipeline
from step05_pipeline.config import schedule_of
from step05_pipeline.experiments import memory as pipeline_memory
from step05_pipeline.stages import split_layers
from step06_context_parallel.attention_block import KERNELS
from step07_expert_parallel.turns import Turns
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.test_activations import FORMS

SMALL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256, "seq_len": 32, "warmup": 1}
SMALL |= {"data": "synthetic", "micro_batch": 1, "global_batch": 4, "pp": 2, "dp": 1}
PIPELINES = [SMALL | {"schedule": name} for name in ("1f1b", "interleaved", "zb-h1")]
LATENTS = "24,16,8,4,12", "0,9,8,4,6"  # queries of a latent, and values as wide as keys; or neither
PIPELINES += [SMALL | {"kv_heads": 4, "latent": latent, "schedule": "zb-h1"} for latent in LATENTS]


def worked_example(group: Group) -> dict:
    """The playbook's X (4 tokens, 2) times W, whose columns are (10, 20) and (30, 40): cut by columns, and by rows."""
    x = torch.tensor([[[0.0, 1], [2, 3], [4, 5], [6, 7]]])
    weight = torch.tensor([[10.0, 20], [30, 40]])  # as nn.Linear stores it: (out, in)
    found = {}
    for sequence_parallel, mode in FORMS:
        split = Split(group, sequence_parallel, mode)
        entering = x.chunk(2, 1)[group.rank] if sequence_parallel else x
        column = ColumnParallelLinear(nn.Parameter(weight.chunk(2, 0)[group.rank].clone()), split)
        row = RowParallelLinear(nn.Parameter(weight.chunk(2, 1)[group.rank].clone()), split)
        outputs = column(entering), row(x.chunk(2, 2)[group.rank])
        found[sequence_parallel, mode] = [each[0].tolist() for each in outputs]
    return found


def ranks_count() -> dict:
    mesh = build_mesh(Degrees(dp=2), torch.device("cpu"))
    found = {"gpt": gpt.look_into(mesh, lambda: None), "example": worked_example(mesh.world)}
    found["orders"] = orders.both_orders(mesh)
    divided = [SHAPE | {"tp": 2, "sequence_parallel": sequence_parallel} for sequence_parallel in (False, True)]
    found["shapes"] = [numbers.read_shapes(mesh, flags) for flags in divided]
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


def test_the_worked_example_of_the_playbook(counted):
    """X W = Y. By columns a rank has one of Y; by rows all of it, with sequence parallelism its tokens'."""
    y = [[20, 40], [80, 180], [140, 320], [200, 460]]
    for rank, found in enumerate(counted):
        for (sequence_parallel, mode), (column, row) in found["example"].items():
            assert column == [[tokens[rank]] for tokens in y], (sequence_parallel, mode)
            assert row == (y[2 * rank : 2 * rank + 2] if sequence_parallel else y), (sequence_parallel, mode)


def test_columns_then_rows_or_the_other_way_round(counted):
    """Both are right, and each issues two calls in each direction at most; rows first sends the hidden numbers, too:
    256 tokens of 128 and of 512 numbers, 4 bytes, of two ranks."""
    for found, wrong in (rank["orders"] for rank in counted):
        right, other = found["column then row"], found["row then column"]
        assert (right["calls"], right["bytes"]) == ({"all_reduce": 2}, 2 * 256 * 128 * 4)
        assert other["calls"] == {"all_reduce": 2, "all_gather": 2}
        assert other["bytes"] == 2 * (256 * 512 * 4 + 256 * 128 * 4 / 2)
        predicted = orders.predicted_bytes(2, 256, 128, 512)
        assert predicted == {name: each["bytes"] for name, each in found.items()}
        assert max(right["difference"], other["difference"]) < 1e-6 and wrong > 0.5, "the activation needs the sum"


def test_a_whole_gpt_block_and_its_parts(counted):
    """Bytes for each of s b h: attention 11, MLP 19, norms 4, 34 in all and with selective recomputation, with full 2;
    and 5 for each of a s² b scores. Beyond that, each norm keeps two statistics of a token, in 2 or 4 bytes."""
    stream, square = gpt.BATCH * gpt.SEQ * gpt.HIDDEN, gpt.HEADS * gpt.SEQ**2 * gpt.BATCH
    exact = {"attention": 11 * stream, "scores": 5 * square, "mlp": 19 * stream, "full": 2 * stream}
    exact |= {"norms": 4 * stream, "selective": 34 * stream, "none": 34 * stream + 5 * square}
    statistics = 2 * 2 * 4 * gpt.BATCH * gpt.SEQ
    for rank in counted:
        kept = rank["gpt"]["whole"]
        more = {name: kept[name] - size for name, size in exact.items()}
        with_norms = [more.pop(name) for name in ("norms", "selective", "none")]
        assert set(more.values()) == {0} and len(set(with_norms)) == 1
        assert with_norms[0] in (statistics / 2, statistics)


def test_shapes_of_embedding_head_and_loss(counted):
    """b 2, s 128, h 256, v 384, tp 2: the sum over the embedding's parts, a rank's logits, three numbers per token."""
    for rank in counted:
        for shapes, tokens in zip(rank["shapes"], (128, 64)):  # with sequence parallelism half of the tokens
            ends = "embedding, its output", "block: residual stream", "block: its output", "final norm"
            assert {shapes[where] for where in ends} == {f"(2, {tokens}, 256)"}
            assert (shapes["head: logits"], shapes["weight of head"]) == ("(2, 128, 192)", "(192, 256)")
            assert shapes["loss: numbers exchanged"] == "256 + 512"  # 2·128 largest logits; sums, and targets' logits
            enter = "  enter: q, k, v", "  TP region: input of o", "  enter: gate, up", "  TP region: input of down"
            inside = "(2, 128, 128) (2, 128, 64) (2, 128, 64)", "(2, 128, 128)", "(2, 128, 384) (2, 128, 384)"
            assert tuple(map(shapes.get, enter)) == (*inside, "(2, 128, 384)")
            leave = "  exit: output of o", "  exit: output of down", "  norm, its output"
            assert {shapes[where] for where in leave} == {f"(2, {tokens}, 256)"}


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
        assert [rank["pipelines"][index] for rank in counted] == predicted, flags


def test_a_slow_device_takes_the_time_of_its_flops():
    """FLOPs of products as torch counts them; attention 4, and 10 in the backward, for a pair and element of q."""
    x, w = torch.randn(6, 10, requires_grad=True), torch.randn(10, 7, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))  # 8 tokens, 2 heads of 16: 256 numbers
    with FlopCounterMode(display=False) as counter, SlowDevice(1e12) as device:
        ((x @ w)[None] @ torch.randn(1, 7, 3)).sum().backward()
        a, b, total = torch.randn(5, 4), torch.randn(4, 3), torch.zeros(5, 3)
        torch.addmm(torch.zeros(3), a, b)
        torch.mm(a, b, out=total)
        torch.addmm(total, a, b, out=total)
        torch.baddbmm(total[None], a[None], b[None])
    with SlowDevice(1e12) as in_place:  # of which torch knows nothing
        total.addmm_(a, b)
        total[None].baddbmm_(a[None], b[None])
    with SlowDevice(1e12) as causal:
        fused_attention(q, k, v).sum().backward()
    with mock.patch.object(time, "sleep") as sleep, SlowDevice(1e3):
        x.detach() @ w.detach()
    assert device.flops == counter.get_total_flops() > 0
    assert in_place.flops == 2 * (2 * 5 * 4 * 3)
    assert causal.flops == (4 + 10) * 256 * 8 / 2
    assert sleep.call_args.args[0] == pytest.approx(2 * 6 * 10 * 7 / 1e3, abs=0.02)


@pytest.mark.parametrize("queries, keys, causal", [(4, 12, False), (12, 4, False), (8, 8, True)])
def test_a_slow_device_knows_the_blocks_of_context_parallelism(queries, keys, causal):
    """Every query of a block sees every key of it, or half of them: with zigzag half of the queries all keys."""
    q, k, v = torch.randn(1, 4, queries, 16), *(torch.randn(1, 2, keys, 16) for _ in range(2))
    pairs = queries * keys / (2 if causal else 1)
    with SlowDevice(1e12) as device:
        out, lse = KERNELS["fused"].attend(q, k, v, causal)
        forward = device.flops
        KERNELS["fused"].attend_backward(out, q, k, v, out, lse, causal)
    assert (forward, device.flops - forward) == (4 * pairs * 4 * 16, 10 * pairs * 4 * 16)


def test_a_slow_device_is_that_of_both_tasks():
    """Whose turn it is, and in which thread, makes no difference: each product of 2 * 3 * 5 * 7 FLOPs counts."""
    cpu, x, w = torch.device("cpu"), torch.ones(3, 5), torch.ones(5, 7, requires_grad=True)
    turns = Turns(cpu, Tracer(None, SimpleNamespace(device=cpu, rank=0), None))

    def forward() -> None:
        turns.switch()
        x @ w

    def backward() -> None:
        y = x @ w
        turns.switch()
        y.sum().backward()

    with SlowDevice(1e12) as device:
        turns.run(forward, backward)
    assert device.flops == 3 * (2 * 3 * 5 * 7)
