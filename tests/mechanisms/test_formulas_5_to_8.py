"""Every formula of steps 5 to 8 once against a number worked out by hand, as `test_formulas_1_to_4.py` has it."""

from types import SimpleNamespace

import pytest

from step05_pipeline.experiments import predictions as pipeline
from step05_pipeline.schedules.actions import Action
from step06_context_parallel import cost as context
from step07_expert_parallel.experiments import dualpipe, node_limit
from step07_expert_parallel.experiments import nodes as nodes_7
from step07_expert_parallel.experiments import predictions as experts
from step08_5d.experiments import cost, first, formulas, head
from step08_5d.experiments import nodes as nodes_8
from step08_5d.gpu_ladder import attention, roofline, transactions
from step08_5d.gpu_ladder.transactions import Sizes
from tests.mechanisms.formulas import BF16, DENSE, EXPERTS, F32, SHAPE, TIED, by_kind, check, played


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
    (16, pipeline.messages, 2, 8),  # 2·8·1 border
    (112, pipeline.messages, 4, 8, 2),  # 7
    (96, pipeline.messages, 4, 8, 2, "v"),  # 6
    (48, pipeline.messages, 4, 8, 1, "bidirectional"),  # 3
    (0, pipeline.messages, 1, 8, 2),
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


def waiting() -> tuple[float, float]:
    """Of a rank that has computed for 2, and waits for an all-to-all of 3: when it has come, time blocked."""
    clock = experts.Clock(now=2.0)
    clock.wait(clock.send(3))
    return clock.now, clock.blocked


TURN = [("compute", 2), ("travel", 3), ("compute", 1)]
PER_EXPERT, PER_NODE = nodes_7.WAYS
STEP_7 = [
    (240, experts.dispatch_bytes, 10, 2, 8, 4, 2),  # 2·10·8·2·3/4
    (48, experts.counts_bytes, 8, 4),  # 8·8·3/4
    ((2, 3), experts.exact_rows, [[1, 2], [3, 4]], 0),
    (5 / 6, experts.distinct_ranks, EXPERTS, 2),  # both of 6 pairs are at home in 1
    (1.5, experts.distinct_ranks, EXPERTS, 4),  # 3·(1 - 3/6)
    (2 * 5 / 6, node_limit.fan_out, 2, 4, 2),
    # Of 4 choices among 8 experts on 2 nodes half leave; of 2·(1 - 1/70) nodes half; within one node, half of one
    (2, nodes_7.copies, PER_EXPERT, 2),
    (69 / 70, nodes_7.copies, PER_NODE, 2),
    (0.5, nodes_7.copies, PER_NODE, 1),
    (2 * 2 * 1024 * 4 * 256, nodes_7.token_bytes, PER_EXPERT, 2),  # two layers, four journeys of 64 numbers
    (2 * 0.5 * 1024 * 4 * (256 + 2 * 4), nodes_7.token_bytes, PER_NODE, 0.5),
    ((960, 1000), experts.split_parameters, EXPERTS),  # 2·4·120
    # 240 of a rank's experts, two ranks hold the same
    (by_kind((480, 2000), (960, 4000), (240 / 2 * 12, 1000 / 8 * 12)), experts.held, EXPERTS, 8, 4, 1, "bfloat16"),
    (by_kind((240, 250), (480, 500), (1440, 1500)), experts.held, EXPERTS, 8, 4, 3, "bfloat16"),
    (by_kind((960, 4000), (480, 500), (960, 1000)), experts.held, EXPERTS, 8, 4, 2, "float32"),
    # Router 3·4·13 + 6·13; sorting 3·6·8 + 3·8; experts 6·(8 + 4·5)·4; outputs 6·(8·4 + 4)
    (156 + 78 + 168 + 672 + 216, experts.activations, EXPERTS, 3, 6, 4, 1),
    # and weights of the router in float32 4·4·8, the order of what arrived 2·5·8
    (156 + 78 + 128 + 168 + 80 + 280 + 120, experts.activations, EXPERTS, 3, 5, 2, 2),
    (9, experts.width_to_hide, 36, 2, 4),  # 2·3/4·36/(3·2)
    (4.5, experts.width_to_hide, 36, 2, 4, 2, True),
    (9, experts.shared_to_hide, EXPERTS, 36, 2, 4),  # 2·2·3/4·36/(6·2)
    *(
        (432, experts.attention_flops, EXPERTS, 3),
        (544, experts.expert_flops, EXPERTS),
    ),  # 2·(192 + 3·8), 2·(240 + 32)
    (976, experts.layer_flops, EXPERTS, 3),
    (3.5, experts.nodes_reached, SimpleNamespace(expert_groups=8, groups_per_token=4)),  # 4·7/8
    (1.5, experts.cheatsheet, EXPERTS, 384, 2, 4),  # 3·384/(12·4·8·2)
    ((5, 3), waiting),
    (6, experts.alone, TURN),
    (9, experts.in_turns, TURN, TURN),  # computes 0-2, 2-4; travels 2-5, 5-8; computes 5-6, 8-9
    (7, experts.in_turns, [("counts", 1), *TURN[:2]], [("compute", 4)]),  # 0-1, 1-3, travels 3-6; computes 3-7
    # A 1, E 6, travel 2: C of B 0-2, A 0-1, D of F 2-4, E of B 2-14, D of B 14-16, E 14-20, C of F 20-22, A of B 20-22
    (22, experts.in_turns, dualpipe.parts("B", 1, 6, 2, 1), dualpipe.parts("F", 1, 6, 2, 1)),
]

FLAGS = {"step_name": "step08_5d", "layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "ffn": 6, "vocab": 10}
FLAGS |= {"seq_len": 4, "micro_batch": 1, "global_batch": 8, "data": "synthetic"}
THREE_D = FLAGS | {"dp": 2, "pp": 2, "tp": 2, "seq_len": 2, "micro_batch": 2}  # two micro-batches of 4 tokens
OF_EXPERTS = FLAGS | {"experts": 4, "top_k": 2, "expert_ffn": 5, "ep": 4}


def of_5d(formula, **flags):
    return formula(cost.resolved(FLAGS | flags))


def sent_5d(**sizes) -> dict[str, float]:
    return dict.fromkeys(("dp", "pp", "cp", "tp", "ep"), 0.0) | sizes


FORWARD = 2 * 4096 * 872 / (989e12 / 2)  # seconds of a sequence at half the peak
WIRE, MOVED = 10 * 2 * 7 / 8 * 4096 * 8 * 2 / 450e9, 255 / 256 * 872


def ways(gpus: int) -> list[int]:
    """How many layouts of each kind there are."""
    return [len(found) for found in first.layouts(DENSE, gpus).values()]


def tp_and_stages(gpus: int) -> list[list[tuple[int, int]]]:
    return [[(each.tp, each.zero) for each in found] for found in first.layouts(DENSE, gpus).values()]


STEP_8 = [
    (150, formulas.reduced, 100, 4),
    # (832/2 + 40)/2 = 228 parameters. The stream has 128 bytes: pp 2·2·128/2/2; tp 2·((10 + 4/2)·64 + 48/2) and norms
    # of a layer and half of the last (16 + 4)·4
    (sent_5d(dp=228 * 4, pp=128, tp=2 * 792 + 80), lambda: formulas.sent(cost.resolved(THREE_D))),
    (sent_5d(dp=7 / 8 * (2 * 872 + 704) * 4 * 2), lambda: of_5d(formulas.sent, zero=3, global_batch=16)),
    # 2·7/8·872·4; keys of 4 tokens 64: 2 layers·2·64·(3·4 - 2)
    (sent_5d(dp=6104, cp=2560), lambda: of_5d(formulas.sent, cp=4, seq_len=16, global_batch=2)),
    # 160 + 40 + 2·192 + 2·32 = 648 parameters and 960/4 of experts: 2·7/8·648·4 + 2·1/2·240·4; rows 256
    (sent_5d(dp=4536 + 960, ep=2 * (4 * 256 + 8 * 4) * 3 / 4), lambda: formulas.sent(cost.resolved(OF_EXPERTS))),
    ((648, 240), lambda: formulas.parameters(cost.resolved(OF_EXPERTS))),
    (by_kind(888 * 4, (81 + 120) * 4, (81 + 120) * 8), lambda: formulas.held(cost.resolved(OF_EXPERTS | {"zero": 2}))),
    (by_kind(872 / 8 * 4, 872 / 8 * 4, 872), lambda: of_5d(formulas.held, zero=3)),
    (
        2 * 2 / 2 * 1632 / 2,
        lambda: formulas.kept_by_layers(cost.resolved(THREE_D)),
    ),  # two in flight, a layer of 4 tokens
    # one in flight, there is no second: of 8 tokens
    (1632, lambda: formulas.kept_by_layers(cost.resolved(THREE_D | {"micro_batch": 4}))),
    (1 / 3, lambda: cost.bubble(cost.resolved(THREE_D))),
    (5, nodes_8.predict, "dp", 4, 2, 3),  # 2 + 3; 5/4·3 + 2/4
    (4.25, nodes_8.predict, "pp", 4, 2, 3),
    (7, nodes_8.predict, "pp", 4, 7, 3),
    (536, head.all_logits_bytes, 3, 10, 8, F32),  # 120 + 4·(24 + 80)
    (268, head.all_logits_bytes, 3, 10, 8, BF16),
    (6000, head.all_logits_bytes, 100, 10, 1, BF16),  # 1000·(2 + 4)
    (96 + 320 + 30 * 8, head.chunked_bytes, 3, 10, 8, F32),
    (48 + 320 + 30 * 2 + 80 * 6, head.chunked_bytes, 3, 10, 8, BF16),  # the head's gradient, narrow and made wide
    (96 + 320 + 30 * 4, head.chunked_bytes, 3, 10, 8, F32, False),
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
    # (352 + 80)/2 = 216 parameters of 2 + 4 + 12/2 bytes; two micro-batches of 2·4096·(8 + 16 + 2·16)/2, by tp
    (216 * 12 + 4096 * 56, first.memory, DENSE, first.Layout(2, 2, 2, 1, "full", 2)),
    # 864 parameters of 18/8 bytes, two layers of weights and one of gradients; 4096·(8 + 16 + 2·248)
    (864 * 18 / 8 + 352 * 8 + 4096 * 520, first.memory, DENSE, first.Layout(8, 1, 1, 3, "none", 1)),
    (1 / 2, first.mfu, DENSE, first.Layout(8, 1, 1, 1, "none", 1)),  # all hides
    (3 / 8, first.mfu, DENSE, first.Layout(8, 1, 1, 1, "full", 1)),
    (64 / 65 / 2, first.mfu, DENSE, first.Layout(4, 1, 2, 1, "none", 1)),
    (3 * FORWARD / (3 * FORWARD + 8 * WIRE) / 2, first.mfu, DENSE, first.Layout(1, 8, 1, 1, "none", 1)),
    # 255/256·872 parameters: 4 and 2 bytes at 64.9 GB/s behind 2 and 1 forwards; 2 and 6 at 28 GB/s behind 1 and 2
    (3 * FORWARD / (6 * MOVED / 64.9e9) / 2, first.mfu, DENSE, first.Layout(256, 1, 1, 1, "none", 1)),
    (3 * FORWARD / (8 * MOVED / 28e9) / 2, first.mfu, DENSE, first.Layout(256, 1, 1, 3, "none", 1)),
    ([10, 10, 10, 10, 10, 10], ways, 16),  # twice five micro-batches; two layers have two stages at most
    ([(1, 1), (1, 3), (8, 1), (8, 3), (1, 1), (8, 1)], lambda: [kind[0] for kind in tp_and_stages(16)]),
    ([0, 0, 6, 6, 2, 8], ways, 512),  # tp 8: dp 64, so micro-batches of 1, 2, 4
]


@pytest.mark.parametrize("rows", [STEP_5, STEP_6, STEP_7, STEP_8], ids=["5", "6", "7", "8"])
def test_formulas(rows):
    check(rows)
