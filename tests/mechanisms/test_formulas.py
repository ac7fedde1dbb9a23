"""Formulas that nothing counts, each against a number worked out by hand.

What ranks keep, hold and send is counted: in the tests of accounting and of memory. Here is the rest: times, and what
would hide what. A row is (number, formula, arguments), its arithmetic stands beside it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.collectives import Call
from common.costs import alpha_beta, vocabulary
from common.costs.alpha_beta import Player
from common.costs.networks import bus_bandwidth
from common.costs.vocabulary import KINDS, Message, added
from common.experiments import on_nodes
from common.link import Link
from common.model_config import ModelConfig
from step01_single_gpu import cost as prediction
from step02_data_parallel import cost as data
from step03_zero import cost as zero
from step04_tensor_parallel import cost as tensor
from step04_tensor_parallel.cost import Way
from step05_pipeline import cost as pipeline
from step06_context_parallel import cost as context
from step08_5d.gpu_ladder import attention, roofline

F32, BF16 = torch.float32, torch.bfloat16
# h 8, 4 heads of width 2, f 6. Attention 2·8·8 + 2·8·4 = 192 parameters, MLP 3·8·6 = 144: with two norms a layer has
# 352. Embedding and head 80 each, norms (2·2 + 1)·8 = 40: 872 in all
DENSE = ModelConfig(vocab=10, hidden=8, layers=2, heads=4, kv_heads=2, ffn=6, tie_embeddings=False)
SHAPE = DENSE, 1, 2, F32  # two tokens of one sequence
# Two layers of 4 experts of 3·8·5 = 120 parameters and a router of 32, a dense one: 160 + 56 + 3·192 + 144 + 2·512
EXPERTS = replace(DENSE, layers=3, dense_layers=1, experts=4, top_k=2, expert_ffn=5)
LINK = Link(alpha=0.001, bandwidth=1e6)


def by_kind(*held) -> dict:
    """What a rank holds, by kind."""
    return dict(zip(KINDS, held, strict=True))


def played(ranks: int, play, *arguments) -> tuple[float, float, float]:
    """When a rank has finished what it plays over a link of 1 byte/s without latency, communication, time blocked."""
    player = Player(ranks, Link(0.0, 1.0))
    play(player, *arguments)
    return player.now, player.communication, player.blocked


def check(rows: list[tuple]) -> None:
    """A row is (number, formula, arguments)."""
    for expected, formula, *arguments in rows:
        found = formula(*arguments)
        assert found == expected or found == pytest.approx(expected), (formula.__name__, arguments)


def exchange_and_wait(player: Player) -> None:
    player.now = 1.0
    first, second = player.exchange(3), player.all_reduce(8)
    player.wait(first)
    player.wait(second)


GATHERS = [Message("tp", "all_gather", 15, 2), Message("tp", "all_gather", 10, 3, "forward")]
COMMON = [
    # 3·(2·3·0.001 + 1500/10⁶); 3·(0.001 + 1500/10⁶); 3·(3·0.001 + 1500/10⁶)
    (0.0225, vocabulary.seconds, Message("dp", "all_reduce", 1500, 3), 4, LINK),
    (0.0075, vocabulary.seconds, Message("pp_forward", "send", 1500, 3), 4, LINK),
    (0.0135, vocabulary.seconds, Message("tp", "all_gather", 1500, 3), 4, LINK),
    ({("tp", "all_gather"): (5, 60)}, added, [*GATHERS, Message("pp", "send", 9, 0)]),  # 2·15 + 3·10
    (0.0075, lambda: Player(4, LINK).all_reduce(1000)),  # 2·3·0.001 + 1500/10⁶
    (8, alpha_beta.gather_ratio, 3, 5, 40, 2),  # 2·2·40/(2·5·2)
    (1.547, on_nodes.seconds_on, "8mbit", 1_448_000),  # 1000 packets of 1514 bytes, half as many answers of 66
    (200, on_nodes.crossing, {100: 0.4, 400: 1.2}),  # 0.8 is half the way of the logarithms
    # 4 ranks: a message of 8 takes 3·8/4. From 1: the exchange is there at 4, the all-reduce at 4 + 6 + 6
    ((16, 15, 15), played, 4, exchange_and_wait),
    (0.00375, lambda: Player(4, LINK).message(1000)),  # 3·(0.001 + 250/10⁶)
    (0.002, lambda: Player(4, LINK).exchange(1000)),  # 0.001 + 1000/10⁶
    ((99.6e9 * 84.7e9) ** 0.5, bus_bandwidth, "all_reduce", 64 * 2**0.5),  # halfway between 64 and 128
]

STEP_1 = [
    (0, lambda: prediction.states(DENSE, BF16, "sgd")["moments"]),
    # 2 tokens: linear layers 2·2·2·336, scores and values 2·2·2·2²·8, head 2·2·80: 3264 of a sequence
    ({"forward": 9792, "backward": 19584 + 3 * 2944}, prediction.operations, DENSE, 2, 3, "full"),  # all but the head
]

STEP_2 = [
    # 2·3/4·400 bytes in three buckets, and two numbers of 8
    ({("dp_cp", "all_reduce"): (4, 612), ("world", "all_reduce"): (1, 12)}, added, data.messages(100, 4, buckets=3)),
    ({"forward": 4200, "backward": 8400, "last backward": 2800}, data.operations, 100, 7, 3),  # 3·2·700, 3·4·700, 4·700
    # Two ranks, forward 0-1; all-reduce of 4 at 2.5-6.5, of 2 until 8.5; naive from 4 on
    ((8.5, 6, 4.5), played, 2, data.play_step, [[1], [0]], [2, 4], [1, 1], (1, 3)),
    ((10, 6, 6), played, 2, data.play_step, [[1], [0]], [2, 4], [1, 1], (1, 3), True),
    (10, data.tokens_to_hide, 4, 3, 40, 2),  # 2·3·40/(2·4·3)
    (4, data.printed_ratio, 8, 5, 4, 3, 20),  # 8/(2·5)·3/4·20/3
    (0, data.exposed_share, 0.5, 1),
    (1.5 / 7.5, data.exposed_share, 2.5, 4),  # 1.5 backwards of computing in each of four, 1.5 of waiting
    # 32/(2·8) = 2 micro-batches of 200 tokens. 4·7·peak/(2·8·436·10⁹) = 500 would hide: 1.5 of 2·1.5 + 1.5 are exposed
    (1000 * (1 - 1 / 3), data.tokens_per_second_per_gpu, 8, 32, 2, 100, 1000, 500 * 16 * 436e9 / 28, 4),
]

BUCKETS = [[1], [0]], [[0], [1]], [2, 4]
STEP_3 = [
    (130, zero.resident, (10, 20, 30, 40), 4, 2, False),  # 2·(100/4 + 40)
    (10, zero.tokens_to_hide_gather, 4, 3, 40),  # 2/2·3/4·40/3
    (10, zero.tokens_to_hide_backward, 4, 3, 6, 40),  # 3/4·40/4·(2/3 + 4/6)
    (10, zero.tokens_to_hide_scatter, 4, 3, 40),  # 4/4·3/4·40/3
    (1, zero.appendix_a3, 4, 3, 40, 5),  # 1/10·3/4·40/3
    (4, zero.cheatsheet_zero3, 4, 3, 40, 5),  # 3·40/(2·5·3)
    (3.5, zero.cheatsheet_zero2, 4, 3, 40, 5, 7),  # 3·7·40/(4·3·5·4)
    # Gathers 0-1, 1-3; forward 1-3, 3-9; backward 9-15, 15-17, scatters 15-17, 17-18
    ((18, 6, 2), played, 2, zero.play_buckets, *BUCKETS, [1, 3], (8, 8)),
    # The update 0-6, then as above; or 0-2 and 2-6, gathers 2-3 and 6-8 with the forward 6-8, 8-14 and the backward
    ((24, 6, 2), played, 2, zero.play_buckets, *BUCKETS, [1, 3], (8, 8), 6),
    ((23, 6, 1), played, 2, zero.play_buckets, *BUCKETS, [1, 3], (8, 8), 6, True),
    # Gathers 0-1, 1-3, 3-6 with forwards 3-5, 6-8; gather 8-10 with a backward, 10-12; scatters 10-13, 13-15, 15-16
    ((16, 14, 8), played, 2, zero.play_units, [2, 4, 6], [0, 1, 1], (4, 4)),
    # Gathers 0-1, 1-3, 5-8, 12-14 alone; backwards 10-12, 14-16; scatters 14-17, 17-19, 19-20
    ((20, 14, 12), played, 2, zero.play_units, [2, 4, 6], [0, 1, 1], (4, 4), False),
    ((22, 20, 14), played, 2, zero.play_units, [2, 4, 6], [0, 1, 1], (4, 4), True, [4, 8, 12]),  # 10-16, 16-20, 20-22
    # Gathers 0-1 to 3-4 with forwards 2-3, 3-4, 4-5; gathers 5-6, 7-8, scatters 8-9, 9-10, 11-12, 12-13
    ((13, 10, 4), played, 2, zero.play_units, [2, 2, 2, 2], [0, 1, 1, 1], (3, 6)),
]


TIMES = dict.fromkeys(("qkv", "o", "gate_up", "down", "head"), (2, 3, 4))


def steps_of(*way) -> tuple[float, float, float]:
    """A layer; gathers take 1, all-reduces of the stream 2, of the loss 8 and 16, of norms 3, of the norm 8."""
    return played(2, lambda player: tensor.play_step(Way(*way), player, 1, 2, 2, 3, TIMES))


STEP_4 = [
    ({"layer inputs": 32}, tensor.block_activations, *SHAPE, 2, Way(full_recompute=True)),
    # Products take 10 in the forward and 35 in the backward. Exposed: 6 in the forward, the loss 24, two gathers before
    # row layers, the embedding 1, norms 3 and norm 8; hidden 6
    ((45 + 44, 50, 44), steps_of),
    ((45 + 47, 47, 47), steps_of, True, "plain"),  # all of it; three fewer are gathered again
    ((45 + 39, 50, 39), steps_of, True, "chunked"),  # five of the forward's six hide as well
    ((45 + 38, 44, 38), steps_of, False),  # three all-reduces of 2 in the forward, 24, 8; three hide behind dw
    ((45 + 44, 44, 44), steps_of, False, "plain"),
]


def layer(mode: str, phase: str):
    return lambda player: context.play_layer(mode, phase, player, [3, 5], 2, 4, 2)


STEP_5_AND_6 = [
    (3, pipeline.smallest_ratio, 8, 2),
    (0.8, pipeline.efficiency, 0.25),
    (1 / 16, pipeline.hide_ratio, 8, 2, 64, 4),  # 2·64/(32·8·2·4)
    # 2·3·8/4 = 12 s; a layer 2·3·336 + 4·3·3·8 = 2304 FLOPs at 672 FLOP/s
    (12 / (2 * 2304 / 672), pipeline.hide_ratio_of, DENSE, 3, 2, 672, 4),
    (40, lambda: context.critical_path(context.all_pairs("striped", 16, 4))),  # the slowest of each hop
    # A token of a layer: norms 2·(32 + 4 + 16), rows of h 3·16, q, k, v 32, log-sum-exp 16, rows of f 4·12: 248. Two
    # layers and tp 2 make 248, the head 2·4·8/2 = 32, the loss 3·4·10/2 = 60, keys 96/2
    (248 + 32 + 60, context.bytes_per_token, DENSE, 4, "ring", 2, "none"),
    (2 * 16 / 2 + 124 + 32 + 60, context.bytes_per_token, DENSE, 4, "ring", 2, "full"),
    (248 + 32 + 352, context.bytes_per_token, DENSE, 16, "allgather", 2, "none"),  # 2·4·(16·2 + 14·4)/2
    (388, context.while_scattering, 2, 10, 7, 2, 4),  # sums 4·40, one part arrives 40, keys 4·20, results 28 + 2·40
    (20, context.tokens_to_hide, 40, 2, 0.5),  # 2·0.5·40/2
    (24, context.tokens_to_hide, 40, 2, 0.5, True, True),
    (10, context.tokens_to_hide, 40, 2, 0.5, False),
    # Of 16 tokens 3/16, 2 bytes: 4 heads of 2; 2 K/V heads become 4. With tp 2, 1/4: 2 heads; 1 K/V head becomes 2
    ([Message("cp", "all_to_all", 48, 4)] * 2, context.messages, "ulysses", "zigzag", 4, DENSE, 16, 2, 4),
    ([Message("cp", "all_to_all", 32, 4)] * 2, context.messages, "ulysses", "zigzag", 2, DENSE, 16, 2, 4, 1, 2),
    (
        [Message("cp", "send", 32, 4, "attention"), Message("cp", "send", 64, 4, "attention")],  # 8 tokens of one head
        lambda: context.messages("ring", "zigzag", 2, DENSE, 16, 2, 4, tp=4),
    ),
    # Hops of 3 and 5; keys of 2 bytes, sums of 4, two heads for each. K and V travel 0-4
    ((9, 4, 1), played, 2, layer("ring", "forward")),
    ((20, 20, 12), played, 2, layer("ring", "backward")),  # computes 0-3, 4-9; sums travel 4-12, 12-20
    ((9, 4, 1), played, 2, layer("allgather", "forward")),  # K 0-2, V 2-4; computes 0-3, 4-9
    ((17, 12, 9), played, 2, layer("allgather", "backward")),  # and then dK 9-13, dV 13-17
    ((14, 6, 6), played, 2, layer("ulysses", "forward")),  # q 2, k 1, v 1; computes 8; the output 2
]

LADDER = [
    ((48, 52), roofline.product, 2, 3, 4),  # 2·24, 2·(8 + 12 + 6)
    ((128, 256), roofline.attention, 4, 2, 6),  # 4·16·2, 2·(4·8 + 6·16)
    (2 * 2**18 + 2 * 2**18 * 1.5 + 4096, attention.flash_moved, 256),  # two blocks of queries read 1.5 on average
]


@pytest.mark.parametrize("rows", [COMMON, STEP_1, STEP_2, STEP_3, STEP_4, STEP_5_AND_6, LADDER])
def test_formulas(rows):
    check(rows)


def test_what_crosses_a_cable(monkeypatch):
    """Ranks 0 and 1 on one node, 2 and 3 on the other; 1000 bytes. A rank's part of what leaves its node."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    groups = {"world": (0, 1, 2, 3), "dp": (0, 2), "odd": (0, 2, 1, 3)}
    mesh = SimpleNamespace(rank=0, **{name: SimpleNamespace(ranks=ranks) for name, ranks in groups.items()})
    rows = [
        ("all_reduce", "world", 1500, None, 750),  # a ring, 2·3/4·1000 on each edge; one edge leaves, for two ranks
        ("all_reduce", "odd", 1500, None, 1500),  # 0 to 2 and 1 to 3
        ("all_gather", "world", 750, None, 500),  # its quarter to both ranks of the other node
        ("all_to_all", "dp", 500, None, 500),
        ("send", "world", 9, 1, 0),
        ("send", "world", 9, 3, 9),
    ]
    for op, group, size, peer, expected in rows:
        call = Call(op, group, len(groups[group]), "float32", 0, size, "", peer)
        assert on_nodes.crosses(call, mesh) == pytest.approx(expected), (op, group, peer)
