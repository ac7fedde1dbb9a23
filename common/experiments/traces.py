"""Traced runs of several cases on the same local ranks, and what experiments read from their traces."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import collectives
from common.costs.alpha_beta import Player
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import run_jobs
from common.process_groups import Mesh
from common.tracer import StepRow, mean, report
from common.tracing.chrome_trace import Trace, read_trace, time_by_state
from common.tracing.tracer import Tracer


def run_cases(
    train: Callable, ranks: int, cases: dict[str, dict], title: str = "", rounds: int = 1
) -> dict[str, Trace]:
    """Train each case, all steps but the first one traced, with a step's real train(). Returns the traces by name.

    Args:
        train: the function of a step's train.py.
        cases: flags by name, with `steps`, and `link` if one is simulated.
        rounds: so many times all of them; of each case the trace with the quietest step is returned. Whatever else the
            machine does hits some rounds, and no case in all of them.
    """
    jobs = []
    for number in range(rounds):
        for name, flags in cases.items():
            jobs.append((f"{name} {number}", flags | {"trace": f"1:{flags['steps'] - 1}"}))
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(ranks, run_jobs, jobs, folder, train, title=title, jobs=len(jobs))
        traces = {name: [read_trace(Path(folder, f"{name} {number}")) for number in range(rounds)] for name in cases}
    return {name: min(several, key=lambda trace: quietest(trace).step_time_s) for name, several in traces.items()}


class TracedPart(NamedTuple):
    """A part of a step, such as one layer, to be traced on every rank."""

    step: Callable[[Tracer], object]  # does it once, and names its phases: `with tracer.phase("forward"): ...`
    mesh: Mesh  # that of its groups; with a simulated link if it has one


def run_parts(
    ranks: int, part: Callable[..., TracedPart], cases: dict[str, object], steps: int, title: str = ""
) -> dict[str, Trace]:
    """Run a part of a step `steps` times for each case, all but a first time traced. Returns the traces by name.

    Args:
        part: called as `part(mesh, case)` on every rank, for each case; stands at the top level of a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(ranks, _trace_parts, part, list(cases.values()), steps, folder, title=title, jobs=len(cases))
        return {name: read_trace(Path(folder, str(index))) for index, name in enumerate(cases)}


def _trace_parts(mesh: Mesh, done: Callable, part: Callable, cases: list, steps: int, folder: str) -> None:
    """On a rank: each case, into folder/INDEX."""
    for index, case in enumerate(cases):
        each = part(mesh, case)
        tracer = Tracer((0, steps - 1), each.mesh, f"{folder}/{index}")
        for step in range(-1, steps):
            collectives.barrier(mesh.world)
            with tracer.step(step):
                each.step(tracer)
        tracer.close()
        done()


# ---- what a trace says -----------------------------------------------------------------------------------------------


def quietest(trace: Trace) -> StepRow:
    """Return the mean over ranks of the shortest step: other work on the machine can only make a step longer."""
    return min((mean(report(trace, step)) for step in trace.steps), key=lambda row: row.step_time_s)


def computation(trace: Trace, phase: str) -> float:
    """Return the seconds of a phase in the shortest step, without the time it was blocked; the mean over ranks."""
    step, total = quietest(trace).step, 0.0
    for rank in trace.ranks:
        spans = [span for span in trace.spans[rank] if span["name"] == phase and span["args"]["step"] == step]
        phases = [(span["ts"], span["ts"] + span["dur"]) for span in spans]
        total += 1e-6 * time_by_state(phases, trace.intervals(rank, "issue", "wait"))[True, False]
    return total / len(trace.ranks)


def one_rank(trace: Trace, step: int | None = None, rank: int = 0) -> Trace:
    """One rank's step (default: the quietest) alone, for a picture."""
    return Trace({rank: trace.spans[rank]}, [quietest(trace).step if step is None else step], trace.degrees)


def print_hidden(title: str, players: dict[str, Player], traces: dict[str, Trace]) -> None:
    """Print what was played and what was traced: communication, what of it is exposed, the hidden share, the step.

    The predicted step takes the traced one's own computation and the played exposed communication.
    """
    rows = []
    for name, player in players.items():
        row = quietest(traces[name])
        cells = compared(1e3 * player.communication, 1e3 * row.communication_s, ".1f")
        cells += compared(1e3 * player.blocked, 1e3 * row.exposed_s, ".1f")
        share = 1 - player.blocked / player.communication if player.communication else 1.0
        step = row.step_time_s - row.exposed_s + player.blocked
        cells += (f"{share:.0%}", f"{row.overlap_share:.0%}", *compared(1e3 * step, 1e3 * row.step_time_s))
        rows.append((name, *cells))
    three = ("measured", "ratio")
    header = ("", "communication, ms: predicted", *three, "exposed, ms: predicted", *three, "hidden: predicted")
    print_table(title, (*header, "measured", "step, ms: predicted", *three), rows)
