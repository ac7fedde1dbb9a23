"""How long a step takes: physics by hand, how far groups reach, and what profiles make of it."""

import itertools
import math
import os
from dataclasses import replace

import pytest

from common.costs.vocabulary import Message
from common.counts import count_flops
from common.presets import PRESETS
from common.process_groups import Degrees, all_groups
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate
from step06_context_parallel.cost import expansions
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.stages import layers_of_ranks, stage_sizes
from step08_5d.planning.time.machines import MACHINES, Machine
from step08_5d.planning.time.nanotron import NanotronTerms, lateness
from step08_5d.planning.time.profiles import PROFILES, TUNED, Profile
from step08_5d.planning.time.speed import core_again, mfu, seconds_of, spans, times

LLAMA, H100 = PRESETS["llama3-8b"], MACHINES["H100"]
IDEAL = Profile("ideal", products=1.0, attention=1.0, hides=0.0, small=0.0, network=1.0, start=0.0)


def test_latent_attention_and_a_second_block_by_hand():
    """Keys of 192 and values of 128: two products in the forward, and in the backward three and two."""
    model = replace(PRESETS["deepseek-v3"], mtp=1)
    assert core_again(model, "none") == 1 + (3 * 192 + 2 * 128) / (192 + 128) and core_again(LLAMA, "full") == 4.5
    assert (expansions("ring", 1), expansions("ring", 4), expansions("ulysses", 4, "full")) == (3, 4 * 4, 3 + 1)
    assert layers_of_ranks(model, Layout(4096, pp=16)) == (*[4] * 15, 2)
    machine = Machine("H800", 80e9, math.inf, near=math.inf, far=math.inf)
    flops, layout = count_flops(model, 4096), Layout(4096, cp=2, micro_batches=2, dtype="bfloat16")
    products = 3 * (flops.linear + flops.head) + (2 * 4 - 3) * flops.expansion
    attention = core_again(model, "none") * flops.attention_core / 2
    found = times(model, layout, machine, IDEAL).compute
    assert found == pytest.approx(products / machine.products + attention / machine.attention)


def test_time_by_hand():
    """An ideal machine computes three forwards, the attention core 3.5 times but only the half that the mask leaves."""
    machine, flops = Machine("H100", 80e9, math.inf, near=math.inf, far=math.inf), count_flops(LLAMA, 4096)
    found = times(LLAMA, Layout(4096, dp=4, zero=1, micro_batches=2, dtype="bfloat16"), machine, IDEAL)
    assert (machine.products, machine.attention) == (794.5e12, 512 * 3.87e12)
    core = 1.75 * flops.attention_core / machine.attention
    expected = 2 * (3 * (flops.linear + flops.head) / machine.products + core)
    assert found.step == found.compute == pytest.approx(expected)
    assert mfu(LLAMA, Layout(4096, micro_batches=2), 2 * flops.model / machine.peak, machine) == pytest.approx(1)
    assert machine._replace(float8=True).products == 1402.6e12
    assert machine._replace(power=1 / 8).products == 794.5e12 / 2

    def on_h100(profile: Profile = IDEAL, **changes):
        return times(LLAMA, Layout(4096, dtype="bfloat16", **changes), H100, profile)

    assert on_h100(pp=4, micro_batches=4).binds == "bubble"
    assert on_h100(tp=8).binds == "tp" and on_h100(cp=8, micro_batches=64).binds == "cp"
    assert on_h100(dp=64).binds == "dp"
    equal = replace(LLAMA, vocab=8)  # hardly a head, so that all stages have 8 layers
    found = times(equal, Layout(4096, dtype="bfloat16", pp=4, micro_batches=12), H100, IDEAL)
    assert found.bubble == pytest.approx((found.compute + found.pp) * 3 / 12, rel=1e-3)
    for schedule, again in itertools.product(("afab", "zb-h1", "zb-h2"), ("none", "full")):  # as they are played
        layout = Layout(4096, dtype="bfloat16", pp=4, micro_batches=16, schedule=schedule, recompute=again)
        found, linear = times(equal, layout, H100, IDEAL), 8 * count_flops(equal, 4096).linear / 32 / H100.products
        whole = found.compute / 16
        forward = whole / (4 if again == "full" else 3)
        played = simulate(build_schedule(schedule, 4, 16), Costs(F=forward, I=whole - forward - linear, W=linear))
        assert found.bubble == pytest.approx(played.bubble * (1 + found.pp / found.compute), rel=1e-3)
    # Half of what tensor ranks send hides; full recomputation sends two of its five messages once more
    one, half = (on_h100(IDEAL._replace(hides=hides), tp=8).tp for hides in (0, 0.5))
    assert half == one / 2 and on_h100(tp=8, recompute="full").tp == pytest.approx(one * 7 / 5)
    # ZeRO-3's gathers and sums in the backward share what hides them: of 2 + 1 weights' worth, once it is full, none
    slow, wide = H100._replace(near=1e9, far=1e9), Layout(4096, dp=8, zero=3, dtype="bfloat16")
    found, sent = times(LLAMA, wide, slow, IDEAL._replace(hides=1.0)), cost.messages(LLAMA, wide, ends=False)
    assert found.dp == pytest.approx(sum(each.bytes * each.count for each in sent) / 1e9 - found.compute)


def test_terms_that_only_nanotron_has():
    """A pipeline's layer takes at least a second, on 2 tensor ranks 2 ** 0.5, and on two nodes that again.

    Collectives between 4 nodes start 3 times as late as between 2, and move bytes as fast as a table says.
    """

    def seconds(own: NanotronTerms, **changes):
        return times(LLAMA, Layout(4096, dtype="bfloat16", **changes), H100, IDEAL._replace(own=own))

    assert seconds(NanotronTerms(launch=1.0)).binds == "launch"
    paced, layers = NanotronTerms(0.0, 0.0, paced=1.0), max(stage_sizes(LLAMA, 4, 4096))
    found = seconds(paced, pp=4, tp=2, micro_batches=12)
    assert found.compute + found.launch + found.tp == pytest.approx(12 * (layers * 2**0.5), rel=1e-3)
    found, layers = seconds(paced, pp=2, tp=16), max(stage_sizes(LLAMA, 2, 4096))
    assert found.compute + found.launch + found.tp == pytest.approx(layers * 16**0.5 * 2**0.5, rel=0.01)
    assert lateness(Layout(4096, pp=4, stages=2), 0.5) == 2 * lateness(Layout(4096, pp=4), 0.5) == 4
    own = IDEAL._replace(own=NanotronTerms(far_start=0.1))
    message = Message("shard", "all_gather", 69e9, 1)
    for nodes, speed in ((8, 69e9), (4, 119e9)):
        found = seconds_of(message, Layout(4096, dp=8 * nodes, zero=1), H100, own)
        assert found == pytest.approx(0.1 * (nodes - 1) + 69e9 / speed)
    assert seconds_of(message, Layout(4096, dp=8, tp=8, zero=1), H100, own) == pytest.approx(0.7 + 8**0.5)


def test_messages_by_a_data_sheet():
    """Half of each bandwidth: 225 GB/s in a node, 25 of each card beyond. A group has the cards of its ranks, a ring's
    hop one, and an all-to-all one for what leaves the node."""
    half = IDEAL._replace(network=0.5)

    def speed(group: str, op: str, **degrees) -> float:
        return 9e9 / seconds_of(Message(group, op, 9e9, 1), Layout(4096, **degrees), H100, half)

    assert speed("tp", "all_gather", tp=8) == pytest.approx(225e9)
    assert [speed("shard", "all_gather", dp=8, tp=tp, zero=1) for tp in (8, 4, 2)] == pytest.approx([25e9, 50e9, 100e9])
    assert (
        speed("cp", "send", cp=16, tp=2) == speed("shard", "reduce_scatter", dp=8, tp=8, zero=1) == pytest.approx(25e9)
    )
    assert speed("ep", "all_to_all", dp=16, ep=16) == pytest.approx(50e9), "half stays"
    late = IDEAL._replace(start=1.0)
    assert seconds_of(Message("shard", "all_gather", 0, 2), Layout(4096, dp=64, zero=1), H100, late) == 2 * 4, (
        "1 + log2(8)"
    )


def test_a_measured_network_has_no_share_on_top():
    """All-reduces of 240 GB/s over all nodes are 8 cards of 30, which is what 0.6 of the data sheet assumes."""
    measured = H100._replace(far=30e9, measured=True)
    ways = [{"dp": 64, "zero": 3}, {"dp": 8, "tp": 8, "zero": 1}, {"dp": 2, "tp": 4, "pp": 8}, {"dp": 4, "cp": 16}]
    for layout in (Layout(4096, **way, micro_batches=16, dtype="bfloat16") for way in ways):
        for each in (PROFILES["fsdp"], PROFILES["megatron"], TUNED):
            assumed, found = (times(LLAMA, layout, machine, each).step for machine in (H100, measured))
            assert found == pytest.approx(assumed)
        # Nanotron's table says less of 8 nodes, and no more than 400 of any: its groups between nodes get this instead
        table, found = (times(LLAMA, layout, machine, PROFILES["nanotron"]) for machine in (H100, measured))
        best = times(LLAMA, layout, measured._replace(far=50e9), PROFILES["nanotron"])
        assert best.step <= table.step and (found.dp < table.dp or layout.pp > 1)
    message, wide = Message("shard", "all_gather", 24e9, 1), Layout(4096, dp=64, zero=3)
    late = PROFILES["nanotron"].own.far_start * 7
    assert seconds_of(message, wide, measured, PROFILES["nanotron"]) == pytest.approx(24 / 240 + late)
    assert seconds_of(message, wide, measured, IDEAL._replace(network=0.1)) == pytest.approx(24 / 240)


ORDERS = [",".join(each) for each in itertools.permutations(("tp", "cp", "dp", "pp"))]


@pytest.mark.parametrize(
    "order", ORDERS if os.environ.get("TEST_ALL") else ["tp,cp,pp,dp", "tp,cp,dp,pp", "dp,pp,cp,tp"]
)
def test_how_far_groups_reach(order):
    """Over as many nodes as the real groups, the first of which has as many ranks on its node."""
    of_weights = ("shard", "replica", "expert_shard", "expert_replica")
    for dp, pp, cp, tp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4, 8)):
        degrees = Degrees(tp, cp, pp, dp, axes=tuple(reversed(order.split(","))))
        for ep, copies in itertools.product((1, 2, 8) if dp * cp * tp % 8 == 0 else (1,), {1, min(2, dp), dp * cp}):
            layout = Layout(4096, dp, pp, cp, tp, ep, zero=1, zero_replicas=copies)
            groups = all_groups(replace(degrees, ep=ep, experts=ep > 1, zero_replicas=copies))
            for name in ("tp", "cp", "pp_forward", "ep", *of_weights):
                nodes = [rank // 8 for rank in groups[name][0]]
                expected = len(set(nodes)), nodes.count(nodes[0])
                assert spans(layout, name, H100._replace(order=order)) == expected, (name, layout)


def test_profiles_have_six_numbers():
    """Tuned is faster than the two that it is made of, and these are faster than nanotron where it was tried."""
    layout = Layout(4096, dp=16, tp=4, zero=1, micro_batches=4, dtype="bfloat16")
    seconds = {each.name: times(LLAMA, layout, H100, each).step for each in (*PROFILES.values(), TUNED)}
    assert seconds["tuned"] < min(seconds["fsdp"], seconds["megatron"]) < seconds["nanotron"]
    for each in PROFILES.values():
        assert sum(isinstance(value, float) for value in each) == 6
