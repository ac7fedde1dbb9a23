"""How the planner's seconds of a step come about, in lines that one can calculate again by hand."""

from common.counts import count_flops
from step08_5d.cost import Layout, parameters
from step08_5d.planning.search import Task
from step08_5d.planning.time.profiles import Profile
from step08_5d.planning.time.speed import AGAIN, UPDATE_BYTES, Times, mean_rank, pace, shared, times

LEAST = 0.005  # seconds: what takes less is not accounted for


def accounts(task: Task, layout: Layout, profile: Profile) -> list[str]:
    """Return a line for each part of a step: where its seconds come from, of the rank for which all others wait.

    Of a dense model, with 1F1B and a profile without terms of its own.
    """
    model, machine, m = task.model, task.machine, layout.micro_batches
    sums = shared(model, layout, machine, profile)
    layer, weights, head, _, exposed = mean_rank(model, layout, machine, profile, sums.within)
    mean, found = model.blocks / layout.pp, times(model, layout, machine, profile)
    slowest = pace(model, layout, layer + sum(exposed.values()) / (m * mean), head)
    lines = [_products(task, layout, profile, weights, layer)]
    both = f"{slowest.layers:g} layers x {1e3 * layer:.5f} ms"
    both += f" + head and loss {1e3 * head:.5f} ms" if slowest.head else ""
    lines.append(f"compute: {m} micro-batches x ({both}) = {found.compute:.2f} s")
    moved = dict.fromkeys(("tp", "cp"), 0.0)
    for name, seconds in sums.within:
        moved[name] = moved.get(name, 0.0) + seconds
    moved |= {"pp": sums.handing_on, "dp": sum(seconds for _, seconds in sums.dp)}
    lines += [_messages(name, moved[name], found, slowest.layers / mean) for name in moved]
    if found.bubble > LEAST:
        terms = {name: getattr(found, name) for name in ("compute", "tp", "cp", "pp")}
        busy = " + ".join(f"{name} {seconds:.3f}" for name, seconds in terms.items() if seconds > LEAST / 10)
        why = (
            f"while one of its {m} micro-batches is with the other {layout.pp - 1} ranks, the slowest one waits for as "
        )
        why += f"long as {slowest.waits:.4f} of its own take"
        lines.append(f"bubble: ({busy}) x {slowest.waits:.4f} / {m} = {found.bubble:.2f} s: {why}")
    held = sum(parameters(model, layout)) / layout.sharing()[0]
    rate = machine.memory_bandwidth / 1e9
    lines.append(f"update: {held:,.0f} parameters x {UPDATE_BYTES} bytes / {rate:,.0f} GB/s = {found.update:.3f} s")
    return [line for line in lines if line]


def _products(task: Task, layout: Layout, profile: Profile, weights: float, layer: float) -> str:
    """What a layer takes, forward and backward, of one micro-batch."""
    again = AGAIN[layout.recompute]
    flops = count_flops(task.model, layout.seq).linear / task.model.blocks * layout.micro_batch
    flops /= layout.cp * layout.tp
    rate = f"{profile.products:g} x {task.machine.products / 1e12:.6g} TFLOP/s"
    rest = layer - again * weights
    return (
        f"a layer, of a micro-batch: {again} x {flops / 1e12:.6f} TFLOP / ({rate}) + {1e3 * rest:.5f} ms for attention "
        f"and small operations = {1e3 * layer:.5f} ms"
    )


def _messages(name: str, moved: float, found: Times, more: float) -> str:
    """What a dimension's messages take, and how much of that hides; "" if there is next to nothing."""
    left = getattr(found, name)
    if left <= LEAST:
        return ""
    more = 1.0 if name == "pp" else more  # times what a rank with the mean number of layers sends
    moved *= more
    hidden = round(moved, 3) - round(left, 3)
    return f"{name}: messages of {moved:.3f} s - {max(0.0, hidden):.3f} s that hide = {left:.3f} s"
