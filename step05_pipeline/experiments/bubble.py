"""Real runs of every schedule, with layers that take as long as one says: what the simulator promised, on a clock."""

import tempfile
from pathlib import Path

from common.config import TrainConfig
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import run_jobs
from common.tracing.chrome_trace import Trace, read_trace
from step05_pipeline.config import schedule_of
from step05_pipeline.cost import efficiency
from step05_pipeline.experiments.tools import ORDER, SHAPE
from step05_pipeline.pipeline import DELAYS
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.further.csv_files import CELL
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.train import train

DELAY = 100  # ms per layer: a forward takes as long in schedules with two stages on a rank, else twice as long


def bubble(quick: bool) -> None:
    """Real runs on 4 ranks, every layer at least 100 ms: executed order, makespan and bubble against the simulation."""
    ranks, micro_batches, delay, steps = (2, 4, 10, 2) if quick else (4, 8, DELAY, 3)
    simulated, measured, order = play(ranks, micro_batches, delay, steps)
    title = f"{ranks} ranks, {micro_batches} micro-batches, {delay} ms a layer: "
    print_comparison(
        f"{title}makespan, ms", "", [(n, simulated[n].makespan, measured[n].makespan) for n in ORDER], ".1f"
    )
    print_comparison("bubble, ms", "", [(n, simulated[n].bubble, measured[n].bubble) for n in ORDER], ".1f")
    rows = []
    for name in ORDER:
        r = simulated[name].bubble_ratio, measured[name].bubble_ratio
        shares = [f"{each:.1%}" for each in (*r, efficiency(r[0]), measured[name].efficiency)]
        rows.append((name, *shares, "yes" if order[name] else "NO"))
    header = ("", "r: simulated", "measured", "1/(1 + r)", "measured", "order as simulated, all ranks and steps")
    print_table("bubble / ideal, and efficiency", header, rows)
    if not all(order.values()):
        raise RuntimeError("a schedule was executed in another order than it says")


def play(
    ranks: int, micro_batches: int, delay: float, steps: int
) -> tuple[dict[str, Timeline], dict[str, Timeline], dict[str, bool]]:
    """Run every schedule with layers that take `delay` ms at least. By schedule: the simulated time line, the measured
    one of the quickest step but the first, and whether each rank did what the schedule says in its order, in all steps.
    """
    flags = SHAPE | {"pp": ranks, "dp": 1, "layers": 2 * ranks, "seq_len": 16, "global_batch": micro_batches}
    flags |= {"layer_delay": delay, "steps": steps, "trace": f"1:{steps - 1}"}
    jobs = [(name, flags | {"schedule": name}) for name in ORDER]
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(ranks, run_jobs, jobs, folder, train, title="bubble", jobs=len(jobs))
        traces = {name: read_trace(Path(folder, name)) for name in ORDER}
    simulated, measured, order = {}, {}, {}
    for name, trace in traces.items():
        schedule = schedule_of(TrainConfig(**flags | {"schedule": name}))
        simulated[name] = simulate(schedule, costs_of(schedule, flags))
        found = [executed(trace, step) for step in trace.steps]
        order[name] = all(same_order(schedule, each) for each in found)
        measured[name] = min(found, key=lambda each: each.makespan)  # other work on the machine only adds
    return simulated, measured, order


def costs_of(schedule: Schedule, flags: dict) -> Costs:
    """In ms, where every stage has as many layers as the others."""
    unit = flags["layers"] / schedule.stages * flags["layer_delay"]
    return Costs(**{kind: unit * DELAYS[kind] for kind in "FIWB"})


def executed(trace: Trace, step: int) -> Timeline:
    """What the ranks did in a step, from the phases in the trace: times in ms."""
    spans = []
    for rank in trace.ranks:
        row = []
        for span in trace.spans[rank]:
            if span["cat"] == "phase" and span["args"]["step"] == step and "action" in span["args"]:
                kind, micro_batch, chunk = CELL.fullmatch(span["args"]["action"]).groups()
                start = span["ts"] / 1e3
                row.append((Action(kind, int(micro_batch), int(chunk or 0)), start, start + span["dur"] / 1e3))
        spans.append(tuple(sorted(row, key=lambda each: each[1])))
    return Timeline(tuple(spans))


def same_order(schedule: Schedule, timeline: Timeline) -> bool:
    """Whether every rank did what the schedule says, in its order."""
    return tuple(tuple(action for action, _, _ in row) for row in timeline.spans) == schedule.actions
