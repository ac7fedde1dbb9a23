"""Why a layout won: the playbook's three steps (fit, batch, throughput), and what the next-best choices cost."""

import math
from collections import Counter
from itertools import groupby
from typing import NamedTuple

from common.drawing.tables import print_table
from step08_5d.cost import Layout
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.published.runs import PAUSE
from step08_5d.planning.search import EQUAL, MOST_FULL, Candidate, Task, command, named
from step08_5d.planning.stages import layers_of_ranks
from step08_5d.planning.time.machines import OURS, Habits
from step08_5d.planning.time.speed import Times
from step08_5d.planning.time.speed import times as times_of

NAMES = {"tp": "tensor parallelism", "pp": "handing on between stages", "dp": "summing gradients, gathering weights"}
NAMES |= {"cp": "keys and values of other ranks", "ep": "tokens to their experts", "bubble": "the pipeline's bubble"}
NAMES |= {"launch": "launching small kernels", "update": "the update", "compute": "computing"}
CHOICES = ("tp", "pp", "stages", "cp", "ep", "zero", "micro_batch", "recompute")
WORKING = ": what a layer at work and the loss need for a moment"
MFU = "MFU: as in PaLM, attention counts with its full square, also the half that is masked"
LABELS = {"stages": "virtual-stages", "micro_batch": "micro-batch"}


def print_plans(task: Task, best: list[Candidate], misfits: Counter, shown: int) -> None:
    """The fastest layouts, why the first of them won, and the command that runs it."""
    rows = []
    for plan in different(best)[:shown]:
        times, held = plan.times, sum(plan.held.values())
        cells = (f"{plan.mfu:.1%}", f"{plan.tokens_per_second:,.0f}", f"{times.step:.2f}", f"{held / 1e9:.0f}")
        rows.append((named(plan.layout), *cells, most_of_the_rest(times)))
    title = f"predicted: {task.name}, {task.gpus} {task.machine.name}, {task.sequences} x {task.seq:,} tokens a step"
    print_table(title, ("layout", "MFU", "tokens/s/GPU", "s", "GB", "most of the rest of the step"), rows)
    print(f"  {MFU}")
    print_steps(task, best, misfits)
    print_neighbours(best)
    print_changes(task, best)
    print(f"\n{command(task, best[0].layout)}")


def most_of_the_rest(times: Times) -> str:
    """What a step needs most besides the computation, and its share of the step."""
    share = getattr(times, times.binds) / times.step
    return f"{NAMES[times.binds]} ({share:.0%})" if share >= 0.005 else "nothing: all messages hide"


def different(best: list[Candidate]) -> list[Candidate]:
    """The fastest plan of each set of degrees, whatever its schedule, ZeRO, micro-batches and recomputation."""
    found = {}
    for plan in best:
        degrees = plan.layout._replace(stages=1, zero=0, micro_batch=1, micro_batches=1, recompute="none")
        found.setdefault(degrees, plan)
    return list(found.values())


def print_steps(task: Task, best: list[Candidate], misfits: Counter) -> None:
    """Fit, batch and throughput of the first plan."""
    plan, layout = best[0], best[0].layout
    alone = layout._replace(dp=1, tp=1, pp=1, cp=1, ep=1, zero=0, micro_batch=1, micro_batches=1)
    held, most = sum(plan.held.values()), max(plan.held, key=plan.held.get)
    left_out = ", ".join(f"{number:,} for {kind}" for kind, number in misfits.most_common())
    print(
        f"\n  1. fit: one GPU would need {sum(memory(task.model, alone).values()) / 1e9:,.0f} GB and may fill "
        f"{MOST_FULL * task.machine.memory / 1e9:.0f}. {len(best):,} layouts fit, {sum(misfits.values()):,} do not "
        f"({left_out or 'none'}).\n     The first fills {held / 1e9:.0f} GB, most of it {most}"
        f" ({plan.held[most] / 1e9:.0f} GB{WORKING if most == 'working' else ''})"
    )
    if layout.pp > 1:
        print(f"     Pipeline: {divided(task, layout)}")
    print(
        f"  2. batch: {task.sequences} sequences = dp {layout.dp} x {layout.micro_batches} micro-batches x "
        f"{layout.micro_batch}"
    )
    times = plan.times
    parts = sorted(
        (name for name in times._fields if getattr(times, name) > 0.005 * times.step), key=times._fields.index
    )
    shares = ", ".join(f"{NAMES[name]} {getattr(times, name) / times.step:.0%}" for name in parts)
    print(f"  3. throughput: {times.step:.2f} s a step: {shares}")
    hidden = times_of(task.model, layout, task.machine, OURS._replace(hides=0.0, prefetch=0.0)).dp - times.dp
    fastest = min(each.times.step for each in best)
    equal = sum(each.times.step <= (1 + EQUAL) * fastest for each in best)
    print(
        f"     Each rank sends {plan.sent(task.model) / 1e9:.0f} GB"
        + f", the least of {equal} layouts that are equally fast (within {EQUAL:.0%})" * (equal > 1)
        + f". {hidden:.2f} s of messages hide behind computing" * (hidden > 0.005 * times.step)
    )
    if layout.stages > 1:
        others = [each.times.step for each in best if each.layout.stages == 1]
        gain = f"without it the best takes {min(others):.2f} s" if others else "without it nothing fits"
        print(f"     No published run is interleaved, so that its gain is untested; {gain}")


def divided(task: Task, layout: Layout) -> str:
    """The layers of the ranks of a pipeline: `7 + 14 x 8 + 7 = 126 layers`."""
    runs = [(layers, len(list(same))) for layers, same in groupby(layers_of_ranks(task.model, layout))]
    words = " + ".join(f"{number} x {layers}" if number > 1 else f"{layers}" for layers, number in runs)
    stages = f" in {layout.stages} stages each, interleaved" if layout.stages > 1 else ", under 1F1B"
    return f"ranks with {words} = {task.model.layers} layers{stages}; the last one also has the head"


def neighbours(best: list[Candidate]) -> list[tuple[str, object, Candidate]]:
    """For each choice, the fastest plans that decide it otherwise than the first, one for each other value."""
    result = []
    for name in CHOICES if best[0].layout.pp > 1 else [each for each in CHOICES if each != "stages"]:
        found = {}
        for plan in best:
            found.setdefault(getattr(plan.layout, name), plan)
        found.pop(getattr(best[0].layout, name))
        result += [(name, value, plan) for value, plan in found.items()]
    return result


def print_neighbours(best: list[Candidate], most: int = 2) -> None:
    """What it costs to decide one thing otherwise, with everything else as good as it can then be.

    Args:
        most: rows for each of the choices.
    """
    rows, shown = [], Counter()
    for name, value, plan in neighbours(best):
        shown[name] += 1
        if shown[name] <= most:
            cost = plan.times.step / best[0].times.step - 1
            words = f"{LABELS.get(name, name)} {value} and not {getattr(best[0].layout, name)}"
            rows.append(
                (words, f"{round(cost, 3) + 0.0:+.1%}", f"{sum(plan.held.values()) / 1e9:.0f}", named(plan.layout))
            )
    print_table("what other choices cost", ("", "time", "GB", "the fastest such layout"), rows)


class Condition(NamedTuple):
    """What could be otherwise; nothing of it makes a plan faster."""

    words: str
    far: float = 1.0  # times the bandwidth between nodes
    habits: Habits = OURS
    batch: int = 1  # times the micro-batches
    room: float = 1.0  # times the memory

    def seconds(self, task: Task, plan: Candidate) -> float:
        """Of a step of this plan; infinite if it does not fit."""
        layout = plan.layout._replace(micro_batches=self.batch * plan.layout.micro_batches)
        held = memory(task.model, layout) if self.batch > 1 else plan.held
        if sum(held.values()) > self.room * MOST_FULL * task.machine.memory:
            return math.inf
        machine = task.machine._replace(far=self.far * task.machine.far)
        return times_of(task.model, layout, machine, self.habits).step


CONDITIONS = (
    Condition("half the bandwidth between nodes", far=0.5),
    Condition("gathers of weights that do not hide", habits=OURS._replace(prefetch=0.0)),
    Condition(f"pipelines whose messages are {PAUSE} s late", habits=OURS._replace(pause=PAUSE)),
    Condition("a batch twice as large", batch=2),
    Condition("two thirds of the memory", room=2 / 3),
)


def changes(task: Task, best: list[Candidate]) -> list[tuple[str, float, Candidate, float]]:
    """For each condition: its words, the seconds of the first plan, and the plan that then wins with its seconds."""
    result = []
    for condition in CONDITIONS:
        first = least = condition.seconds(task, best[0])
        winner = best[0]
        for plan in best[1:]:
            if plan.times.step < least and (found := condition.seconds(task, plan)) < least:
                winner, least = plan, found
        if first <= (1 + EQUAL) * least:
            winner, least = best[0], first
        result.append((condition.words, first, winner, least))
    return result


def print_changes(task: Task, best: list[Candidate]) -> None:
    """Under which other conditions another plan would win."""
    rows = []
    for words, first, winner, least in changes(task, best):
        seconds = "does not fit" if first == math.inf else f"{first:.2f}"
        other = ("the same", "") if winner is best[0] else (named(winner.layout), f"{least:.2f}")
        rows.append((words, seconds, *(other if least < math.inf else ("none fits", ""))))
    print_table("what would change it", ("with", "s of the first", "the fastest then", "s"), rows)
