"""Formulas of step 7, each against a number worked out by hand and against what ranks really keep, hold and send."""

import itertools
import re

import pytest
import torch

from common.config import TrainConfig
from common.costs.vocabulary import Message, added
from common.experiments.on_nodes import NODES, RANKS
from common.measure.saved_tensors import SavedTensors
from common.measure.storages import live_bytes
from common.process_groups import Degrees, build_mesh
from step07_expert_parallel import cost
from step07_expert_parallel.experiments import dualpipe, memory, nodes, traffic
from step07_expert_parallel.experiments.layer import SHAPE, ExpertLayer
from tests.harness.ranks import ROOT, run_ranks
from tests.mechanisms.test_formulas import EXPERTS, KINDS, check

# ---- by hand ---------------------------------------------------------------------------------------------------------


def by_part(*sizes: tuple[float, float]) -> dict:
    """Bytes of experts and of all else, for each kind."""
    return {(kind, part): each[i] for kind, each in zip(KINDS, sizes) for i, part in enumerate(("experts", "all else"))}


def limited(nodes: int, **shape):
    model = TrainConfig(step_name="step07_expert_parallel", layers=1, **shape).model_config
    return model, nodes


TURN = [("compute", 2), ("travel", 3), ("compute", 1)]
BY_HAND = [
    (240, cost.dispatch_bytes, 10, 2, 8, 4, 2),  # 2·10·8·2·3/4
    # 8·4·3/4 bytes of counts; two of 2·10·8·2·3/4 may hide, if there were shared experts, and two may not
    (
        [Message("ep", "all_to_all", 24, 3), Message("ep", "all_to_all", 240, 6), Message("ep", "all_to_all", 240, 6)],
        lambda: cost.messages(EXPERTS, 10, 4, 2, times=3),
    ),
    ([], cost.messages, EXPERTS, 10, 1, 2),
    (2 * 5 / 6, cost.fan_out, 2, 4, 2),
    # Of 4 choices among 8 experts on 2 nodes half leave; of 2·(1 - 1/70) nodes half; within one node, half of one
    (2, cost.copies, *limited(2, experts=8, top_k=4, expert_groups=2, node_limit=2), False),
    (69 / 70, cost.copies, *limited(2, experts=8, top_k=4, expert_groups=2, node_limit=2), True),
    (0.5, cost.copies, *limited(2, experts=8, top_k=4, expert_groups=2, node_limit=1), True),
    (3.5, cost.copies, *limited(8, experts=256, top_k=8, expert_groups=8, node_limit=4), True),  # 4·7/8
    ((960, 1000), cost.split_parameters, EXPERTS),  # 2·4·120
    # 240 of a rank's experts, two ranks hold the same
    (by_part((480, 2000), (960, 4000), (240 / 2 * 12, 1000 / 8 * 12)), cost.held, EXPERTS, 8, 4, 1, "bfloat16"),
    (by_part((240, 250), (480, 500), (1440, 1500)), cost.held, EXPERTS, 8, 4, 3, "bfloat16"),
    (by_part((960, 4000), (480, 500), (960, 1000)), cost.held, EXPERTS, 8, 4, 2, "float32"),
    # Router 3·4·13 + 6·13; sorting 3·6·8 + 3·8; experts 6·(8 + 4·5)·4; outputs 6·(8·4 + 4)
    (156 + 78 + 168 + 672 + 216, cost.activations, EXPERTS, 3, 6, 4, 1),
    # and weights of the router in float32 4·4·8, the order of what arrived 2·5·8
    (156 + 78 + 128 + 168 + 80 + 280 + 120, cost.activations, EXPERTS, 3, 5, 2, 2),
    ({"attention": 432, "experts": 544}, cost.operations, EXPERTS, 3),  # 2·(192 + 3·8), 2·(240 + 32)
    ((4 * (432 + 64) + 480) / 976, cost.repeated_work, EXPERTS, 3, 4),  # four times all but 2·240 of routed experts
    (1, cost.repeated_work, EXPERTS, 3, 1),
    # 1000 and 960/4 parameters of 18 bytes; 2·3·8·2·3/4 bytes
    ((4, 1, 6, 18 * 1240, 72), cost.grown, EXPERTS, 3, 4),
    (9, cost.width_to_hide, 36, 2, 4),  # 2·3/4·36/(3·2)
    (4.5, cost.width_to_hide, 36, 2, 4, 2, True),
    (1.5, cost.cheatsheet, EXPERTS, 384, 2, 4),  # 3·384/(12·4·8·2)
    (6, cost.alone, TURN),
    (9, cost.in_turns, TURN, TURN),  # computes 0-2, 2-4; travels 2-5, 5-8; computes 5-6, 8-9
    (7, cost.in_turns, [("counts", 1), *TURN[:2]], [("compute", 4)]),  # 0-1, 1-3, travels 3-6; computes 3-7
    # A 1, E 6, travel 2: C of B 0-2, A 0-1, D of F 2-4, E of B 2-14, D of B 14-16, E 14-20, C of F 20-22, A of B 20-22
    (22, lambda: cost.in_turns(cost.parts("B", 1, 6, 2, 1), cost.parts("F", 1, 6, 2, 1))),
    ([("compute", 7)] * 2, cost.parts, "W", 1, 6, 2, 2),
    ([("travel", 2), ("compute", 6), ("travel", 2), ("compute", 1)], cost.parts, "I", 1, 6, 2, 1),
]


def test_formulas_by_hand():
    check(BY_HAND)


def test_two_micro_batches_in_turns():
    """What they hide is what the page says, and a copy that stays within a node does not cross InfiniBand."""
    page = (ROOT / "step07_expert_parallel" / "dualpipe.md").read_text()
    cases = dualpipe.partner_cases()
    assert [copies for _, _, copies, _ in cases] == [1.75, 1.75, 7, 7, 3.5]
    for name, *case in cases:
        *_, travel, exposed = dualpipe.partner_times(*case)
        (row,) = re.findall(rf"^\| {name} \| ([\d.]+) \| .* \| (\d+) % \|$", page, re.MULTILINE)
        assert row == (f"{1e6 * travel:.2f}", f"{100 * (1 - exposed / travel / 4):.0f}"), name


# ---- counted ---------------------------------------------------------------------------------------------------------

SMALL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256, "seq_len": 32, "warmup": 1}
SMALL |= {"step_name": "step07_expert_parallel", "data": "synthetic", "micro_batch": 1, "global_batch": 4, "dp": 2}
SMALL |= {"experts": 4, "top_k": 2, "expert_ffn": 24, "dense_layers": 1, "balance": "none"}
LAYERS = [SHAPE | {"ep": ep, "dtype": dtype} for ep, dtype in itertools.product((1, 2), ("float32", "bfloat16"))]
HELD = [
    SMALL | {"ep": ep, "zero": zero, "dtype": dtype}
    for ep, zero, dtype in ((1, 1, "bfloat16"), (2, 3, "float32"), (2, 0, "bfloat16"))
]


def kept_for_backward(mesh, flags: dict) -> tuple[int, int, int]:
    """Bytes that a layer's forward leaves for the backward, rows that this rank's experts have got, and its tokens."""
    layer, received = ExpertLayer(mesh, **flags), []
    layer.layer.experts.register_forward_pre_hook(lambda module, inputs: received.append(len(inputs[0])))
    with SavedTensors(layer.layer) as saved:
        layer.forward()
    node = layer.y.grad_fn
    while not hasattr(node, "choices"):  # beside autograd's own: which rows a token has, in the node that adds them up
        node = node.next_functions[0][0]
    order = [each for each in vars(node.choices).values() if isinstance(each, torch.Tensor)]
    return live_bytes([*saved.tensors, *order]), received[0], layer.tokens


def ranks_count() -> dict:
    mesh = build_mesh(Degrees(dp=2), torch.device("cpu"))
    found = {"layers": [kept_for_backward(mesh, flags) for flags in LAYERS]}
    found["held"] = [memory.held_by_part(mesh, flags) for flags in HELD]
    return found | {"sent": [traffic.send(mesh, flags | {"evenly": True}) for flags in LAYERS]}


def test_what_a_layer_keeps_and_sends_and_what_a_rank_holds():
    counted, model = run_ranks(2, ranks_count), TrainConfig(**SHAPE).model_config
    for rank in counted:
        for flags, (kept, rows, tokens), (*_, sent) in zip(LAYERS, rank["layers"], rank["sent"], strict=True):
            width = getattr(torch, flags["dtype"]).itemsize
            assert kept == cost.activations(model, tokens, rows, width, flags["ep"]), flags
            messages = added(cost.messages(model, tokens, flags["ep"], width))
            assert sent == sum(size for _, size in messages.values()), flags
    for index, flags in enumerate(HELD):
        predicted = cost.held(TrainConfig(**flags).model_config, 2, flags["ep"], flags["zero"], flags["dtype"])
        for key, size in predicted.items():
            found = sum(rank["held"][index][key] for rank in counted) / 2
            assert found == pytest.approx(size, rel=1e-3), (flags, key)  # padding


def norms(cases: list[tuple]) -> list[float]:
    mesh = build_mesh(Degrees(dp=NODES * RANKS), torch.device("cpu"))
    return [nodes.step(mesh, case).function()[1] for case in cases]


def test_a_token_sent_once_to_each_node_is_the_same_layer():
    """As with a copy per expert, whose cases come first."""
    cases = sorted(nodes.CASES.values(), key=lambda case: case[1])
    for found in run_ranks(NODES * RANKS, norms, cases):
        assert found[1::2] == pytest.approx(found[::2], rel=2e-7)  # in float32
