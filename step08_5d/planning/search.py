"""All layouts of a model on a cluster: which fit, which are fastest, and the command that runs one."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from common.config import spelled
from common.costs.vocabulary import KINDS
from common.errors import UsageError
from common.launching.command_line import parse
from common.model_config import ModelConfig
from step08_5d import config as step08
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.memory.peak import at_least, memory
from step08_5d.planning.time.machines import Machine, nodes_for
from step08_5d.planning.time.profiles import PROFILES, Profile, widest_gradient
from step08_5d.planning.time.speed import AGAIN, cards, spans, times

MOST_FULL = 0.9  # share of a GPU's memory: the rest is for the allocator's gaps, NCCL and CUDA itself
TRIED_UP_TO = 64  # times as many GPUs, or sequences as much shorter, where nothing fits
SHORTEST_PART = 256  # tokens of a cp rank: zigzag halves them, and attention kernels take 128 queries at a time
COPIES_TAKE = 0.25  # share of a GPU's memory
EQUAL = 0.01  # layouts are equally fast if their times differ by less than this (relative)
PROMISING = 40  # so many of the best plans are tried with every number of copies
CHOICES = ("tp", "pp", "stages", "cp", "ep", "zero", "zero_replicas", "micro_batch", "recompute")


class Task(NamedTuple):
    """What is to be trained, and where."""

    name: str  # for --model
    model: ModelConfig
    gpus: int
    seq: int  # tokens of a sequence
    sequences: int  # of a global batch
    machine: Machine
    interleaved: bool = False  # whether pipelines may have several stages on each rank
    profiles: tuple[Profile, ...] = tuple(PROFILES.values())  # whose habits count
    shape: tuple[str, ...] = ()  # flags of step 8 that change the model's shape

    def memory(self, layout: Layout) -> dict[str, float]:
        """Bytes by kind of the fullest rank."""
        return memory(self.model, layout, widest_gradient(self.profiles))


class Candidate(NamedTuple):
    """A layout that fits, with what it costs."""

    layout: Layout
    held: dict[str, float]  # bytes by kind
    seconds: dict[str, float]  # of a step, by each profile of the task
    regrets: dict[str, float]  # by how much it is slower (relative) than the layout that is fastest there

    @property
    def regret(self) -> float:
        """The worst of them."""
        return max(self.regrets.values())

    @property
    def mean(self) -> float:
        return sum(self.regrets.values()) / len(self.regrets)

    def sent(self, task: Task) -> tuple[float, float]:
        """Bytes that a rank sends in a step, in a stage of the mean number of layers; and those that its card sends."""
        whole = far = 0.0
        for each in cost.messages(task.model, self.layout, ends=False, gradient=widest_gradient(task.profiles)):
            whole += each.bytes * each.count
            nodes, together = spans(self.layout, each.group, task.machine)
            far += each.bytes * each.count / cards(each.op, nodes, together) if nodes > 1 else 0.0
        return whole, far

    def equal_ones(self, task: Task) -> tuple[float, ...]:
        """What decides between layouts that are equally fast: the least comes first.

        What hides on paper may not hide in fact, least of all between nodes.
        """
        return self.sent(task)[1], sum(self.held.values()), AGAIN[self.layout.recompute]


def divisors(number: int, most: int | None = None) -> list[int]:
    """All divisors of a number, or those up to `most`, in order."""
    return [each for each in range(1, min(number, most or number) + 1) if number % each == 0]


def layouts(task: Task) -> Iterator[Layout]:
    """All layouts whose degrees divide what they must: tp heads and ffn, cp the sequence, ep experts.

    A pipeline has at most as many stages as layers, which it need not divide.
    """
    model, gpus = task.model, task.gpus
    tps = [each for each in divisors(gpus) if not (model.heads % each or model.ffn % each)]
    tps = [each for each in tps if not (model.kv_heads % each and each % model.kv_heads)]
    for tp, pp in itertools.product(tps, divisors(gpus, model.layers)):
        for cp in divisors(task.seq // 2 or 1) if not gpus % (tp * pp) else ():
            dp = gpus // (tp * pp * cp)
            if dp * tp * pp * cp != gpus or task.seq // cp % tp or task.sequences % dp:
                continue
            if cp > 1 and task.seq // cp < SHORTEST_PART:
                continue
            for ep in [each for each in divisors(model.experts or 1) if not dp * cp * tp % each]:
                shared = {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "ep": ep, "dtype": "bfloat16"}
                yield from _ways(task, Layout(task.seq, **shared))


def _ways(task: Task, layout: Layout) -> Iterator[Layout]:
    """The same degrees with every schedule, ZeRO stage, micro-batch and recomputation that makes a difference."""
    of_rank = task.sequences // layout.dp
    sizes = [each for each in divisors(of_rank, 64) if each & (each - 1) == 0]
    for size, (zero, copies) in itertools.product(sizes, _sharded(task, layout)):
        for recompute in ("none", "selective", "full"):
            same = {"micro_batch": size, "micro_batches": of_rank // size, "recompute": recompute}
            tried = layout._replace(zero=zero, zero_replicas=copies, **same)
            yield from (tried._replace(stages=each) for each in virtual_stages(task, tried))


def _sharded(task: Task, layout: Layout) -> list[tuple[int, int]]:
    """Stages of ZeRO, and over how many copies of the weights each: one, or as many as may pay (`plans` tries more).

    A pipeline does without stage 2, which sums gradients after every micro-batch of every stage.
    """
    if layout.copies == 1:
        return [(0, 1)]
    stages = [zero for zero in (1, 2, 3) if not (layout.pp > 1 and zero == 2)]
    hybrid = [(zero, copies) for zero in stages if (copies := _copies(task, layout._replace(zero=zero))) > 1]
    return [(0, 1), *((zero, 1) for zero in stages), *hybrid]


def _copies(task: Task, layout: Layout) -> int:
    """Of how many copies hybrid sharding may pay: each as large as a node, or twice, four times, ... as large.

    They are as small as takes no more than COPIES_TAKE of the memory more than a single one. Where a node has one rank
    of a copy, they would save no messages between nodes.
    """
    shards = task.machine.for_gpus(task.gpus).gpus // (layout.tp * layout.pp)  # in a node in either order
    if shards < 2 or layout.copies % shards:
        return 1
    whole = sum(at_least(task.model, layout).values())
    while layout.copies % shards == 0 and shards < layout.copies:
        copies = layout.copies // shards
        more = sum(at_least(task.model, layout._replace(zero_replicas=copies)).values()) - whole
        if more <= COPIES_TAKE * task.machine.memory:
            return copies
        shards *= 2
    return 1


def virtual_stages(task: Task, layout: Layout) -> list[int]:
    """How many stages each rank of a pipeline may have: 1, or interleaved also 2, 4, ... as long as each has a layer.

    Interleaved, p micro-batches at a time pass through a stage, so that p has to divide them.
    """
    if not task.interleaved or layout.pp == 1 or layout.micro_batches % layout.pp:
        return [1]
    return [2**power for power in range((task.model.layers // layout.pp).bit_length())]


def plans(task: Task) -> tuple[list[Candidate], Counter]:
    """Return all plans that fit, the one of least regret first, and how many do not, by the kind that is largest.

    With one profile that is the fastest. Of plans as good as the first, at worst and in the mean of the profiles, those
    come first that send less between nodes. The best are also tried with every other number of copies.
    Raises UsageError if none fits: it says what comes nearest.
    """
    found, misfits, tried, room = {}, Counter(), set(), task.machine.memory * MOST_FULL

    def attempt(some: Iterable[Layout]) -> None:
        for layout in some:
            if layout in tried:
                continue
            tried.add(layout)
            held = held_up_to(room, task, layout)
            if sum(held.values()) <= room:
                seconds = {each.name: times(task.model, layout, task.machine, each).step for each in task.profiles}
                found[layout] = held, seconds
            else:
                misfits[max(held, key=held.get)] += 1

    attempt(layouts(task))
    if not found:
        raise UsageError(_why_nothing(task, room))
    attempt(_other_copies(_ordered(task, found)))
    return _ordered(task, found), misfits


def _ordered(task: Task, found: dict[Layout, tuple[dict, dict]]) -> list[Candidate]:
    """Return what fits as candidates in the order of `plans`."""
    least = {each.name: min(seconds[each.name] for _, seconds in found.values()) for each in task.profiles}
    ordered = []
    for layout, (held, seconds) in found.items():
        regrets = {name: each / least[name] - 1 for name, each in seconds.items()}
        ordered.append(Candidate(layout, held, seconds, regrets))
    ordered.sort(key=lambda plan: (float(f"{1 + plan.regret:.4g}"), AGAIN[plan.layout.recompute]))
    equal = sum(1 + plan.regret <= (1 + EQUAL) * (1 + ordered[0].regret) for plan in ordered)
    typical = min(plan.mean for plan in ordered[:equal])
    first = sorted(ordered[:equal], key=lambda plan: (plan.mean > typical + EQUAL, *plan.equal_ones(task)))
    return first + ordered[equal:]


def firsts(best: list[Candidate], choice: str) -> dict[object, Candidate]:
    """Return for each value of a choice the best plan that has it, the best of all first."""
    found = {}
    for plan in best:
        found.setdefault(getattr(plan.layout, choice), plan)
    return found


def _other_copies(best: list[Candidate]) -> Iterator[Layout]:
    """The best plans, those that decide a choice otherwise and the fastest of each profile, with all other copies."""
    some = best[:PROMISING] + [plan for name in CHOICES for plan in firsts(best, name).values()]
    some += [min(best, key=lambda plan: plan.seconds[name]) for name in best[0].seconds]
    for layout in (plan.layout for plan in some if plan.layout.zero):
        yield from (layout._replace(zero_replicas=each) for each in divisors(layout.copies)[:-1])


def held_up_to(room: float, task: Task, layout: Layout) -> dict[str, float]:
    """Return the bytes by kind that a layout holds; or, if they alone are more than `room`, those of its states."""
    states = at_least(task.model, layout, widest_gradient(task.profiles))
    return states if sum(states.values()) > room else task.memory(layout)


def _why_nothing(task: Task, room: float) -> str:
    """Say what comes nearest to `room` bytes, and what would fit."""
    where, nearest = f"{task.name} on {task.gpus} GPUs", None
    for layout in layouts(task):
        least = nearest[0] if nearest else math.inf
        if (needed := sum(held_up_to(least, task, layout).values())) < least:
            nearest = needed, layout
    if nearest is None:
        node = task.machine.gpus if task.gpus > task.machine.gpus else 1
        fewer = range((task.gpus - 1) // node * node, 0, -node)
        other = next((each for each in fewer if next(layouts(task._replace(gpus=each)), None)), 1)
        return (
            f"{where}: no dp, cp, tp and pp have that product and divide {task.sequences} sequences (dp), {task.seq} "
            f"tokens (cp) and {task.model.heads} heads (tp), with up to {task.model.layers} stages; try --gpus {other}"
        )
    needed, layout = nearest
    held = task.memory(layout)
    states, advice = sum(held[kind] for kind in KINDS), [_first_that_fits(task, room, gpus=2)]
    if states < needed / 2:
        advice.append(_first_that_fits(task, room, seq=2))
    fitting = " or ".join(each for each in advice if each) or f"nothing fits on {task.gpus * TRIED_UP_TO} GPUs, either"
    may = f"{room / 1e9:.0f} of {task.machine.memory / 1e9:.0f} may be filled"
    return (
        f"{where} fits in no layout: at least {needed / 1e9:.0f} GB a GPU ({named(layout)}), {states / 1e9:.0f} of "
        f"them weights, gradients and optimizer, and {may}; {fitting}"
    )


def _first_that_fits(task: Task, room: float, gpus: int = 1, seq: int = 1) -> str:
    """Say what fits: 2, 4, ... times as many GPUs (gpus=2), or 1/2, 1/4, ... of the length (seq=2); or nothing."""
    while gpus <= TRIED_UP_TO and seq <= TRIED_UP_TO and task.seq % seq == 0:
        tried = task._replace(gpus=task.gpus * gpus, seq=task.seq // seq, sequences=task.sequences * seq)
        for layout in layouts(tried):
            if sum(held_up_to(room, task, layout).values()) <= room:
                what = f"{tried.gpus} GPUs" if gpus > 1 else f"--seq-len {tried.seq}"
                return f"{what} would do, as {named(layout)}"
        gpus, seq = (2 * each if each > 1 else 1 for each in (gpus, seq))
    return ""


def named(layout: Layout) -> str:
    """The layout in a few words."""
    degrees = [f"{name} {size}" for name in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(layout, name)) > 1]
    degrees += [f"{layout.stages} stages each"] if layout.stages > 1 else []
    degrees += [layout.schedule] if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved") else []
    degrees += [layout.cp_mode] if layout.cp > 1 and layout.cp_mode != "ring" else []
    zero = [f"ZeRO-{layout.zero}"] if layout.zero else []
    zero += [f"{layout.zero_replicas} copies"] if layout.zero_replicas > 1 else []
    again = (
        [{"selective": "selective recompute", "full": "recompute"}[layout.recompute]]
        if layout.recompute != "none"
        else []
    )
    micro_batches = f"{layout.micro_batches} x {layout.micro_batch}"
    return ", ".join([*(degrees or ["one GPU"]), *zero, *again, micro_batches])


def flags(task: Task, layout: Layout) -> list[str]:
    """The flags of step 8 that train this layout. Raises UsageError where step 8 would refuse them."""
    words = ["--model", task.name, *task.shape, "--dtype", layout.dtype, "--seq-len", str(task.seq)]
    words += ["--order", task.machine.order]  # in which its time was predicted; step 8's own has pp before dp
    words += ["--global-batch", str(task.sequences), "--micro-batch", str(layout.micro_batch)]
    for name in ("dp", "tp", "pp", "cp", "ep", "zero", "zero_replicas"):
        if (value := getattr(layout, name)) != (0 if name == "zero" else 1):
            words += [spelled(name), str(value)]
    if layout.stages > 1:
        words += ["--schedule", "interleaved", "--virtual-stages", str(layout.stages)]
    if layout.recompute != "none":
        words += ["--recompute", layout.recompute]
    # Of its many micro-batches step 8 asks only whether a pipeline divides them, and plays them all: a few say the same
    few = min(layout.micro_batches, 2 * layout.pp + layout.micro_batches % layout.pp)
    config = parse(8, [*words, "--global-batch", str(few * layout.micro_batch * layout.dp)])
    config.resolve_and_check(task.gpus)
    step08.check(config)
    return words


def command(task: Task, layout: Layout) -> str:
    """The command that trains this layout, on every node if there are several."""
    nodes = nodes_for(task.gpus, task.machine.gpus)
    of_node = task.gpus // nodes
    launcher = f"torchrun --nproc_per_node {min(task.gpus, task.machine.gpus)}"
    if nodes > 1:
        fewer = "" if of_node == task.machine.gpus else f" --gpus-per-node {of_node}"
        launcher = f"sbatch --nodes {nodes}{fewer} step08_5d/train.slurm"
        return " ".join([launcher, *flags(task, layout)])
    return " ".join([launcher, "step08_5d/train.py", *flags(task, layout)])
