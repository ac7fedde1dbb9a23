"""Pictures of the playbook's runs for the page: a table of dots for each model and number of nodes."""

import math
from itertools import groupby

from step08_5d.planning.published.runs import Fit, PublishedRun, predicted, read_runs


def tables(runs: list[PublishedRun] | None = None) -> str:
    """Return HTML of the tables of these runs (default: all of the playbook's), each to be unfolded."""
    runs = sorted(read_runs() if runs is None else runs, key=lambda run: (run.model.hidden, run.nodes))
    return "\n".join(_table(list(some)) for _, some in groupby(runs, key=lambda run: run.pair))


def _table(runs: list[PublishedRun]) -> str:
    ended, (name, nodes) = [run for run in runs if run.mfu], runs[0].pair
    best = max(ended, key=lambda run: run.mfu, default=None)
    fastest = max((run.tokens_per_second for run in ended), default=0.0)
    cells = {(_row(run), _column(run)): run for run in runs}
    rows, columns = (sorted({place[side] for place in cells}) for side in (0, 1))
    summary = f"the playbook's {name} on {nodes} node{'s' * (nodes > 1)}: {len(ended)} of {len(runs)} runs ended"
    lines = [f"<details><summary>{summary}</summary>"]
    lines += [f"<p>The best: {words(best)}</p>"] if best else []
    head = "".join(f"<th>ZeRO-{zero}, micro-batch {size}</th>" for zero, size in columns)
    lines += [f'<table class="dots"><tr><th></th>{head}</tr>']
    for row in rows:
        drawn = (cells.get((row, column)) for column in columns)
        inside = "".join(f"<td>{_dot(run, fastest, best) if run else ''}</td>" for run in drawn)
        lines.append(f"<tr><th>{_degrees(*row)}</th>{inside}</tr>")
    return "\n".join([*lines, "</table></details>"])


def _row(run: PublishedRun) -> tuple[int, ...]:
    return run.layout.dp, run.layout.tp, run.layout.pp


def _column(run: PublishedRun) -> tuple[int, ...]:
    return run.layout.zero, run.layout.micro_batch


def _degrees(dp: int, tp: int, pp: int) -> str:
    return f"dp {dp}, tp {tp}, pp {pp}"


def words(run: PublishedRun) -> str:
    """What became of a run, in a line."""
    where = f"{_degrees(*_row(run))}, ZeRO-{run.layout.zero}, micro-batch {run.layout.micro_batch}"
    if not run.mfu:
        return f"{where}: published without numbers"
    speed, memory = f"{run.tokens_per_second:,.0f} tokens/s per GPU", f"{run.memory / 1e9:.1f} GB"
    return f"{where} · MFU {run.mfu:.1%} (predicted {predicted(run, Fit()):.1%}) · {speed} · {memory}"


def _dot(run: PublishedRun, fastest: float, best: PublishedRun | None) -> str:
    """A dot: its diameter is the root of its speed, so that its area is as large as that. Its colour is its MFU."""
    what = f"<span>{words(run)}</span></button>"
    if not run.mfu:
        return f'<button class="dot cross">×{what}'
    size, heat = math.sqrt(run.tokens_per_second / fastest), run.mfu / best.mfu
    return f'<button class="dot" style="--size:{size:.2f};--heat:{heat:.2f}">{what}'
