"""The planner: memory by hand, and layouts that step 8 accepts."""

import contextlib
import itertools

import pytest

from common.config import TrainConfig
from common.costs.vocabulary import WIDTHS
from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.launching.command_line import parse
from common.presets import PRESETS
from step05_pipeline.cost import peak_kept
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate
from step08_5d.cost import Layout
from step08_5d.planning.__main__ import main
from step08_5d.planning.memory.backwards import in_flight
from step08_5d.planning.memory.kept import kept
from step08_5d.planning.memory.peak import at_least, memory, peak, states
from step08_5d.planning.memory.rank_parameters import parameters_of_rank
from step08_5d.planning.search import Task, _ordered, _other_copies, command, flags, layouts, plans
from step08_5d.planning.stages import layers_of_ranks, ranges_of_rank, stage_sizes
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import PROFILES, TUNED
from step08_5d.planning.time.speed import pace, spans, times

LLAMA, H100 = PRESETS["llama3-8b"], MACHINES["H100"]


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 4}, {"tp": 4, "pp": 2, "dp": 2}, {"dp": 4, "ep": 4}])
def test_stages_have_all_parameters(degrees):
    """Added up over stages; tensor ranks have norms and routers more than once, a tied matrix has two holders."""
    for shape in (LLAMA, PRESETS["smollm-1.7b"], PRESETS["mixtral-8x7b"]):
        layout = Layout(2048, **(degrees if shape.experts else degrees | {"ep": 1}))
        shards = (parameters_of_rank(shape, layout, stage).shards for stage in range(layout.pp))
        rest, of_experts = (sum(each) for each in zip(*shards))
        count = count_parameters(shape)
        whole = count.norms + (shape.layers * shape.hidden * shape.experts)
        twice = count.embedding if shape.tie_embeddings and layout.pp > 1 else 0
        assert layout.tp * rest + layout.ep * of_experts == count.total + twice + (layout.tp - 1) * whole


def test_memory_by_hand():
    """8,030,261,248 parameters on 8 ranks: all of 2 + 4 + 12 bytes divided by 8, or only the last two kinds, or one.

    The first of 4 stages keeps 4 micro-batches, with 2 of them 2, the last stage one. On one rank the loss is the
    fullest moment: the gradient of the head's matrix (4 bytes), logits of h/2 tokens (2) and two copies of them (4);
    the hidden states' gradient, the last norm's input, what it has normalized, and its output.
    """
    total = count_parameters(LLAMA).total
    for zero, divided in ((3, (8, 8, 8)), (2, (1, 8, 8)), (1, (1, 1, 8)), (0, (1, 1, 1))):
        held = states(LLAMA, Layout(4096, dp=8, zero=zero, dtype="bfloat16"), 0)
        assert list(held.values()) == [width * total / by for width, by in zip(WIDTHS["bfloat16"], divided)]
    layout = Layout(4096, pp=4, micro_batches=8, dtype="bfloat16")
    assert [in_flight(LLAMA, layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(LLAMA, layout._replace(micro_batches=2), 0) == 2
    ((first, last),) = ranges_of_rank(LLAMA, layout, 3)
    inputs, tables = (last - first) * 4096 * 4096 * 2, 2 * 4096 * 128 * 4 + 8 * 4096
    assert kept(LLAMA, layout._replace(recompute="full"), 3) == inputs + tables, "layers keep inputs, the loss targets"
    moment, held = peak(LLAMA, Layout(4096, dtype="bfloat16", micro_batches=2), 0)
    assert moment == "later backward, loss" and held["gradients"] == 4 * total
    matrix, stream = LLAMA.vocab * 4096, 4096 * 4096
    assert held["working"] == (4 + 1 + 2 * 2) * matrix + (2 + 4 + 2 + 2) * stream + 4 * 4096


@pytest.mark.parametrize("name, p, v", [("llama3-405b", 16, 1), ("llama3-405b", 8, 2), ("llama3-70b", 4, 4)])
def test_uneven_stages_as_the_schedule_has_them(name, p, v):
    """What a rank keeps is what step 5's actions keep; how long a step takes is near what its simulator says."""
    model, m = PRESETS[name], 2 * p
    layout, flops = Layout(8192, pp=p, stages=v, micro_batches=m), count_flops(model, 8192)
    sizes, head = stage_sizes(model, p * v, 8192), model.layers * flops.head / (flops.linear + flops.attention_core)
    schedule = build_schedule("interleaved" if v > 1 else "1f1b", p, m, v)
    for rank, layers in enumerate(layers_of_ranks(model, layout)):
        kept = peak_kept(schedule, rank, list(sizes), [0] * len(sizes))
        assert in_flight(model, layout, rank) * layers == pytest.approx(kept)
    slowest = pace(model, layout, 1.0, head)
    seconds = (slowest.layers + head * slowest.head) * (m + slowest.waits / v)
    played = simulate(schedule, Costs(F=1 / 3, I=1 / 3, W=1 / 3, stages=(*sizes[:-1], sizes[-1] + head))).makespan
    assert seconds == pytest.approx(played, rel=0.06) and min(sizes) < max(sizes)


def test_126_layers_on_16_ranks():
    """The head is as much as a layer: 14 ranks have 8 layers. The first of them keeps most, and not the first stage."""
    layout = Layout(8192, dp=4, tp=8, pp=16, zero=1, micro_batches=32, dtype="bfloat16", recompute="full")
    model = PRESETS["llama3-405b"]
    assert layers_of_ranks(model, layout) == (7, *[8] * 14, 7)
    held = [sum(peak(model, layout, stage).held.values()) for stage in range(16)]
    assert sum(memory(model, layout).values()) == max(held) and held.index(max(held)) in (0, 1, 15)
    one, two = (times(model, layout._replace(stages=stages), H100, PROFILES["nanotron"]) for stages in (1, 2))
    assert one.bubble > 1.8 * two.bubble and one.compute == two.compute and one.pp < two.pp


def task(name: str, gpus: int, seq: int = 4096, sequences: int = 256, interleaved: bool = False) -> Task:
    return Task(name, PRESETS[name], gpus, seq, sequences, H100, interleaved)


@pytest.mark.parametrize(
    "case",
    [
        ("llama3-8b", 64),
        ("mixtral-8x7b", 64),
        ("smollm-1.7b", 8, 2048),
        ("llama3-8b", 6, 8192, 96),
        ("smollm-135m", 16, 2048, 32),
        ("llama3-405b", 256, 4096, 64),
    ],
)
def test_every_layout_is_accepted_by_step_8(case):
    """Not only the one that is printed. Interleaved stages are added on request, and change none of the others."""
    mine = task(*case, interleaved=True)
    every = list(layouts(mine))
    assert [each for each in every if each.stages == 1] == list(layouts(task(*case)))
    assert every and {each.dp * each.tp * each.pp * each.cp for each in every} == {mine.gpus}
    for layout in every[:: max(1, len(every) // 40)]:
        flags(mine, layout)
    interleaved = [each for each in every if each.stages > 1]
    flags(mine, max(interleaved, key=lambda each: each.pp * each.stages))
    assert case[0] not in ("smollm-135m", "llama3-405b") or any(mine.model.layers % each.pp for each in interleaved)


def accepted(mine: Task) -> set[Layout]:
    """All layouts without recomputation that step 8 itself accepts for a task."""
    model, degree, found = mine.model, range(1, mine.gpus + 1), set()
    for tp, pp, cp, ep in itertools.product(degree, degree, degree, range(1, (model.experts or 1) + 1)):
        dp, rest = divmod(mine.gpus, tp * pp * cp)
        sizes = [] if rest or mine.sequences % dp else range(1, mine.sequences // dp + 1)
        of_rank = range(1, model.layers + 1) if mine.interleaved and pp > 1 else [1]
        for size, zero, stages, copies in itertools.product(sizes, range(4), of_rank, (1, 2, 4, 8)):
            ways = {"zero": zero, "stages": stages, "micro_batch": size, "micro_batches": len(sizes) // size}
            ways["zero_replicas"] = copies
            layout = Layout(mine.seq, dp, tp=tp, pp=pp, cp=cp, ep=ep, dtype="bfloat16", **ways)
            with contextlib.suppress(UsageError):
                if len(sizes) % size == 0 and flags(mine, layout):
                    found.add(layout)
    return found


def is_tried(layout: Layout) -> bool:
    """Whether the search, as it says, tries a layout that step 8 accepts."""
    powers = all(size.bit_count() == 1 for size in (layout.micro_batch, layout.stages))
    fine = layout.cp > 1 and layout.seq // layout.cp < 256  # parts of a sequence too short for the kernels
    pointless = layout.zero > 0 and layout.dp * layout.cp == 1 or layout.zero == 2 and layout.pp > 1
    of_node = min(8, layout.dp * layout.cp * layout.tp * layout.pp) // (layout.tp * layout.pp)  # of a rank's copies
    within = layout.zero_replicas == 1 or layout.zero_replicas * of_node == layout.copies and of_node > 1
    alone = layout.zero_replicas == layout.copies > 1  # nothing would be sharded
    return powers and layout.micro_batch <= 64 and within and not (fine or pointless or alone)


@pytest.mark.parametrize(
    "case",
    [
        ("smollm-135m", 6, 768, 12),  # 9 heads of queries, 3 of keys
        ("llama3-1b", 16, 2048, 4),  # 8 heads of keys
        ("mixtral-8x7b", 4, 1024, 8),
        ("smollm-135m", 4, 512, 4, True),  # interleaved
        ("smollm-135m", 1, 256, 128),
    ],
)
def test_the_search_tries_every_layout_that_step_8_accepts(case):
    """But for those that it says it leaves out. Each of them once, with each kind of recomputation."""
    mine = task(*case)
    found = list(layouts(mine))
    expected = {each for each in accepted(mine) if is_tried(each)}
    for recompute in ("none", "selective", "full"):
        ours = [each._replace(recompute="none") for each in found if each.recompute == recompute]
        assert len(set(ours)) == len(ours) == len(found) / 3
        assert set(ours) == expected, sorted(set(ours) ^ expected)[:5]


@pytest.mark.parametrize(
    "case", [("llama3-8b", 16, 2048, 64), ("mixtral-8x7b", 32, 2048, 32), ("llama3-1b", 8, 8192, 32, True)]
)
def test_nothing_that_fits_is_left_out(case):
    """The search drops layouts whose states alone do not fit, without their activations: it finds what all would.

    What it finds beyond that differs from these only in the number of copies.
    """
    mine = task(*case)._replace(machine=H100._replace(memory=40e9), profiles=(TUNED,))
    found, misfits = plans(mine)
    fits, steps = {}, {}

    def attempt(layout) -> None:
        if sum((held := memory(mine.model, layout)).values()) <= 0.9 * 40e9:
            fits[layout], steps[layout] = held, times(mine.model, layout, mine.machine, TUNED).step

    every = {each: memory(mine.model, each) for each in layouts(mine)}
    for each in every:
        attempt(each)
    first = _ordered(mine, {each: (held, {"tuned": steps[each]}) for each, held in fits.items()})
    more = {each for each in _other_copies(first) if each not in every}
    for each in more:
        attempt(each)
    assert all(each.zero and each._replace(zero_replicas=1) in every for each in more)
    assert {plan.layout: plan.held for plan in found} == fits
    assert sum(misfits.values()) == len(every) + len(more) - len(fits)
    assert [plan.seconds["tuned"] for plan in found] == [steps[plan.layout] for plan in found]
    assert found[0].seconds["tuned"] <= 1.01 * min(steps.values())
    for layout, held in every.items():
        least = at_least(mine.model, layout)
        assert sum(least.values()) <= (1 + 1e-12) * sum(held.values()), layout


def test_gradients_of_two_bytes():
    """Others' habit: NeMo's 70B on 64 GPUs would be dropped with our sums of four bytes, and fits with those."""
    model, layout = PRESETS["llama3-70b"], Layout(8192, dp=2, tp=4, pp=4, cp=2, zero=1, dtype="bfloat16")
    layout = layout._replace(micro_batches=64, stages=5)
    ours, theirs = memory(model, layout), memory(model, layout, gradient=2)
    assert sum(theirs.values()) < 0.9 * H100.memory < sum(ours.values())
    assert theirs["gradients"] == ours["gradients"] / 2 and theirs["parameters"] == ours["parameters"]
    least = at_least(model, layout, gradient=2)
    assert least["gradients"] == pytest.approx(theirs["gradients"]) and sum(least.values()) < sum(theirs.values())


def test_hybrid_sharding_has_small_copies():
    """As small as a node, or as memory allows: 18 bytes of 70.6e9 parameters on 8 ranks, or 32, are too many."""
    large = [each for each in layouts(task("llama3-70b", 512, sequences=512)) if each.pp * each.tp * each.cp == 1]
    assert {each.zero_replicas for each in large if each.zero == 3} == {1, 8}
    mine = task("llama3-8b", 64)
    hybrid = [each for each in layouts(mine) if each.zero_replicas > 1]
    assert hybrid and all(each.sharing()[0] * each.tp * each.pp == 8 for each in hybrid)
    words = flags(mine, next(each for each in hybrid if each.pp == 1 and each.zero == 3))
    assert words[words.index("--zero-replicas") + 1] == "8" or "--tp" in words
    few, whole = (Layout(4096, dp=64, zero=3, dtype="bfloat16", zero_replicas=copies) for copies in (8, 1))
    assert spans(few, "shard", H100._replace(order="tp,cp,pp,dp")) == (1, 8) and spans(
        few, "replica", H100._replace(order="tp,cp,pp,dp")
    ) == (8, 1)
    assert spans(whole, "shard", H100._replace(order="tp,cp,pp,dp")) == (8, 8)
    slow = H100._replace(far=1e9)
    assert times(mine.model, few, slow, TUNED).dp < times(mine.model, whole, slow, TUNED).dp


def test_the_command_has_the_order_that_was_predicted():
    """Megatron's, in which the copies of a stage are nearer to each other than its neighbors; step 8's is another."""
    mine = task("llama3-8b", 64)
    layout = Layout(mine.seq, dp=8, pp=8, micro_batches=mine.sequences // 8, dtype="bfloat16")
    config = parse(8, flags(mine, layout))
    assert config.order == "tp,cp,dp,pp" != TrainConfig().order


def test_machines_of_72():
    """512 GPUs are 64 of each of eight domains; H800 has less NVLink, and is else an H100."""
    assert MACHINES["GB200"].for_gpus(512).gpus == 64 and MACHINES["GB200"].for_gpus(72).gpus == 72
    assert MACHINES["GB200"].for_gpus(2048).gpus == 64 and H100.for_gpus(12).gpus == 6
    layout = Layout(4096, dp=8, tp=64, dtype="bfloat16")
    assert spans(layout, "tp", MACHINES["GB200"]._replace(order="tp,cp,pp,dp")) == (1, 64)
    assert spans(layout, "replica", MACHINES["GB200"]._replace(order="tp,cp,pp,dp")) == (8, 1)
    assert MACHINES["H800"]._replace(name="H100", near=H100.near) == H100 and MACHINES["H800"].near == 200e9


def test_plans_are_sorted_and_fit(capsys):
    mine = task("llama3-8b", 16, sequences=64)
    found, misfits = plans(mine)
    for name in PROFILES:
        seconds = [plan.seconds[name] for plan in found]
        regrets = [plan.regrets[name] for plan in found]
        assert regrets == [each / min(seconds) - 1 for each in seconds] and min(regrets) == 0
    worst = [1 + plan.regret for plan in found]
    assert worst[5] == 1 + max(found[5].regrets.values())
    assert all(each <= 1.0101 * later for each, later in zip(worst, worst[1:]))
    equal = [plan for plan, each in zip(found, worst) if each <= 1.01 * min(worst)]
    least = min(sum(plan.regrets.values()) / 3 for plan in equal)
    equal = [sum(plan.regrets.values()) / 3 <= least + 0.01 for plan in equal], [plan.sent(mine)[1] for plan in equal]
    assert equal[0] == sorted(equal[0], reverse=True), "first those that are good in the mean, too"
    assert equal[1][: sum(equal[0])] == sorted(equal[1][: sum(equal[0])]), (
        "of equally good ones, first what sends least to other nodes"
    )
    (only,) = {plans(mine._replace(profiles=(each,)))[0][0].regret < 0.01 for each in PROFILES.values()}
    assert only, "for one profile that is the fastest"
    assert all(sum(plan.held.values()) <= 0.9 * H100.memory for plan in found) and misfits["activations"]
    assert len(found) + sum(misfits.values()) >= len(list(layouts(mine)))
    assert command(mine, found[0].layout).startswith("sbatch --nodes 2 step08_5d/train.slurm --model")
    assert command(task("llama3-8b", 8), Layout(4096, dp=8)).startswith("torchrun --nproc_per_node 8 step08_5d/train.")
    unequal = command(task("llama3-8b", 12, sequences=12), Layout(4096, dp=12))
    assert unequal.startswith("sbatch --nodes 2 --gpus-per-node 6 step08_5d/")
    wrong = {"llama3-405b --gpus 16": "457 of them weights, gradients and optimizer, and 72 of 80 may be filled; 128 G"}
    with pytest.raises(UsageError, match="or --seq-len 262144 would do, as tp 4, recompute"):
        plans(task("llama3-8b", 4, 2**20, 1))
    wrong |= {"llama3-8b --gpus 4 --seq-len 1M": "--seq-len 1048576 exceeds the 131072 positions of llama3-8b"}
    wrong |= {"llama3-8b --gpus 37": "as many on every node of 8", "llama3-8b --gpus 0": "must be at least 1"}
    wrong |= {"llama9 --gpus 8": "llama9 is no preset", "llama3-8b --gpus 64 --between nan": "nan is no number"}
    wrong |= {"llama3-8b --gpus 8 --tokens-per-batch 4194304000000000": "4194304000000000 must be at most 1073741824"}
    wrong |= {"llama3-8b --gpus 99999999": "must be at most 1048576", "llama3-8b --gpus 8 --seq-len 9e15": "at most"}
    wrong |= {"llama3-8b --gpus 8 --seq-len 512 --tokens-per-batch 1024M": "are more than 1048576 sequences"}
    wrong |= {"llama3-8b --gpus 296 --tokens-per-batch 8k": "divide 2 sequences (dp), 4096 tokens (cp) and 32 heads"}
    wrong |= {"llama3-8b --gpus 296 --tokens-per-batch 4k": "with up to 32 stages; try --gpus 288"}
    for words, told in wrong.items():
        assert main(["plan", "--model", *words.split()]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and told in line and line.count("\n") == 1, line
