"""Every formula of steps 5 and 6 and of the GPU ladder once against a number worked out by hand."""

from types import SimpleNamespace

import pytest

from step05_pipeline import cost as pipeline
from step05_pipeline.schedules.actions import Action
from step06_context_parallel import cost as context
from step08_5d.gpu_ladder import attention, roofline, transactions
from step08_5d.gpu_ladder.transactions import Sizes
from tests.mechanisms.formulas import DENSE, F32, SHAPE, TIED, check, played


def schedule_of_one_rank(kinds: str) -> SimpleNamespace:
    return SimpleNamespace(actions=[[Action(kind, 0) for kind in kinds]], stage_of=lambda rank, chunk: (0, 0))


BUBBLES = {"afab": 28, "1f1b": 28, "interleaved": 14, "zb-h1": 7 * 1.5, "zb-h2": 7 * 0.25, "dualpipe": 3 * 1.5}
BUBBLES["dualpipev"] = 7 * 1.5 / 2
STEP_5 = [
    (3 / 16, pipeline.bubble_ratio, 4, 8, 2),
    (3, pipeline.smallest_ratio, 8, 2),
    (0, pipeline.smallest_ratio, 2, 8),
    (0.8, pipeline.efficiency, 0.25),
    # p 8, F 1, B 3, W 1.25: F + B - 2 W = 1.5, - 3 W 0.25
    (BUBBLES, lambda: {name: bubble(8, 1, 3, 1.25) for name, bubble in pipeline.BUBBLES.items()}),
    (15, pipeline.dualpipe_bubble, 8, 3.5, 3, 0.5),  # 3·(3.5 + 3 - 1.5)
    (16, pipeline.number_of_messages, 2, 8),  # 2·8·1 border
    (112, pipeline.number_of_messages, 4, 8, 2),  # 7
    (96, pipeline.number_of_messages, 4, 8, 2, "v"),  # 6
    (48, pipeline.number_of_messages, 4, 8, 1, "bidirectional"),  # 3
    (0, pipeline.number_of_messages, 1, 8, 2),
    (48, pipeline.message_bytes, 2, 3, 8, 2, 2),  # 2·3·8·2/2
    (1 / 16, pipeline.hide_ratio, 8, 2, 64, 4),  # 2·64/(32·8·2·4)
    # 2·3·8/4 = 12 s; a layer 2·3·336 + 4·3·3·8 = 2304 FLOPs at 672 FLOP/s
    (12 / (2 * 2304 / 672), pipeline.hide_ratio_of, DENSE, 3, 2, 672, 4),
    (432, pipeline.stage_parameters, DENSE, 0, 1),  # 352 + 80, + 8
    (440, pipeline.stage_parameters, DENSE, 1, 2),
    (792, pipeline.stage_parameters, TIED, 0, 2),
    (440, pipeline.stage_parameters, TIED, 1, 2),
    (816 + 32 + 16, pipeline.stage_activations, DENSE, 0, 1, 1, 2, F32),  # a layer, cos and sin, tokens
    (816 + 16 + 200 + 98, pipeline.stage_activations, DENSE, 1, 2, 2, 1, F32),  # head, 2·(4·10 + 8 + 1)
    (2 * 816 + 48 + 298, pipeline.stage_activations, DENSE, 0, 2, 1, 2, F32),
    # Inputs of qkv, gate_up, o, down: 8 + 8 + 8 + 6; gradients of q, k, v, o, gate, up, down: 8 + 4 + 4 + 8 + 6 + 6 + 8
    (2 * 4 * (30 + 44), pipeline.stage_store, DENSE, 0, 1, 1, 2, F32),
    (2 * 4 * (2 * 74 + 8 + 10), pipeline.stage_store, DENSE, 0, 2, 2, 1, F32),
    (20, pipeline.peak_kept, schedule_of_one_rank("FFIWFBB"), 0, [10], [4]),  # 10, 20, 14, 10, 20
    (35, pipeline.peak_kept, schedule_of_one_rank("FFIWFBB"), 0, [10], [25]),  # 10, 20, 35, 10, 20
]

SIXTEEN = {"contiguous": ([10, 26, 42, 58], 58), "zigzag": ([34] * 4, 34), "striped": ([28, 32, 36, 40], 40)}
RING = 8, 4, 2, 4  # h, h_kv, bytes of an activation and of a sum; 16 tokens on 4 ranks: keys have 4·4 = 16 elements


def pairs(split: str) -> tuple[list[int], int]:
    table = context.all_pairs(split, 16, 4)
    return [sum(hops) for hops in table], context.critical_path(table)


def sends(*arguments) -> list[int]:
    return list(context.ring_sends(*arguments).values())


def phases(formula, *arguments) -> tuple[float, float]:
    found = formula(*arguments)
    return found["forward"], found["backward"]


def layer(mode: str, phase: str):
    return lambda player: context.play_layer(mode, phase, player, [3, 5], 2, 4, 2)


STEP_6 = [
    *((expected, pairs, split) for split, expected in SIXTEEN.items()),  # of each rank, as drawn; the slowest hops
    (16, context.hop_pairs, "contiguous", 2, 2, 16, 4),
    (0, context.hop_pairs, "contiguous", 2, 3, 16, 4),
    (10, context.hop_pairs, "zigzag", 2, 0, 16, 4),  # 2·2·2 + 2
    (8, context.hop_pairs, "zigzag", 2, 1, 16, 4),
    (10, context.hop_pairs, "striped", 2, 2, 16, 4),  # 4·5/2, 4·3/2
    (6, context.hop_pairs, "striped", 2, 3, 16, 4),
    ([24, 24, 32], sends, "zigzag", 4),  # 2·4·3, and one hop more
    ([12, 12, 18], sends, "contiguous", 4),  # 2·(3 + 2 + 1); 2·(4 + 3 + 2)
    ([24, 24, 32], sends, "contiguous", 4, False),
    ((192, 704), phases, context.layer_bytes, "ring", "zigzag", 4, 16, *RING),  # 6·16·2, 16·(6·2 + 8·4)
    ((96, 384), phases, context.layer_bytes, "ring", "contiguous", 4, 16, *RING),  # 3·16·2, 16·(3·2 + 4.5·4)
    ((192, 576), phases, context.layer_bytes, "allgather", "zigzag", 4, 16, *RING),  # 2·3·16·2, 2·3·16·(2 + 4)
    ((144, 144), phases, context.layer_bytes, "ulysses", "zigzag", 4, 16, *RING),  # 3/4·4·2·(8 + 4)·2
    ((128, 384), phases, context.buffers, "ring", 4, 16, 2, 4),  # 2·2·16·2, 2·16·(2·2 + 2·4)
    ((64, 320), phases, context.buffers, "ring", 2, 16, 2, 4),  # what arrives takes the only place
    ((256, 512), phases, context.buffers, "allgather", 4, 16, 2, 4),  # 2·4·16·2, 2·16·(4·2 + 2·4)
    ((0, 0), phases, context.buffers, "allgather", 1, 16, 2, 4),
    (1280, context.while_scattering, 4, 16, 32, 2, 4),  # 16·(3·4·4 + 2·4·2 + 2·4) + 32·4
    (816, context.kept, *SHAPE),
    (816 + 64 + 8 * 8, context.kept, DENSE, 2, 1, F32, 8),
    # A token of a layer: norms 2·(32 + 4 + 16), rows of h 3·16, q, k, v 32, log-sum-exp 16, rows of f 4·12: 248. Two
    # layers and tp 2 make 248, the head 2·4·8/2 = 32, the loss 3·4·10/2 = 60, keys 96/2
    (248 + 32 + 60, context.bytes_per_token, DENSE, 4, "ring", 2, "none"),
    (2 * 16 / 2 + 124 + 32 + 60, context.bytes_per_token, DENSE, 4, "ring", 2, "full"),
    (248 + 32 + 352, context.bytes_per_token, DENSE, 16, "allgather", 2, "none"),  # 2·4·(16·2 + 14·4)/2
    (20, context.tokens_to_hide, 40, 2, 0.5),  # 2·0.5·40/2
    (24, context.tokens_to_hide, 40, 2, 0.5, True, True),
    (10, context.tokens_to_hide, 40, 2, 0.5, False),
    # Hops of 3 and 5; keys of 2 bytes, sums of 4, two heads for each. K and V travel 0-4
    ((9, 4, 1), played, 2, layer("ring", "forward")),
    ((20, 20, 12), played, 2, layer("ring", "backward")),  # computes 0-3, 4-9; sums travel 4-12, 12-20
    ((9, 4, 1), played, 2, layer("allgather", "forward")),  # K 0-2, V 2-4; computes 0-3, 4-9
    ((17, 12, 9), played, 2, layer("allgather", "backward")),  # and then dK 9-13, dV 13-17
    ((14, 6, 6), played, 2, layer("ulysses", "forward")),  # q 2, k 1, v 1; computes 8; the output 2
    ((14, 6, 6), played, 2, layer("ulysses", "backward")),
]


LADDER = [
    ((48, 52), roofline.product, 2, 3, 4),  # 2·24, 2·(8 + 12 + 6)
    ((128, 256), roofline.attention, 4, 2, 6),  # 4·16·2, 2·(4·8 + 6·16)
    ((64, 64), roofline.attention, 4, 2, 0),
    (3 * 64 + 4 + 7 * 2048, attention.naive_peak, 2),  # matrices of 4·2·2·4, rows of 4·2·64·4
    (8 * 2048 + 32, attention.flash_peak, 2),
    (6 * 64 + 16 + 6 * 2048, attention.naive_moved, 2),
    (2 * 2**18 + 2 * 2**18 * 1.5 + 4096, attention.flash_moved, 256),  # two blocks of queries read 1.5 on average
    (32 * (33 * 32 + 32), transactions.predicted_sectors, "naive", Sizes(32, 32, 32)),
    (32 * (5 * 32 + 4), transactions.predicted_sectors, "coalesced", Sizes(32, 32, 32)),
    (32 * (8 + 4), transactions.predicted_sectors, "tiled", Sizes(32, 32, 32)),
    (2**16, transactions.predicted_loads, "naive", Sizes(32, 32, 32)),
    (2**11, transactions.predicted_loads, "tiled", Sizes(32, 32, 32)),
]


@pytest.mark.parametrize("rows", [STEP_5, STEP_6, LADDER], ids=["5", "6", "ladder"])
def test_formulas(rows):
    check(rows)
