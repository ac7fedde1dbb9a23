"""The answers to calculations, predictions and designs of steps 5 to 8 follow from the project's own formulas."""

import contextlib
import io
import re
from dataclasses import replace

import pytest
import torch

from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK
from common.costs.vocabulary import WIDTHS, added
from common.counts import count_parameters
from common.presets import resolve
from common.process_groups import Degrees, all_groups, coordinates
from step01_single_gpu.cost import saved_activations, total_bytes
from step05_pipeline import cost as pipeline
from step05_pipeline.schedules.__main__ import parse_costs
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Timeline, simulate
from step07_expert_parallel import cost as experts
from step08_5d import cost
from tests.house.answers.exercises import check, exercise

GIB, PEAK = 2**30, H100_TFLOPS * 1e12
LLAMA_8B, LLAMA_70B, DEEPSEEK = map(resolve, ("llama3-8b", "llama3-70b", "deepseek-v3-like"))


def printed(code: str, names: dict | None = None) -> str:
    """What a block of code prints, with the names that earlier blocks have defined."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, {} if names is None else names)
    return output.getvalue()


# ---- step 5 ----------------------------------------------------------------------------------------------------------


def test_step_5_exercise_1():
    ratios = [pipeline.bubble_ratio(8, 32, v) for v in (1, 4)]
    shares = [100 * (1 - pipeline.efficiency(ratio)) for ratio in ratios]
    enough = next(m for m in range(8, 1000) if 1 - pipeline.efficiency(pipeline.bubble_ratio(8, m)) <= 0.05)
    check(exercise(5, 1, "calculation"), *ratios, 1 + ratios[0], *shares, enough, 0.95, 19)


def timeline(name: str, ranks: int, micro_batches: int, costs: str) -> Timeline:
    schedule = build_schedule(name, ranks, micro_batches)
    return simulate(schedule, parse_costs(costs, schedule))


def test_step_5_exercise_2():
    costs = re.search(r"--costs (\S+)", exercise(5, 2, "prediction").question)[1]
    instant = [timeline(name, 4, 8, costs.replace("communication=1", "communication=0")) for name in ("1f1b", "afab")]
    late = {name: timeline(name, 4, 8, costs).makespan for name in ("1f1b", "afab")}
    assert instant[0].makespan == instant[1].makespan
    # Its tables of actions that follow each other: forwards, backwards of 2 units, messages, and their sum
    rows = re.findall(r"^\D.*? (\d+)$", exercise(5, 2, "prediction").blocks("text")[0], re.MULTILINE)
    bound = sum(map(int, rows))
    forwards, backwards, messages = 11, 11, 16
    assert forwards + 2 * backwards + messages == late["1f1b"] > bound > late["afab"]
    parts = [18, 9, 9, 9]
    assert list(map(int, rows)) == parts
    check(exercise(5, 2, "prediction"), instant[0].makespan, *late.values(), bound, *parts, 12, 11, 16, 22)
    assert bound - instant[0].makespan == 12


def test_step_5_exercise_5():
    costs = re.search(r"--costs ([^`\s]+)", exercise(5, 5, "design").question)[1]
    found = {name: timeline(name, 8, 16, costs) for name in ("afab", "1f1b", "interleaved", "zb-h1")}
    kept = {name: max(each.unfinished if name == "zb-h1" else each.in_flight) for name, each in found.items()}
    kept["interleaved"] /= 2
    times = {name: each.makespan for name, each in found.items()}
    for most, best in ((12, "interleaved"), (8, "zb-h1")):
        assert min((name for name in found if kept[name] <= most), key=times.get) == best
    bubbles = 7 * (1 + 1.4 - 0.6), 7 * (1 + 1.4 + 0.6) / 2  # without messages: ZB-H1's, interleaved stages'
    check(exercise(5, 5, "design"), *times.values(), *kept.values(), *bubbles)


# ---- step 6 ----------------------------------------------------------------------------------------------------------


def test_step_6_exercise_1():
    tokens, times = 131_072 // 16, {}
    for model in (LLAMA_8B, LLAMA_70B):
        size = 2 * tokens * model.kv_heads * model.head_width * 2
        operations = 4 * tokens**2 * model.heads * model.head_width / 2  # half of a causal block
        times[model] = size / NETWORK * 1e3, operations / PEAK * 1e3
    (message, block), (same, longer) = times.values()
    assert block < message == same < longer
    check(exercise(6, 1, "calculation"), tokens, 4096, 1024, size / 1e6, message, block, longer)


def test_step_6_exercises_2_and_5():
    names, (first,) = {}, exercise(6, 2, "prediction").blocks("python")
    counted = list(map(int, re.findall(r"\d+", printed(first, names))))
    ratio = counted[-1] / counted[0]
    check(exercise(6, 2, "prediction"), round(ratio))
    assert ratio == pytest.approx(15, rel=0.01)
    (second,) = exercise(6, 5, "design").blocks("python")
    found = {}
    for split in ("zigzag", "contiguous", "striped"):
        pairs, blocks = printed(second.replace("zigzag", split), names).splitlines()
        pairs, reach = re.match(r"(\[.*\]) (.*)", pairs).groups()
        found[split] = tuple(list(map(int, re.findall(r"\d+", each))) for each in (pairs, reach, blocks))
    millions, reach, blocks = found["contiguous"]
    assert max(reach) == 1 and max(found["zigzag"][1]) == max(found["striped"][1]) == 7
    of_striped = found["striped"][2]
    assert min(of_striped) == max(of_striped)
    pairs = [round(each(found[split][0]) / 1e6) for split in ("contiguous", "zigzag") for each in (min, max)]
    check(exercise(6, 5, "design"), *pairs, max(of_striped), min(blocks), max(blocks))


# ---- step 7 ----------------------------------------------------------------------------------------------------------


def test_step_7_exercise_1():
    expert = 3 * DEEPSEEK.hidden * DEEPSEEK.expert_ffn
    layers = len(DEEPSEEK.expert_layers)
    everything = expert * DEEPSEEK.experts * layers
    held = everything / 16
    training = sum(WIDTHS["bfloat16"])
    found = expert / 1e6, everything / 1e9, everything / 1e9 * DEEPSEEK.top_k / DEEPSEEK.experts, held / 1e9
    check(exercise(7, 1, "calculation"), layers, *found, 2 * held / GIB, training, training * held / GIB)


def test_step_7_exercise_5():
    of = exercise(7, 5, "design")
    counting, limiting = of.blocks("python")
    names = {"torch": torch}
    torch.manual_seed(0)
    drawn, limited_to = (
        float(re.findall(r"[\d.]+", printed(code, names))[-1])
        for code in (counting, limiting + "\n".join(counting.splitlines()[2:]))
    )
    once = experts.fan_out(8, 256, 8) * 7 / 8
    assert drawn == pytest.approx(once, abs=0.05)
    limited = replace(DEEPSEEK, experts=256, top_k=8, expert_groups=8, groups_per_token=4)
    assert experts.copies(replace(limited, expert_groups=1, groups_per_token=1), 8, False) == 7
    assert limited_to == pytest.approx(3.46, abs=0.02)
    check(of, 7, once, experts.copies(limited, 8, True), limited_to)


# ---- step 8 ----------------------------------------------------------------------------------------------------------


def test_step_8_exercise_1():
    degrees = Degrees(tp=8, cp=1, pp=16, dp=128)
    place, groups = coordinates(5000, degrees), all_groups(degrees)
    (tp,), (pp,) = ([ranks for ranks in groups[name] if 5000 in ranks] for name in ("tp", "pp_forward"))
    assert len({rank // 8 for rank in tp}) == 1
    at = pp.index(5000)
    nodes = len({rank // 8 for rank in pp})
    found = [*tp[::7], pp[at - 1], pp[at + 1], place["tp"], place["pp"], place["dp"], nodes]
    of = exercise(8, 1, "calculation")
    assert f"{tp[-1]:,}" in of.answer and f" {nodes} nodes" in of.answer
    check(of, *found, 5000 // 8)


def test_step_8_exercise_3():
    degrees = Degrees(pp=2, tp=2)
    turned = all_groups(replace(degrees, axes=tuple(reversed("dp,pp,cp,tp".split(",")))))
    assert [0, 2] in [list(ranks) for ranks in turned["tp"]]
    model = resolve("debug")
    sizes = added(cost.messages(model, cost.Layout(256, pp=2, tp=2, dtype="float64", micro_batch=2, micro_batches=4)))
    over = {
        name: sum(size for (group, _), (_, size) in sizes.items() if group.startswith(name)) for name in ("tp", "pp")
    }
    x = 2 * 256 / 2 * model.hidden * 8 / 1e6
    of_layers, of_ends = 4 * model.layers / 2 * 10 * x, 4 * 2 * x
    assert of_layers + of_ends == pytest.approx(over["tp"] / 1e6, rel=0.01) and over["pp"] / 1e6 == pytest.approx(4 * x)
    check(exercise(8, 3, "prediction"), *(size / 1e6 for size in over.values()), x, of_layers, of_ends)


def test_step_8_exercise_5():
    seq, per_step, speed, psi = 32_768, 128, 400e12, count_parameters(LLAMA_70B).total
    layout = cost.Layout(seq, dtype="bfloat16")
    states = sum(cost.held(LLAMA_70B, layout).values()) / GIB
    kept = {way: saved(LLAMA_70B, seq, way) / GIB for way in ("none", "full")}
    sharded, of_tp = states / 8 / 8, kept["none"] / 8
    assert sharded + of_tp > 80 > sharded + of_tp / 4 and sharded + kept["full"] / 8 < 80
    flops = sum(cost.operations(LLAMA_70B, layout).values())
    more = flops / (6 * psi * seq)
    times = flops / speed / 32, flops * 4 / 3 / speed / 8
    steps = per_step / 2 * times[0], per_step / 8 * times[1]
    messages = cost.messages(LLAMA_70B, cost.Layout(seq, dp=8, tp=8, zero=3, dtype="bfloat16"))
    exchanged = sum(m.bytes * m.count for m in messages if m.group == "shard") / NETWORK
    assert exchanged < times[0]
    chosen = cost.Layout(seq, dp=1, pp=2, cp=4, tp=8, zero=1, micro_batches=128, dtype="bfloat16")
    held = sum(cost.held(LLAMA_70B, chosen).values()) / GIB
    found = [states, *kept.values(), sharded, of_tp, of_tp / 4, kept["full"] / 8, psi, round(100 * (more - 1), -1)]
    found += [*times, *(round(step, -1) for step in steps), exchanged, held, held + of_tp / 4, 1 / cost.bubble(chosen)]
    tokens, kv_width = seq // 4, LLAMA_70B.head_width * LLAMA_70B.kv_heads // 8
    hops = 3 * 2 * tokens * kv_width * 2
    attention = 4 * seq**2 * LLAMA_70B.hidden / 32 / 2 / speed
    assert hops / NETWORK < attention
    found += [tokens, hops / 1e6, 1e3 * hops / NETWORK, 1e3 * attention]
    found += [64, 32, 16, 12]
    check(exercise(8, 5, "design"), *found)


def saved(model, seq: int, recompute: str) -> int:
    return total_bytes(saved_activations(model, 1, seq, torch.bfloat16, recompute=recompute))
