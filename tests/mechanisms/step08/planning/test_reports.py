"""The planner's reports: overlap, why a plan won, layouts side by side; and bad input to all of them."""

import itertools
import os
import re
from functools import cache

import pytest

from common.costs.hardware import H100_TFLOPS
from common.counts import count_parameters
from common.errors import UsageError
from common.launching.command_line import parse, summary
from common.presets import PRESETS
from step08_5d import config as step08
from step08_5d.cost import Layout
from step08_5d.planning import explain
from step08_5d.planning.__main__ import COMMANDS, main
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.search import MOST_FULL, Candidate, Task, divisors, flags, plans
from step08_5d.planning.time import overlap
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import ENDS, PROFILES, RANGE, TUNED
from step08_5d.planning.time.speed import times

LLAMA, H100 = PRESETS["llama3-8b"], MACHINES["H100"]
EVERY = bool(os.environ.get("TEST_ALL"))


def task(name: str, gpus: int, seq: int = 4096, sequences: int = 256, interleaved: bool = False) -> Task:
    return Task(name, PRESETS[name], gpus, seq, sequences, H100, interleaved)


def one_profile(mine: Task, name: str) -> Task:
    return mine._replace(profiles=(PROFILES[name],))


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_overlap_by_hand():
    """8 ranks everywhere, 4,096 tokens (of a context rank: 512), 450 GB/s within a node and 50 between."""
    peak, model = 1e12 * H100_TFLOPS, PRESETS["mixtral-8x7b"]
    rates, degrees = overlap.Speeds(peak, 450e9, 50e9), dict.fromkeys(overlap.DEGREES, 8)
    found = {row.name: row for row in overlap.rows(model, 4096, 1, degrees | {"cp": 1}, rates, ("tp",))}
    dp, zero = found["dp"], found["ZeRO-3"]
    assert dp.corrected == pytest.approx(2 * 7 / 8 * peak / (2 * 50e9 * 4096)) and dp.ours == 2 * dp.corrected
    assert dp.printed / dp.corrected == pytest.approx(count_parameters(model).total / 2)
    assert zero.printed == zero.corrected / 2 == pytest.approx(7 / 8 * peak / (2 * 4096 * 50e9))
    assert found["tp"].ours == found["tp"].corrected * 4096 / (2 * 14336)
    assert found["pp"].printed == pytest.approx(peak / (32 * 4096 * 4 * 50e9))
    assert found["ep"].ours == pytest.approx(2 * 7 / 8 * peak / (3 * 50e9 * 14336))
    (cp,) = overlap.rows(model, 4096, 1, dict.fromkeys(overlap.DEGREES, 1) | {"cp": 8}, rates, ())
    assert cp.ours == pytest.approx(2 / 4 * peak / 50e9 / 512) and cp.printed is None


@pytest.mark.parametrize(
    "words, line",
    [
        ("overlap --model llama3-8b --ep 8", "error: llama3-8b has no experts for --ep 8"),
        ("overlap --model llama3-8b", "error: no degree is more than 1"),
        ("overlap --model llama3-8b --dp 8 --bandwidth 0", "error: argument --bandwidth: 0 must be above 0"),
        ("memory --model deepseek-v3 --cp 2 --cp-mode ulysses", "error: --cp-mode ulysses: of latent attention's"),
        ("plan --model llama3-8b --gpus 8 --gpu A100 --float8", "error: --float8: nobody has measured products"),
        ("memory --model llama3-8b --tp 7", "error: --tp 7 does not divide --heads 32"),
        ("memory --model llama3-8b --hidden 6144 --heads 48 --kv-heads 12 --tp 16", "error: --tp 16 and --kv-heads"),
        ("memory --model llama3-8b --no-fused", "error: --no-fused is not in the formula of memory; dry-run takes it"),
        (
            "memory --model llama3-8b --mask-documents",
            "error: --mask-documents ",
        ),
        ("memory --model llama3-8b --schedule zbv --pp 2", "error: --schedule zbv: the formula knows 1f1b, "),
        ("memory --model llama3-8b --gpu H800", "error: --gpu is not a flag of memory, but of plan, compare, page"),
        ("memory --model llama3-8b --gpus 64", "error: --gpus is not a flag of memory, but of plan, page"),
        ("memory --model llama3-8b --layouts 64", "error: --layouts is not a flag of step08_5d"),
        ("memory --model llama3-8b --pp 2 --virtual-stages 2", "error: --virtual-stages 2: --schedule 1f1b has"),
        ("memory --model llama3-8b --global-batch 6 --dp 4", "error: --global-batch 6 is not divisible by"),
        ("compare --model llama3-8b --dp 96 --tp 8", "error: unknown: --dp --tp 8; put each layout in quotes"),
        ("compare --model llama3-8b --no-such-flag x", "error: unknown: --no-such-flag\n"),
        ("compare --model deepseek-v3 --mtp 1 x", "error: unknown: --mtp; put each layout in quotes, with all flags"),
        ("compare --model llama3-8b --gpus 64 x", "error: --gpus is not a flag of compare, but of plan, page"),
        ("compare --model llama3-8b --global-batch 8 --tokens-per-batch 1M x", "error: argument --tokens-per-batch: n"),
        ("compare --model llama3-8b --tokens-per-batch 4097 x", "error: --tokens-per-batch 4097 is no multiple of"),
        ("plan --model llama3-8b --nodes 32", "error: argument --nodes: say --gpus, which are those of all nodes"),
        ("plan --model llama3-8b --gpus 37", "error: --gpus 37 must be as many on every node of 8, as 32 and 40 are"),
        ("plan --model llama3-8b --gpus 8 --memory 80000000000", "error: --memory is 1,000,000,000 times what the d"),
        ("plan --model llama3-8b --gpus 16 --between 400", "error: --between is 8 times what the data sheet says; it"),
        ("memory --model llama3-8b --dp 0", "error: --dp 0 must be at least 1"),
        (
            "plan --model llama3-70b --gpus 64 --seq-len inf",
            "error: argument --seq-len: inf is no whole number of tok",
        ),
        ("plan --model llama3-70b --gpus 768.0", "error: argument --gpus: 768.0 is no whole number, such as 64"),
        (
            "plan --model llama3-70b --gpus 8 --seq-len 4kk",
            "error: argument --seq-len: 4kk is no whole number of tokens,",
        ),
        (
            "compare --model llama3-8b --between 26,25 x",
            "error: argument --between: 26,25 is no number without a unit, s",
        ),
        (
            "plan --model llama3-70b --gpus 64 --tokens-per-batch 8e6",
            "error: --tokens-per-batch 8000000 is no multiple of --seq-len 4096; try 7999488 (1,953 x 4096) or 80",
        ),
    ],
)
def test_bad_input_is_one_line(words, line, capsys):
    assert len({summary(each.run.__doc__) for each in COMMANDS.values()}) == len(COMMANDS), "each has words of its own"
    assert main(words.split()) == 2
    found = capsys.readouterr().err
    assert found.startswith(line) and found.count("\n") == 1


# ---- search ----------------------------------------------------------------------------------------------------------


SEARCHES = [("smollm-1.7b", 4, 2048, 16, False), ("smollm-1.7b", 4, 2048, 16, True)]
SEARCHES += [("mixtral-8x7b", 16, 4096, 16, False)] + [("mixtral-8x7b", 16, 4096, 16, True)] * EVERY


@pytest.mark.parametrize("name, gpus, seq, sequences, interleaved", SEARCHES)
def test_search_finds_what_trying_everything_finds(name, gpus, seq, sequences, interleaved):
    """Every combination that step 8 accepts, of any divisor and micro-batch: none that fits is faster."""
    mine, fastest = one_profile(task(name, gpus, seq, sequences, interleaved), "megatron"), None
    model, sizes = mine.model, divisors(gpus)
    for dp, tp, pp, cp in itertools.product(sizes, repeat=4):
        if dp * tp * pp * cp != gpus or sequences % dp or pp > model.layers:
            continue
        eps = [each for each in divisors(model.experts or 1) if dp * cp * tp % each == 0]
        for ep, zero, again in itertools.product(eps, range(4), ("none", "selective", "full")):
            most = model.layers // pp if interleaved else 1
            for size, stages in itertools.product(divisors(sequences // dp), range(1, most + 1)):
                m = sequences // dp // size
                if stages > 1 and (pp == 1 or m % pp):
                    continue
                layout = Layout(seq, dp, pp, cp, tp, ep, zero, size, m, "bfloat16", stages, recompute=again)
                seconds = times(model, layout, H100, PROFILES["megatron"]).step
                if fastest and seconds >= fastest[0]:  # before its memory, whose formula takes longer
                    continue
                if sum(memory(model, layout).values()) <= MOST_FULL * H100.memory and accepted(mine, layout):
                    fastest = seconds, layout
    assert min(plan.seconds["megatron"] for plan in plans(mine)[0]) == fastest[0], fastest[1]


def accepted(mine: Task, layout: Layout) -> bool:
    try:
        flags(mine, layout)
    except UsageError:
        return False
    return True


OTHER_MODELS = [
    "--model llama3-8b --gpus 512 --interleaved",
    "--model llama3-8b --gpus 512",
    "--model llama3-70b --gpus 64",
    "--model llama3-405b --gpus 1024 --tokens-per-batch 4M",
    "--model deepseek-v3-like --gpus 1024 --tokens-per-batch 4M",
    "--model smollm-135m --gpus 32 --seq-len 2048 --interleaved",
    "--model llama3-1b --gpus 16 --seq-len 128k --gpu A100",
]


@pytest.mark.parametrize(
    "words",
    [
        "--model llama3-8b --gpus 64 --seq-len 128k --tokens-per-batch 4M",
        f"--model mixtral-8x7b --gpus {64 if EVERY else 16}",
        "--model llama3-8b --gpus 8",
        "--model smollm-1.7b --gpus 2 --seq-len 2048 --tokens-per-batch 32k",
        *(OTHER_MODELS if EVERY else ()),
    ],
)
def test_the_printed_command_is_a_command_of_step_8(words, capsys):
    """Long sequences need cp, and experts are tried over several ranks; three steps and the neighbours are printed."""
    main(["plan", *words.split()])
    printed = capsys.readouterr().out
    argv = re.split(r"train\.(?:slurm|py) ", printed.strip().splitlines()[-1])[1].split()
    config = parse(8, argv)
    config.resolve_and_check(int(words.split()[3]))
    step08.check(config)
    assert all(f"  {step}. " in printed for step in (1, 2, 3)) and "what other choices cost" in printed
    assert "This measures the layout; for a training add --data, --tokenizer, --steps, --lr and --save" in printed
    again = {"none": "without", "selective": "with selective", "full": "with full"}[config.recompute]
    assert re.search(rf"one GPU would need [\d,]+ GB, {again} recomputation, and", printed)
    assert "what would change it" in printed and ("128k" not in words or config.cp > 1)
    asked = "--interleaved" in words
    assert (config.schedule == "interleaved") == ((config.virtual_stages or 1) > 1) == asked
    assert ("stages each" in printed.split("what would change it")[0]) == ("Without interleaving" in printed) == asked
    assert (
        "what it costs if your cluster is not as you think" in printed and "slowest ... fastest of nanotron" in printed
    )
    assert not asked or "= 32 layers in" in printed
    assert ("mixtral" not in words) or "ep " in printed
    assert main(["memory", *argv]) == 0, "and `memory` takes it, too"
    held = re.search(r"the fullest is \w+ \d+: ([\d.]+) GB, most of it (\w+)", capsys.readouterr().out)
    size, kind = re.search(r"The first fills (\d+) GB, most of it (\w+)", printed).groups()
    assert abs(float(held[1]) - float(size)) < 0.56 and held[2] == kind


ON_16 = task("llama3-8b", 16, sequences=64)


@cache
def plans_on_16() -> list[Candidate]:
    return plans(ON_16)[0]


def test_neighbours_decide_one_thing_otherwise():
    """By half and double where these fit; of what was tried, nothing that decides it so is better."""
    best, shown = plans_on_16(), {}
    for name, value, plan in explain.neighbours(best):
        assert value == getattr(plan.layout, name) != getattr(best[0].layout, name)
        same = [each.regret for each in best if getattr(each.layout, name) == value]
        assert round(plan.regret, 2) == round(min(same), 2)
        shown.setdefault(name, []).append(value)
    tried = {plan.layout.tp for plan in best}
    mine = best[0].layout.tp
    assert {mine / 2, 2 * mine} & tried == {*shown["tp"]} & {mine / 2, 2 * mine} and max(map(len, shown.values())) <= 3


def test_what_a_number_of_copies_costs_is_what_its_times_say(capsys):
    """Each printed row of other copies, beside all copies of the first plan's own degrees that fit."""
    best = plans_on_16()
    explain.print_neighbours(best)
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("  zero-replicas")]
    first = best[0].layout
    ours = {each.name: times(LLAMA, first, H100, each).step for each in PROFILES.values()}
    plan_of = {value: plan for name, value, plan in explain.neighbours(best) if name == "zero_replicas"}
    assert len(rows) == len(plan_of) >= 2
    assert first.zero_replicas == 1 or 1 in plan_of, "what it costs to have none"
    for row, (value, plan) in zip(rows, plan_of.items(), strict=True):
        costs = [times(LLAMA, plan.layout, H100, each).step / ours[each.name] - 1 for each in PROFILES.values()]
        words = explain.joined(f"{each + 0.0:+.0%}" for each in (min(costs), max(costs)))
        assert (
            row.split()
            == f"zero-replicas {value} and not {first.zero_replicas} {words}".split()
            + row.split()[-len(f"{sum(plan.held.values()) / 1e9:.0f} {explain.named(plan.layout)}".split()) :]
        )
        own = first._replace(zero_replicas=value)
        if sum(memory(LLAMA, own).values()) <= MOST_FULL * H100.memory and first.zero:
            assert own in {each.layout for each in best}, "a number of copies that nobody tried"


def test_scales_are_not_planned(capsys):
    words = ["plan", "--model", "smollm-1.7b", "--gpus", "2", "--seq-len", "2048", "--tokens-per-batch", "32k"]
    assert main([*words, "--fp8", "tile"]) == 2
    assert "--float8 predicts products of 8-bit numbers" in capsys.readouterr().err
    assert main([*words, "--float8"]) == 0
    assert "add --fp8 tile" in capsys.readouterr().out


def test_regrets_and_ranges(capsys):
    """The first table has the plan of least regret and the fastest of each profile; --profile leaves one."""
    best = plans_on_16()
    explain.print_regrets(ON_16, best, "")
    *rows, fsdp = capsys.readouterr().out.splitlines()[4:9]
    assert rows[0].split()[-1] == rows[0].split()[-1] and explain.named(best[0].layout) in rows[0]
    for row, name in zip(rows[1:], PROFILES, strict=True):
        winner = min(best, key=lambda plan: plan.seconds[name])
        assert f"{winner.regret:+.0%}" in row and explain.named(winner.layout) in row and f"if like {name} " in row
    plain = explain.plain(ON_16, best)
    assert plain.layout._replace(micro_batch=1, micro_batches=1) == Layout(4096, dp=16, zero=3, dtype="bfloat16")
    assert explain.named(plain.layout) in fsdp and f"{plain.regret:+.0%}" in fsdp and "plain FSDP" in fsdp
    explain.print_regrets(ON_16._replace(gpus=24), best, "")
    assert "dp 24, ZeRO-3 does not divide the sequences" in capsys.readouterr().out
    explain.print_regrets(ON_16, [plan for plan in best if plan.layout.zero < 3], "")
    assert "dp 16, ZeRO-3 does not fit" in capsys.readouterr().out
    words = ["plan", "--model", "smollm-1.7b", "--gpus", "2", "--seq-len", "2048", "--tokens-per-batch", "32k"]
    assert main([*words, "--profile", "megatron"]) == 0
    printed = capsys.readouterr().out
    assert "predicted, megatron: smollm-1.7b" in printed and "nanotron" not in printed.split("what would change")[0]
    span = explain.Range.of(LLAMA, best[0].layout, H100, ENDS)
    slow, fast = (times(LLAMA, best[0].layout, H100, each).step for each in (PROFILES["nanotron"], TUNED))
    assert span.seconds == f"{slow:.2f} ... {fast:.2f}" and explain.joined(["a", "a"]) == "a"
    by_all = explain.Range.of(LLAMA, best[0].layout, H100, RANGE)
    assert (by_all.seconds, by_all.mfu) == (span.seconds, span.mfu) and by_all.binds == span.binds
    tokens = 64 * 4096 / 16
    assert span.speed == f"{tokens / slow:,.0f} ... {tokens / fast:,.0f}"


def test_a_range_goes_from_the_slowest_to_the_fastest_profile(capsys):
    """With long sequences fsdp is slower than nanotron, since its attention is; most waits keep their columns."""
    layout = Layout(131072, dp=4, tp=4, cp=4, zero=1, micro_batches=8, dtype="bfloat16")
    steps = {each.name: times(LLAMA, layout, H100, each).step for each in RANGE}
    assert max(steps, key=steps.get) == "fsdp" and min(steps, key=steps.get) == "tuned"
    span = explain.Range.of(LLAMA, layout, H100, RANGE)
    assert span.seconds == f"{steps['fsdp']:.2f} ... {steps['tuned']:.2f}" and list(span.ends) == ["fsdp", "tuned"]
    slow = explain.Range.of(LLAMA, layout, H100._replace(far=1e9), ENDS)  # nanotron's table is better than this
    assert slow.steps == sorted(slow.steps, reverse=True) and list(slow.times) == ["nanotron", "tuned"]
    words = ["compare", "--model", "llama3-8b", "--seq-len", "128k", "--dp 4 --tp 4 --cp 4 --zero 1 --global-batch 32"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"  {span.seconds}  " in printed and re.search("waits: nanotron +tuned", printed)
    assert main([*words, "--profile", "Megatron,fsdp"]) == 0
    printed = capsys.readouterr().out
    assert f"  {steps['fsdp']:.2f} ... {steps['megatron']:.2f}  " in printed and "nanotron" not in printed
    assert "slowest ... fastest of megatron, fsdp" in printed and "waits: megatron" in printed


def test_layouts_side_by_side(capsys):
    """What `plan` says of its first layout, and two others, of which one does not fit."""
    first = plans_on_16()[0]
    main(["compare", "--model", "llama3-8b", " ".join(flags(ON_16, first.layout)), "--dp 2 --pp 2", "--dp 8"])
    ours, pipeline, large = capsys.readouterr().out.splitlines()[5:8]
    span = explain.Range.of(LLAMA, first.layout, H100, ENDS)
    held = f"{sum(first.held.values()) / 1e9:.0f}"
    assert all(each in ours for each in (span.mfu, span.seconds, held)) and " 4 " in pipeline
    assert " * " in large and " * " not in ours and "--global-batch 64" in ours
    main(["compare", "--model", "llama3-8b", "--dp 16 --zero 1", "--between", "25", "--profile", "megatron"])
    slower = H100._replace(far=25e9)
    layout = Layout(4096, dp=16, zero=1, micro_batches=16, dtype="bfloat16")
    step = times(LLAMA, layout, slower, PROFILES["megatron"]).step
    assert f"{step:.2f}" in capsys.readouterr().out
