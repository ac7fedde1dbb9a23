"""Pictures of measured runs for the page: a table of dots for the playbook's and for those of a sweep."""

import html
import math
import re
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from step08_5d.planning.published.runs import Fit, predicted, read_runs
from step08_5d.planning.sweeps import sweep
from step08_5d.planning.sweeps.pictures import words


class Dot(NamedTuple):
    """A run, in a cell of a table."""

    table: str
    row: str
    column: str
    failed: str = ""  # what became of it, if it did not end
    speed: float = 0.0  # tokens per second of a rank
    mfu: float | None = None
    predicted: float | None = None  # MFU
    memory: float | None = None  # bytes

    @property
    def words(self) -> str:
        if self.failed:
            return f"{self.row}, {self.column}: {self.failed}"
        guess = f" (predicted {self.predicted:.1%})" if self.predicted else ""
        some = [f"MFU {self.mfu:.1%}{guess}"] if self.mfu else []
        some += [f"{self.speed:,.0f} tokens/s per rank"] + ([f"{self.memory / 1e9:.1f} GB"] if self.memory else [])
        return " · ".join([f"{self.row}, {self.column}", *some])


def published_dots() -> list[Dot]:
    """The playbook's runs, in a table for each model and number of nodes."""
    result = []
    for run in sorted(read_runs(), key=lambda run: (run.model.hidden, run.nodes)):
        layout = run.layout
        table = f"the playbook's {run.name} on {run.nodes} node{'s' * (run.nodes > 1)}"
        row = f"dp {layout.dp}, tp {layout.tp}, pp {layout.pp}"
        where = table, row, f"ZeRO-{layout.zero}, micro-batch {layout.micro_batch}"
        if run.mfu is None:
            result.append(Dot(*where, failed="published without numbers"))
        else:
            result.append(Dot(*where, "", run.tokens_per_second, run.mfu, predicted(run, Fit()), run.memory))
    return result


def sweep_dots(file: str) -> list[Dot]:
    """The runs of a sweep, from its runs.jsonl. Raises UsageError if there are none."""
    folder = Path(file) if Path(file).is_dir() else Path(file).parent
    found, result = sweep.records(folder), []
    if not found:
        raise UsageError(f"--sweep {file}: no runs.jsonl with runs")
    for each in found:
        where = f"your sweep {folder.resolve().name}", words(each, False), words(each, True)
        if each["status"] == "ok":
            speed = each["tokens_per_s"] / each["world"]
            result.append(Dot(*where, "", speed, each.get("mfu"), memory=each.get("peak_memory_bytes")))
        else:
            result.append(Dot(*where, failed=f"{each['status']} ({each.get('line', '')})"))
    return result


def tables(dots: list[Dot]) -> str:
    """HTML of all tables, each to be unfolded."""
    return "\n".join(
        _table(name, [dot for dot in dots if dot.table == name]) for name in dict.fromkeys(dot.table for dot in dots)
    )


def _table(name: str, dots: list[Dot]) -> str:
    ended = [dot for dot in dots if not dot.failed]
    rows, columns = (sorted({dot[side] for dot in dots}, key=_numbers) for side in (1, 2))
    cells = {(dot.row, dot.column): dot for dot in dots}
    best = max(ended, key=_value, default=None)
    fastest = max((dot.speed for dot in ended), default=0.0)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = [f"<details><summary>{html.escape(name)}: {len(ended)} of {len(dots)} runs ended</summary>"]
    lines += [f"<p>The best: {html.escape(best.words)}</p>"] if best else []
    lines += [f'<table class="dots"><tr><th></th>{head}</tr>']
    for row in rows:
        drawn = (cells.get((row, column)) for column in columns)
        inside = "".join(f"<td>{_drawn(dot, fastest, best) if dot else ''}</td>" for dot in drawn)
        lines.append(f"<tr><th>{html.escape(row)}</th>{inside}</tr>")
    return "\n".join([*lines, "</table></details>"])


def _drawn(dot: Dot, fastest: float, best: Dot | None) -> str:
    """A dot: its diameter is the root of its speed, so that its area is as large as that."""
    what = f"<span>{html.escape(dot.words)}</span></button>"
    if dot.failed:
        return f'<button class="dot cross">×{what}'
    size, heat = math.sqrt(dot.speed / fastest), _value(dot) / _value(best)
    return f'<button class="dot" style="--size:{size:.2f};--heat:{heat:.2f}">{what}'


def _value(dot: Dot) -> float:
    return dot.mfu or dot.speed  # what a CPU reaches has no MFU


def _numbers(name: str) -> list:
    """A key that sorts `dp 2` before `dp 16`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
