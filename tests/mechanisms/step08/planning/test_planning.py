"""The planner: memory and time by hand, beside published runs, and commands that step 8 accepts."""

import math
import statistics
from functools import partial

import pytest

from common.costs.vocabulary import WIDTHS
from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning import fitting, published
from step08_5d.planning.__main__ import main, tokens
from step08_5d.planning.machines import MACHINES, Habits, Machine
from step08_5d.planning.memory import memory, of_stage, parameters
from step08_5d.planning.search import Task, command, flags, layouts, plans
from step08_5d.planning.speed import mfu, spans, times

LLAMA, MIXTRAL = PRESETS["llama3-8b"], PRESETS["mixtral-8x7b"]
H100 = MACHINES["H100"]
IDEAL = Habits(1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
RUNS = published.read_runs()


# ---- published runs --------------------------------------------------------------------------------------------------


def test_published_mfu_is_that_of_the_published_speed():
    """Within the rounding of the file for nine runs in ten."""
    assert len(RUNS) == 1532 and len({run.pair for run in RUNS}) == 13
    ratios = [published.mfu(run, run.tokens_per_second) / run.mfu for run in RUNS if run.mfu]
    assert abs(statistics.median(ratios) - 1) < 0.001
    assert sum(abs(ratio - 1) < 0.06 for ratio in ratios) > 0.89 * len(ratios)


@pytest.mark.parametrize("half", [0, 1])
def test_runs_that_the_fit_has_not_seen_are_ranked(half):
    seen, others = published.halves(RUNS)[half]
    assert not {run.pair for run in seen} & {run.pair for run in others}
    found = published.judge(others, partial(published.predicted, habits=published.fitted(seen)))
    assert found.spearman > 0.8
    assert statistics.median(found.within.values()) > 0.7
    assert statistics.median(found.chosen.values()) > 0.85


def test_the_default_habits_are_those_of_all_runs():
    fitted = published.fitted(RUNS)
    for name in published.WITHOUT_PIPELINES + published.OF_PIPELINES:
        assert getattr(Habits(), name) == float(f"{getattr(fitted, name):.2g}"), name


def test_memory_ranks_published_runs():
    found = published.judge(RUNS, lambda run: sum(memory(run.model, run.layout).values()), lambda run: run.memory)
    assert found.spearman > 0.97


def test_ranks():
    assert fitting.ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    assert published.spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama3-8b", "smollm-1.7b", "mixtral-8x7b"])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 4}, {"tp": 4, "pp": 2, "dp": 2}, {"dp": 4, "ep": 4}])
def test_stages_have_all_parameters(model, degrees):
    """Added up over stages; tensor ranks have norms and routers more than once, a tied matrix has two holders."""
    shape, layout = PRESETS[model], Layout(2048, **degrees)
    if not shape.experts:
        layout = layout._replace(ep=1)
    rest, of_experts = (sum(each) for each in zip(*(parameters(shape, layout, s) for s in range(layout.pp))))
    count = count_parameters(shape)
    whole = count.norms + (shape.layers * shape.hidden * shape.experts)
    twice = count.embedding if shape.tie_embeddings and layout.pp > 1 else 0
    assert layout.tp * rest + layout.ep * of_experts == count.total + twice + (layout.tp - 1) * whole


def test_zero_divides_by_hand():
    """8,030,261,248 parameters on 8 ranks: all of 2 + 4 + 12 bytes divided by 8, or only the last two kinds, or one."""
    total = count_parameters(LLAMA).total
    for zero, divided in ((3, (8, 8, 8)), (2, (1, 8, 8)), (1, (1, 1, 8)), (0, (1, 1, 1))):
        held = memory(LLAMA, Layout(4096, dp=8, zero=zero, dtype="bfloat16"))
        expected = [width * total / by for width, by in zip(WIDTHS["bfloat16"], divided)]
        assert [held[kind] for kind in ("parameters", "gradients", "optimizer state")] == expected


def test_activations_in_flight():
    """The first of 4 stages keeps 4 micro-batches of 8 layers, the last stage one; with 2 micro-batches the first 2."""
    layout = Layout(4096, pp=4, micro_batches=8, dtype="bfloat16")
    one = of_stage(LLAMA, layout, 3)["activations"]
    assert of_stage(LLAMA, layout, 0)["activations"] == 4 * one
    assert of_stage(LLAMA, layout._replace(micro_batches=2), 0)["activations"] == 2 * one
    inputs = of_stage(LLAMA, layout._replace(recompute="full"), 3)["activations"]
    assert inputs == 8 * 4096 * 4096 * 2, "a layer keeps its input"


# ---- time ------------------------------------------------------------------------------------------------------------


def test_an_ideal_machine_computes_and_nothing_else():
    """Three forwards; the attention core 3.5 times, but only the half of it that the mask leaves."""
    machine = Machine("H100", 80e9, math.inf, near=math.inf, far=math.inf)
    flops = count_flops(LLAMA, 4096)
    found = times(LLAMA, Layout(4096, dp=4, zero=1, micro_batches=2, dtype="bfloat16"), machine, IDEAL)
    assert (
        found.step
        == found.compute
        == pytest.approx(2 * (3 * flops.linear + 3 * flops.head + 1.75 * flops.attention_core) / machine.peak)
    )
    assert mfu(LLAMA, Layout(4096, micro_batches=2), 2 * flops.model / machine.peak, machine) == pytest.approx(1)


def test_what_binds():
    def binds(**changes):
        habits = changes.pop("habits", IDEAL)
        return times(LLAMA, Layout(4096, dtype="bfloat16", **changes), H100, habits).binds

    assert binds(pp=4, micro_batches=4) == "bubble"
    assert binds(tp=8) == "tp" and binds(cp=8, micro_batches=64) == "cp"
    assert binds(dp=64, habits=IDEAL._replace(hides=0.0)) == "dp"
    assert binds(habits=IDEAL._replace(launch=1.0)) == "launch"
    layout = Layout(4096, pp=4, micro_batches=12, dtype="bfloat16")
    found = times(LLAMA, layout, H100, IDEAL)
    assert found.bubble == pytest.approx((found.compute + found.pp) * 3 / 12)


@pytest.mark.parametrize(
    "order, expected",
    [
        ("tp,cp,pp,dp", {"tp": (1, 4), "cp": (1, 2), "pp": (2, 1), "dp": (4, 2)}),
        ("tp,cp,dp,pp", {"tp": (1, 4), "cp": (1, 2), "pp": (2, 1), "dp": (4, 2)}),
    ],
)
def test_groups_span_nodes(order, expected):
    """64 ranks, 8 to a node: tp 4 x cp 2 fill one. The groups of copies are dp x cp ranks, of which a node has cp."""
    layout = Layout(4096, dp=4, pp=2, cp=2, tp=4)
    assert {name: spans(layout, name, H100, order) for name in expected} == expected


# ---- search ----------------------------------------------------------------------------------------------------------


def task(name: str, gpus: int, seq: int = 4096, sequences: int = 256) -> Task:
    return Task(name, PRESETS[name], gpus, seq, sequences, H100)


@pytest.mark.parametrize(
    "case", [("llama3-8b", 64), ("mixtral-8x7b", 64), ("smollm-1.7b", 8, 2048), ("llama3-8b", 6, 8192, 96)]
)
def test_every_layout_is_accepted_by_step_8(case):
    """Not only the one that is printed."""
    mine = task(*case)
    every = list(layouts(mine))
    assert every and {each.dp * each.tp * each.pp * each.cp for each in every} == {mine.gpus}
    for layout in every[:: max(1, len(every) // 60)]:
        flags(mine, layout)


def test_plans_are_sorted_and_fit():
    found, misfits = plans(task("llama3-8b", 16))
    assert [plan.times.step for plan in found] == sorted(plan.times.step for plan in found)
    assert all(sum(plan.held.values()) <= 0.9 * H100.memory for plan in found) and misfits["activations"]
    assert len(found) + sum(misfits.values()) == len(list(layouts(task("llama3-8b", 16))))
    best = found[0]
    assert best.mfu == mfu(LLAMA, best.layout, best.times.step, H100)
    assert best.tokens_per_second * 16 * best.times.step == pytest.approx(256 * 4096)
    assert command(task("llama3-8b", 16), best.layout).startswith("sbatch --nodes 2 step08_5d/train.slurm --model")
    assert command(task("llama3-8b", 8), Layout(4096, dp=8)).startswith(
        "torchrun --nproc_per_node 8 step08_5d/train.py"
    )


def test_what_fits_nowhere_is_one_line(capsys):
    with pytest.raises(UsageError, match="llama3-405b on 16 GPUs fits in no layout: at least .* GB a GPU"):
        plans(task("llama3-405b", 16))
    for words, line in (
        ("plan --model llama3-405b --gpus 16", "error: llama3-405b on 16 GPUs fits in no layout"),
        (
            "plan --model llama3-8b --gpus 7 --tokens-per-batch 8k",
            "error: llama3-8b on 7 GPUs: no degrees divide 2 sequences",
        ),
        ("plan --model llama9 --gpus 8", "error: --model llama9 is no preset"),
        ("plan --model llama3-8b --gpus 8 --gpu H9000", "error: argument --gpu: invalid choice"),
    ):
        assert main(words.split()) == 2
        found = capsys.readouterr()
        assert found.err.startswith(line) and found.err.count("\n") == 1, found.err


def test_numbers_of_tokens():
    assert [tokens(text) for text in ("4096", "8k", "1M", "1.5m")] == [4096, 8192, 2**20, 3 * 2**19]
