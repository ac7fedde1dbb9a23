"""Every formula of steps 1 to 4 once against a number worked out by hand.

That they hold is counted elsewhere: in the tests of accounting and of memory. A row is (number, formula, arguments),
its arithmetic stands beside it. Sizes are small and differ from each other, so that a wrong factor shows.
"""

from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch

from common.collectives import Call
from common.costs import alpha_beta, networks, vocabulary
from common.costs.alpha_beta import Player
from common.costs.networks import BUS_GB_PER_S
from common.costs.vocabulary import Message
from common.counts import count_parameters
from common.experiments import on_nodes
from common.presets import PRESETS
from step01_single_gpu import cost as prediction
from step01_single_gpu.memory_model import gpt, peak
from step02_data_parallel import cost as data
from step03_zero import cost as zero
from step04_tensor_parallel import cost as tensor
from step04_tensor_parallel.cost import Way
from tests.mechanisms.formulas import BF16, DENSE, F32, LINK, SHAPE, TIED, by_kind, check, played


def exchange_and_wait(player: Player) -> None:
    player.now = 1.0
    first_, second = player.exchange(3), player.all_reduce(8)
    player.wait(first_)
    player.wait(second)


ADDED = ("tp", "all_gather", 15, 2), ("cp", "send", 7, 1), ("tp", "all_gather", 10, 3, "forward"), ("pp", "send", 9, 0)
COMMON = [
    (1500, alpha_beta.all_reduce_bytes, 1000, 4),  # 2·3/4·1000
    (750, vocabulary.sent, "all_to_all", 1000, 4),  # 3/4·1000
    (1000, vocabulary.sent, "send", 1000, 4),
    # 3·(2·3·0.001 + 1500/10⁶); 3·(0.001 + 1500/10⁶); 3·(3·0.001 + 1500/10⁶)
    (0.0225, vocabulary.seconds, Message("dp", "all_reduce", 1500, 3), 4, LINK),
    (0.0075, vocabulary.seconds, Message("pp_forward", "send", 1500, 3), 4, LINK),
    (0.0135, vocabulary.seconds, Message("tp", "all_gather", 1500, 3), 4, LINK),
    (
        {("tp", "all_gather"): (5, 60), ("cp", "send"): (1, 7)},  # 2·15 + 3·10
        lambda: vocabulary.added([Message(*each) for each in ADDED]),
    ),
    (0.0075, alpha_beta.all_reduce_seconds, 1000, 4, LINK),  # 2·3·0.001 + 1500/10⁶
    ([[3, 2], [1], [0]], alpha_beta.fill_buckets, [4, 3, 2, 1], 5),  # from the end: 1 + 2, and 3 no more; 3; 4
    ([[1, 0]], alpha_beta.fill_buckets, [2, 3], 5),  # exactly full
    (8, alpha_beta.gather_ratio, 3, 5, 40, 2),  # 2·2·40/(2·5·2)
    (4, alpha_beta.gather_ratio, 3, 5, 40, 2, 1),  # as appendix A3 has it: elements
    (1.547, on_nodes.seconds_on, "8mbit", 1_448_000),  # 1000 packets of 1514 bytes, half as many answers of 66
    (200, on_nodes.crossing, {100: 0.4, 400: 1.2}),  # 0.8 is half the way of the logarithms
    # 4 ranks: a message of 8 takes 3·8/4. From 1: the exchange is there at 4, the all-reduce at 4 + 6 + 6
    ((16, 15, 15), played, 4, exchange_and_wait),
    (0.00375, lambda: Player(4, LINK).message(1000)),  # 3·(0.001 + 250/10⁶)
    (0.002, lambda: Player(4, LINK).exchange(1000)),  # 0.001 + 1000/10⁶
]

# Full recomputation keeps 64 of a layer; tokens 16, cos and sin 32, the head 64 + 8 + 64 + 64, its loss 80 + 16 + 4
KEPT = 16 + 32 + 2 * 64 + 200 + 100
STATES = {"parameters": 872 * 2, "gradients": 872 * 4, "master weights": 872 * 4, "moments": 2 * 872 * 4 + 4 * 21}


def of_layer(attention_core: str, recompute: str, dtype: torch.dtype = F32) -> int:
    return prediction.total_bytes(prediction.layer_activations(DENSE, 1, 2, dtype, attention_core, recompute))


def peaks(shape: tuple, *arguments) -> tuple[int, ...]:
    found = peak.predict_peak(*shape, *arguments)
    return *astuple(found), found.peak


SHORT = gpt.GptShape(25, 64, 1, 4)
STEP_1 = [
    (816, of_layer, "fused", "none"),
    (816 - 32, of_layer, "fused", "selective"),  # without the log-sum-exp
    (816 - 32 + 2 * 32 + 4 + 64, of_layer, "naive", "none"),  # k and v for every head, mask, probabilities
    # norms 2·(64 + 8 + 32), rows of h 3·32, q, k, v 96, mask 4, softmax 64, its copy 32, rows of f 4·24
    (596, of_layer, "naive", "none", BF16),
    (64, of_layer, "fused", "full"),
    (KEPT, lambda: prediction.total_bytes(prediction.saved_activations(*SHAPE, recompute="full"))),
    (STATES, prediction.states, DENSE, BF16),  # 9·2 + 3 tensors, each with a counter
    (STATES | {"moments": 0}, prediction.states, DENSE, BF16, "sgd"),
    (20, prediction.tensor_count, TIED),
    (by_kind(3488, 3488, 7060) | {"activations": KEPT}, prediction.held, *SHAPE, "fused", "full"),  # 872·4; KEPT
    # 2 tokens: linear layers 2·2·2·336, scores and values 2·2·2·2²·8, head 2·2·80: 3264 of a sequence
    ({"forward": 9792, "backward": 19584}, prediction.operations, DENSE, 2, 3),
    ({"forward": 9792, "backward": 19584 + 3 * 2944}, prediction.operations, DENSE, 2, 3, "full"),  # all but the head
    # Between steps, at the loss, in the worst layer, in the update, and the most of them.
    # Parameters 3488, moments 7060. The loss: what is kept and 2·80. In the first layer's MLP: below it 48, gradients
    # of the head 320, of a layer 352·4 = 1408 and of down_proj 192, inside 816 + 96 + 64. The update: 3488·2 + 7060
    ((10548, 10548 + 1980 + 160, 10548 + 48 + 1728 + 192 + 976, 14036, 14036), peaks, SHAPE, "fused", "none"),
    ((10548, 10548 + KEPT + 160, 10548 + 48 + 1728 + 192 + 1040, 14036, 14036), peaks, SHAPE, "fused", "full"),
    # With sums of 3488 from earlier micro-batches, which are more than any gradient; no moments yet
    (
        (3488, 3488 * 2 + KEPT + 160, 3488 + 112 + 3488 + 1040, 14036, 14036),
        *(peaks, SHAPE, "fused", "full", "adamw", 2, True),
    ),
    # Selective keeps 784 of a layer. In the first layer's core: gradients as before and of the MLP 576; q, k, v for
    # every head 5·64 + 68, half of the norms 136, without o_proj's input; + 2·64 + gradients of scores 2·64 + 2·64
    ((10548, 10548 + 1916 + 160, 10548 + 48 + 1728 + 576 + 844, 14036, 14036), peaks, SHAPE, "naive", "selective"),
    # Two sequences, bfloat16: 1744 + 3488 + 7060; a layer keeps 1188, all 2908, the loss 2·160; in the core 320 + 196
    # + 208 - 64 + 2·128 + 2·64. The update: 1744 + 3488·2 + 7060
    ((12292, 15520, 12292 + 64 + 1728 + 576 + 1044, 15780, 15780), peaks, (DENSE, 2, 2, BF16), "naive", "none"),
    # 2·16·64 = 2048 values, of two bytes and of four; 4 bytes for each logit
    ({"embedding": 2048, "head": 8192, "log-probabilities": 3200}, gpt.head_activations, SHORT, 2, 16),
    ({"embedding": 2048, "head": 16384, "log-probabilities": 3200}, gpt.head_activations, SHORT, 2, 16, False),
    ({"core": 48 / (864 + 144), "paper": 1 / 6}, gpt.selective_overhead, gpt.GptShape(0, 12, 1, 1), 12),
]

SCALARS = ("dp_cp", "all_reduce", 12, 1, ""), ("world", "all_reduce", 12, 1, "")  # 2·3/4·8
STEP_2 = [
    ([("dp_cp", "all_reduce", 300, 5, "last backward"), *SCALARS], data.messages, 250, 4, 4, 5),  # 2·3/4·250·4/5
    ({"forward": 4200, "backward": 8400, "last backward": 2800}, data.operations, 100, 7, 3),  # 3·2·700, 3·4·700, 4·700
    # Two ranks, forward 0-1; all-reduce of 4 at 2.5-6.5, of 2 until 8.5; naive from 4 on
    ((8.5, 6, 4.5), played, 2, data.play_step, [[1], [0]], [2, 4], [1, 1], (1, 3)),
    ((10, 6, 6), played, 2, data.play_step, [[1], [0]], [2, 4], [1, 1], (1, 3), True),
    # 32/(2·8) = 2 micro-batches of 200 tokens. 4·7·peak/(2·8·436·10⁹) = 500 would hide: 1.5 of 2·1.5 + 1.5 are exposed
    (1000 * (1 - 1 / 3), data.tokens_per_second_per_gpu, 8, 32, 2, 100, 1000, 500 * 16 * 436e9 / 28, 4),
]

PEAK, LLAMA, MIXED = 989e12, PRESETS["llama3-8b"], (2, 4, 12)  # an H100's FLOP/s; widths in bytes
WHOLE = count_parameters(LLAMA).total  # 8,030,261,248
UNITS = 10, 20, 30, 40


def gibibytes_of_8b() -> list[float]:
    return [round(sum(zero.held(WHOLE, stage, 8, MIXED).values()) / 2**30, 1) for stage in range(4)]


def tokens_that_hide() -> list[int]:
    """On the playbook's nodes; its cheatsheet's ratio for ZeRO-3 is then DP/2 instead of 1."""
    needed = {dp: zero.tokens_to_hide_gather(dp, 1e9 * each, PEAK) for dp, each in BUS_GB_PER_S["all_gather"].items()}
    for dp, tokens in needed.items():
        assert zero.cheatsheet_zero3(dp, 1e9 * BUS_GB_PER_S["all_gather"][dp], PEAK, tokens) == pytest.approx(dp / 2)
    return [round(tokens) for tokens in needed.values()]


def zero_sends(*arguments, tied: bool = False) -> dict:
    """How many and how many bytes, but for the two single numbers."""
    sent = vocabulary.added(zero.messages(*arguments, tied=tied))
    ranks = arguments[2] * (arguments[4] if len(arguments) > 4 else 1)
    single = 1, 16 * (ranks - 1) / ranks  # 2(N-1)/N·8
    assert sent.pop(("dp_cp", "all_reduce")) == sent.pop(("world", "all_reduce")) == single
    return {f"{group} {op}": found for (group, op), found in sent.items()}


def in_shard(gathers: int, gathered: float, scatters: int, scattered: float, **others) -> dict:
    return {"shard all_gather": (gathers, gathered), "shard reduce_scatter": (scatters, scattered)} | others


BUCKETS = [[1], [0]], [[0], [1]], [2, 4]
ACROSS = {"replica all_reduce": (4, 200)}  # 2·1/2·50·4
STEP_3 = [
    (by_kind(200, 400, 1200), zero.held, 100, 0, 4, MIXED),
    (by_kind(200, 400, 300), zero.held, 100, 1, 4, MIXED),
    (by_kind(200, 100, 300), zero.held, 100, 2, 4, MIXED),
    (by_kind(50, 100, 300), zero.held, 100, 3, 4, MIXED),
    # 8.03·10⁹·18 bytes; 6 + 12/8 of them; 2 + 16/8; 18/8
    ([134.6, 56.1, 29.9, 16.8], gibibytes_of_8b),
    ({"replica all_reduce": (4, 600)}, zero_sends, UNITS, 0, 1, 3, 4),  # 2·3/4·100·4
    (in_shard(4, 300, 4, 300), zero_sends, UNITS, 1, 4, 3),  # 3/4·100·4
    (in_shard(4, 150, 12, 900), zero_sends, UNITS, 2, 4, 3, 1, True, MIXED),  # 3/4·100·2, 3/4·3·100·4
    (in_shard(4, 150, 4, 300), zero_sends, UNITS, 2, 4, 3, 1, False, MIXED),
    # Gathers 4 + 2 of a micro-batch: 1/2·2·(100 + 50)·2; 1/2·2·100·4
    (in_shard(12, 300, 8, 400) | ACROSS, zero_sends, UNITS, 3, 2, 2, 2, True, MIXED),
    # With a tied embedding 10 more are gathered twice
    (in_shard(14, 320, 8, 400) | ACROSS, lambda: zero_sends(UNITS, 3, 2, 2, 2, True, MIXED, tied=True)),
    (in_shard(3, 900, 3, 900), zero_sends, (100,), 3, 4, 3),  # the whole model is one unit, which stays: 3/4·3·100·4
    (190, zero.resident, UNITS, 4, 2),  # 2·(100/4 + 30 + 40)
    (130, zero.resident, UNITS, 4, 2, False),
    (10, zero.tokens_to_hide_gather, 4, 3, 40),  # 2/2·3/4·40/3
    ([3464, 5023, 8051, 14109, 17841, 35183, 89733], tokens_that_hide),  # 7/8·989·10¹²/249.8·10⁹, ...
    (10, zero.tokens_to_hide_backward, 4, 3, 6, 40),  # 3/4·40/4·(2/3 + 4/6)
    (10, zero.tokens_to_hide_scatter, 4, 3, 40),  # 4/4·3/4·40/3
    (1, zero.appendix_a3, 4, 3, 40, 5),  # 1/10·3/4·40/3
    (4, zero.cheatsheet_zero3, 4, 3, 40, 5),  # 3·40/(2·5·3)
    (3.5, zero.cheatsheet_zero2, 4, 3, 40, 5, 7),  # 3·7·40/(4·3·5·4)
    # Gathers 0-1, 1-3; forward 1-3, 3-9; backward 9-15, 15-17, scatters 15-17, 17-18
    ((18, 6, 2), played, 2, zero.play_buckets, *BUCKETS, [1, 3], (8, 8)),
    # Gathers 0-1, 1-3, 3-6 with forwards 3-5, 6-8; gather 8-10 with a backward, 10-12; scatters 10-13, 13-15, 15-16
    ((16, 14, 8), played, 2, zero.play_units, [2, 4, 6], [0, 1, 1], (4, 4)),
    # Gathers 0-1, 1-3, 5-8, 12-14 alone; backwards 10-12, 14-16; scatters 14-17, 17-19, 19-20
    ((20, 14, 12), played, 2, zero.play_units, [2, 4, 6], [0, 1, 1], (4, 4), False),
    ((22, 20, 14), played, 2, zero.play_units, [2, 4, 6], [0, 1, 1], (4, 4), True, [4, 8, 12]),  # 10-16, 16-20, 20-22
    # Gathers 0-1 to 3-4 with forwards 2-3, 3-4, 4-5; gathers 5-6, 7-8, scatters 8-9, 9-10, 11-12, 12-13
    ((13, 10, 4), played, 2, zero.play_units, [2, 2, 2, 2], [0, 1, 1, 1], (3, 6)),
]


def tp_sends(formula, *arguments) -> dict:
    """How many and how many bytes by operation of the group tp, or by another group."""
    sent = vocabulary.added(formula(*arguments))
    return {op if group == "tp" else group: found for (group, op), found in sent.items()}


def ratios() -> list[float]:
    """Of a gather within a node of 8 to the product behind it, in Llama 3 8B: q, k and v; gate and up."""
    shared = LLAMA.hidden + 2 * LLAMA.kv_heads * LLAMA.head_width, 2 * LLAMA.ffn
    return [round(alpha_beta.gather_ratio(8, width, PEAK, networks.NVLINK), 2) for width in shared]


def gigabytes() -> list[float]:
    """That a rank sends for the blocks of Llama 3 8B, for 8,192 tokens, with tp 2, 4 and 8."""
    stream = 2 * 8192 * LLAMA.hidden
    sizes = [sum(each.count * each.bytes for each in tensor.block_messages(Way(), tp, stream)) for tp in (2, 4, 8)]
    return [round(LLAMA.layers * size / 1e9, 1) for size in sizes]


def hidden_messages(mode: str) -> list[tuple]:
    return [(each.op, each.hidden_by) for each in tensor.block_messages(Way(True, mode), 2, 100) if each.hidden_by]


PARTS = {"norms": 136, "column inputs": 64, "attention": 112, "mlp": 96}
WORLD = {"world": (1, 8)}  # the gradient norm: 2·1/2·8
TIMES = dict.fromkeys(("qkv", "o", "gate_up", "down", "head"), (2, 3, 4))


def steps_of(*way) -> tuple[float, float, float]:
    """A layer; gathers take 1, all-reduces of the stream 2, of the loss 8 and 16, of norms 3, of the norm 8."""
    return played(2, lambda player: tensor.play_step(Way(*way), player, 1, 2, 2, 3, TIMES))


STEP_4 = [
    ([2.5, 0.54], ratios),  # 2·7·989·10¹²/(2·6144·450·10⁹), /(2·28672·...)
    ([10.7, 16.1, 18.8], gigabytes),  # 32·10·67.1·10⁶·(1/2, 3/4, 7/8)
    # Of a block, where an all-reduce of two ranks sends 100, a half of it 50
    ({"all_reduce": (6, 600)}, tp_sends, tensor.block_messages, Way(False, "overlap", True), 2, 100),  # 2 + 4
    ({"all_gather": (6, 300), "reduce_scatter": (4, 200)}, tp_sends, tensor.block_messages, Way(), 2, 100),
    (
        {"all_gather": (8, 400), "reduce_scatter": (6, 300)},
        *(tp_sends, tensor.block_messages, Way(full_recompute=True), 2, 100),
    ),
    (
        {"all_gather": (4, 200), "reduce_scatter": (4, 200)},
        *(tp_sends, tensor.block_messages, Way(True, "plain"), 2, 100),
    ),
    (
        {"send": (4 * 3, 300), "all_gather": (4, 300), "reduce_scatter": (2, 150)},  # 12·100/4, 3/4·100 each
        *(tp_sends, tensor.block_messages, Way(True, "chunked"), 4, 100),
    ),
    ([], hidden_messages, "plain"),
    (2 * [("all_gather", "input's gradient"), ("reduce_scatter", "weights' gradients")], hidden_messages, "overlap"),
    # Of a step. The stream of 3 tokens is 96 bytes, half of it 48. Gathers: 6 a block, 1 of the embedding, 2 of the
    # head; scatters: 4, 1, 1. Three numbers a token 36; norms 5·8·4 = 160
    (
        {"all_gather": (15, 720), "reduce_scatter": (10, 480), "all_reduce": (3, 196)} | WORLD,
        *(tp_sends, tensor.messages, Way(), 2, DENSE, 3, 1),
    ),
    (
        {"all_gather": (10, 480), "reduce_scatter": (10, 480), "all_reduce": (3, 196)} | WORLD,
        *(tp_sends, tensor.messages, Way(True, "plain"), 2, DENSE, 1, 3),
    ),
    # All-reduces of the stream: 4 a block, embedding, head; two of the loss; of 5 micro-batches
    ({"all_reduce": (5 * 12, 5 * (960 + 36))} | WORLD, tp_sends, tensor.messages, Way(False), 2, DENSE, 1, 3, 5),
    # K and V of a head of width 2 in two layers, shared by two ranks: 2·1/2·2·2·8·2·4
    ((1, 256), lambda: tp_sends(tensor.messages, Way(), 4, DENSE, 1, 3)["kv_replica"]),
    # Half of step 1's 816: norms 2·136, inputs 2·64; q, k, v, o 2·64 + 2·32 and log-sum-exp 32; rows of f 4·48
    (PARTS, tensor.block_activations, DENSE, 2, 1, F32, 2, Way()),
    (PARTS | {"column inputs": 128}, tensor.block_activations, *SHAPE, 2, Way(True, "plain")),
    (PARTS | {"norms": 272, "column inputs": 128}, tensor.block_activations, *SHAPE, 2, Way(False)),
    ({"layer inputs": 32}, tensor.block_activations, *SHAPE, 2, Way(full_recompute=True)),
    (72, lambda: tensor.block_activations(*SHAPE, 4, Way())["attention"]),  # k, v whole: (2·64 + 2·64 + 32)/4
    ((16, 8.5), lambda: tuple(tensor.gpt_block_activations(4, split) for split in (False, True))),  # 10 + 24/4, 34/4
    (63, tensor.loss_bytes, 3, 10, 4),  # 3·(3·4 + 8 + 1)
    # Products take 10 in the forward and 35 in the backward. Exposed: 6 in the forward, the loss 24, two gathers before
    # row layers, the embedding 1, norms 3 and norm 8; hidden 6
    ((45 + 44, 50, 44), steps_of),
    ((45 + 47, 47, 47), steps_of, True, "plain"),  # all of it; three fewer are gathered again
    ((45 + 39, 50, 39), steps_of, True, "chunked"),  # five of the forward's six hide as well
    ((45 + 38, 44, 38), steps_of, False),  # three all-reduces of 2 in the forward, 24, 8; three hide behind dw
    ((45 + 44, 44, 44), steps_of, False, "plain"),
]


@pytest.mark.parametrize("rows", [COMMON, STEP_1, STEP_2, STEP_3, STEP_4], ids=["common", "1", "2", "3", "4"])
def test_formulas(rows):
    check(rows)


def test_what_crosses_a_cable(monkeypatch):
    """Ranks 0 and 1 on one node, 2 and 3 on the other; 1000 bytes. A rank's part of what leaves its node."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    groups = {"world": (0, 1, 2, 3), "tp": (0, 1), "dp": (0, 2), "odd": (0, 2, 1, 3)}
    mesh = SimpleNamespace(rank=0, **{name: SimpleNamespace(ranks=ranks) for name, ranks in groups.items()})
    rows = [
        ("all_reduce", "world", 1500, None, 750),  # a ring, 2·3/4·1000 on each edge; one edge leaves, for two ranks
        ("all_reduce", "odd", 1500, None, 1500),  # 0 to 2 and 1 to 3
        ("all_reduce", "dp", 1000, None, 1000),
        ("all_reduce", "tp", 1000, None, 0),
        ("all_gather", "world", 750, None, 500),  # its quarter to both ranks of the other node
        ("all_to_all", "dp", 500, None, 500),
        ("send", "world", 9, 1, 0),
        ("send", "world", 9, 3, 9),
    ]
    for op, group, size, peer, expected in rows:
        call = Call(op, group, len(groups[group]), "float32", 0, size, "", peer)
        assert on_nodes.crosses(call, mesh) == pytest.approx(expected), (op, group, peer)
