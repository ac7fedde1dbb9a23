"""Why a layout won: the playbook's three steps (fit, batch, throughput), and what the next-best choices cost."""

from collections import Counter

from common.drawing.tables import print_table
from step08_5d.planning.machines import OURS
from step08_5d.planning.memory import memory
from step08_5d.planning.search import EQUAL, MOST_FULL, Plan, Task, command, named
from step08_5d.planning.speed import times as times_of

NAMES = {"tp": "tensor parallelism", "pp": "handing on between stages", "dp": "summing gradients, gathering weights"}
NAMES |= {"cp": "keys and values of other ranks", "ep": "tokens to their experts", "bubble": "the pipeline's bubble"}
NAMES |= {"launch": "launching small kernels", "update": "the update", "compute": "computing"}
CHOICES = ("tp", "pp", "cp", "ep", "zero", "micro_batch", "recompute")


def print_plans(task: Task, best: list[Plan], misfits: Counter, shown: int) -> None:
    """The fastest layouts, why the first of them won, and the command that runs it."""
    rows = []
    for plan in different(best)[:shown]:
        times, held = plan.times, sum(plan.held.values())
        cells = (f"{plan.mfu:.1%}", f"{plan.tokens_per_second:,.0f}", f"{times.step:.2f}", f"{held / 1e9:.0f}")
        share = getattr(times, times.binds) / times.step
        rows.append((named(plan.layout), *cells, f"{NAMES[times.binds]} ({share:.0%})"))
    title = f"predicted: {task.name}, {task.gpus} {task.machine.name}, {task.sequences} x {task.seq:,} tokens a step"
    print_table(title, ("layout", "MFU", "tokens/s/GPU", "s", "GB", "most of the rest of the step"), rows)
    print_steps(task, best, misfits)
    print_neighbours(best)
    print(f"\n{command(task, best[0].layout)}")


def different(best: list[Plan]) -> list[Plan]:
    """The fastest plan of each set of degrees."""
    found = {}
    for plan in best:
        degrees = plan.layout._replace(zero=0, micro_batch=1, micro_batches=1, recompute="none")
        found.setdefault(degrees, plan)
    return list(found.values())


def print_steps(task: Task, best: list[Plan], misfits: Counter) -> None:
    """Fit, batch and throughput of the first plan."""
    plan, layout = best[0], best[0].layout
    alone = layout._replace(dp=1, tp=1, pp=1, cp=1, ep=1, zero=0, micro_batch=1, micro_batches=1)
    held, most = sum(plan.held.values()), max(plan.held, key=plan.held.get)
    left_out = ", ".join(f"{number:,} for {kind}" for kind, number in misfits.most_common())
    print(
        f"\n  1. fit: one GPU would need {sum(memory(task.model, alone).values()) / 1e9:,.0f} GB and may fill "
        f"{MOST_FULL * task.machine.memory / 1e9:.0f}. {len(best):,} layouts fit, {sum(misfits.values()):,} do not "
        f"({left_out or 'none'}).\n     The first fills {held / 1e9:.0f} GB, most of it {most}"
    )
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


def neighbours(best: list[Plan]) -> list[tuple[str, object, Plan]]:
    """For each choice, the fastest plans that decide it otherwise than the first, one for each other value."""
    result = []
    for name in CHOICES:
        found = {}
        for plan in best:
            found.setdefault(getattr(plan.layout, name), plan)
        found.pop(getattr(best[0].layout, name))
        result += [(name, value, plan) for value, plan in found.items()]
    return result


def print_neighbours(best: list[Plan], each: int = 2) -> None:
    """What it costs to decide one thing otherwise, with everything else as good as it can then be."""
    rows, shown = [], Counter()
    for name, value, plan in neighbours(best):
        shown[name] += 1
        if shown[name] <= each:
            cost = plan.times.step / best[0].times.step - 1
            words = f"{name.replace('_', '-')} {value} and not {getattr(best[0].layout, name)}"
            rows.append(
                (words, f"{round(cost, 3) + 0.0:+.1%}", f"{sum(plan.held.values()) / 1e9:.0f}", named(plan.layout))
            )
    print_table("what other choices cost", ("", "time", "GB", "the fastest such layout"), rows)
