"""Compare runs: `python -m common.compare RUN... [--tolerance 1e-5] [--out FILE.png]`.

The first run is the reference. Draws the curves on top of each other, prints a table of the largest relative
differences, and exits with status 0, with 1 where a difference exceeds the tolerance, or with 2 and one line
where runs cannot be compared.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from common.command_line import OneLineParser
from common.errors import UsageError
from common.record.metrics import read_metrics

KEYS = ("loss", "grad_norm")
TINY = sys.float_info.min  # a reference of 0 divides nothing by 0
HUGE = 1e6  # what differs by more, or by infinity, is drawn on the upper edge of the picture
# What tells runs of one training apart, and stands in labels: degrees above 1, and how they are carried out.
DEGREES = ("dp", "zero", "tp", "pp", "cp", "ep")
MODES = {"dp": ("dp_mode",), "pp": ("schedule",), "cp": ("cp_mode",)}
# What says where and how a run was recorded. Anything else in config.json that differs is worth a note.
BOOKKEEPING = {
    *("run_dir", "save_every", "keep", "async_save", "resume", "trace", "profile", "memory_snapshot", "measure_memory"),
    *("device", "timeout", "peak_tflops", "link", "layer_delay", "peak_flops", "peak_source", "step_name"),
    *("model_flops_per_step", "hardware_flops_per_step", "world_size", "degrees"),
    *("torch_version", "python_version"),
}


@dataclass(frozen=True)
class Run:
    """One run record: `config` is its config.json ({} if there is none), `records` its metrics by step."""

    path: Path
    config: dict
    records: dict[int, dict]
    cut_off: bool  # the last line is half written

    @property
    def label(self) -> str:
        """Step name and degrees, such as `step02_data_parallel dp 2 bucket`, or the folder's name."""
        if not self.config.get("step_name"):
            return self.path.name
        parts = [self.config["step_name"]]
        for key in DEGREES:
            if (self.config.get(key) or 0) > (key != "zero"):  # a degree of 1 is none, a stage of 1 is one
                parts.append(f"{key} {self.config[key]}")
                modes = () if key == "dp" and self.config.get("zero") else MODES.get(key, ())
                parts += [self.config[mode] for mode in modes if self.config.get(mode)]
        return " ".join(parts)


@dataclass(frozen=True)
class Row:
    """A run against the reference; both dictionaries by key of the record, over the common steps."""

    run: Run
    steps: list[int]  # compared
    differences: dict[str, list[float]]  # relative, a value a step
    worst: dict[str, tuple[float, int]]  # the largest of them and the first step where it occurs


def read_run(path: Path | str) -> Run:
    """Read a run directory (or its metrics.jsonl). Raises UsageError where there is nothing to compare."""
    path = Path(path)
    path = path.parent if path.name == "metrics.jsonl" else path
    try:
        records, cut_off = read_metrics(path / "metrics.jsonl")
        config_path = path / "config.json"
        text = config_path.read_text(encoding="utf-8", errors="replace") if config_path.exists() else "{}"
        config = json.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot read {error.filename}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}/config.json, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{path}/metrics.jsonl, {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}/config.json does not hold an object")
    if not records:
        raise UsageError(f"{path}/metrics.jsonl holds no step")
    return Run(path, config, {record["step"]: record for record in records}, cut_off)


def relative_difference(reference: float | None, value: float | None) -> float:
    """|a - b| / max(|a|, tiny); 0 if both are NaN (or infinity, or None), infinite if one of them is."""
    if reference == value:
        return 0.0
    if reference is None or value is None:
        return math.inf
    if math.isnan(reference) and math.isnan(value):
        return 0.0
    difference = abs(reference - value) / max(abs(reference), TINY)
    return difference if math.isfinite(difference) else math.inf


def compare(runs: list[Run], keys: tuple[str, ...] = KEYS, steps: int | None = None) -> list[Row]:
    """A row for every run, the reference `runs[0]` included, over the steps (below `steps`) that both have.

    Raises UsageError where two runs read different corpora, have no step in common, or lack a key.
    """
    reference, rows = runs[0], []
    for run in runs:
        corpora = [item.config.get("corpus_sha256") for item in (reference, run)]
        if None not in corpora and corpora[0] != corpora[1]:
            short = " and ".join(str(sha)[:12] for sha in corpora)
            raise UsageError(f"{reference.path} and {run.path} read different corpora (sha256 {short})")
        common = sorted(run.records.keys() & reference.records.keys())
        common = [step for step in common if steps is None or step < steps]
        if not common:
            limit = "" if steps is None else f" below --steps {steps}"
            raise UsageError(f"{reference.path} and {run.path} have no step in common{limit}")
        differences = {}
        for key in keys:
            pairs = [(_value(reference, step, key), _value(run, step, key)) for step in common]
            differences[key] = [relative_difference(*pair) for pair in pairs]
        worst = {}
        for key, values in differences.items():
            index = values.index(max(values))
            worst[key] = values[index], common[index]
        rows.append(Row(run, common, differences, worst))
    return rows


def _value(run: Run, step: int, key: str) -> float | None:
    record = run.records[step]
    if key not in record:
        raise UsageError(f"{run.path}/metrics.jsonl has no {key!r} at step {step}")
    if not isinstance(record[key], int | float | None):
        raise UsageError(f"{run.path}/metrics.jsonl: {key!r} at step {step} is not a number")
    return record[key]


def labels(runs: list[Run]) -> list[str]:
    """A name for every run; where two would be the same, followed by the folder's name, then by its path."""
    names = [run.label for run in runs]
    for more in ("{0.path.name}", "{0.path}"):
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{run.label} ({more.format(run)})" if name in twice else name for name, run in zip(names, runs)]
    return names


def notes(rows: list[Row]) -> list[str]:
    """What a reader should know beside the table: other settings, other lengths, what was not checked."""
    reference, result = rows[0].run, []
    shown = BOOKKEEPING.union(DEGREES, *MODES.values())  # or not worth showing
    for name, row in zip(labels([row.run for row in rows]), rows):
        run = row.run
        if "corpus_sha256" not in run.config:
            result.append(f"{name}: no corpus_sha256 in config.json, the corpus was not checked")
        if run.cut_off:
            result.append(f"{name}: left out the last line of metrics.jsonl, which is half written")
        if run.records.keys() != reference.records.keys():
            counts = f"{len(run.records)} steps, {len(reference.records)} in the reference"
            result.append(f"{name}: has {counts}; compared the {len(row.steps)} that both have")
        changed = [
            f"{key} {run.config[key]} instead of {reference.config[key]}"
            for key in sorted((run.config.keys() & reference.config.keys()) - shown)
            if run.config[key] != reference.config[key]
        ]
        if changed:
            result.append(f"{name}: has {', '.join(changed)}")
    return result


def table(rows: list[Row]) -> str:
    """The rows as aligned text: steps, final value, median tokens/s of the whole run; then differences."""
    keys = list(rows[0].differences)
    lines = [["run", "steps", f"final {keys[0]}", "tokens/s"]]
    for key in keys:
        lines[0] += [f"max rel diff {key}", "at step"]
    for name, row in zip(labels([row.run for row in rows]), rows):
        final = _value(row.run, max(row.run.records), keys[0])
        speeds = [_value(row.run, step, "tokens_per_s") or 0.0 for step in row.run.records]
        line = [name, str(len(row.run.records)), "-" if final is None else f"{final:.6f}"]
        line.append(f"{statistics.median(speeds):,.0f}")
        for value, step in row.worst.values():
            line += ["reference", ""] if row is rows[0] else [f"{value:.2e}", str(step)]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def plot(rows: list[Row], path: Path | str, tolerance: float | None = None) -> None:
    """Draw a panel for each compared key with all runs, and below it one with the relative differences.

    Later curves are thinner and have shorter dashes, so that all are visible where they coincide.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = list(rows[0].differences)
    figure = Figure(figsize=(10, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(keys), height_ratios=(3, 2))
    names = labels([row.run for row in rows])
    styles = [{"color": "0.8", "linewidth": 8, "linestyle": "-"}]  # the reference: a wide grey band
    others = len(rows) - 1
    for index in range(others):  # a curve covers a shorter part of each 30 points than those below it
        width, covered = 4 - 2.5 * index / max(1, others - 1), 30 * (others - index) / others
        dash = (0, (covered / width, (30 - covered) / width)) if index else "-"  # in units of the width
        styles.append({"color": f"C{index}", "linewidth": width, "linestyle": dash})
    for column, key in enumerate(keys):
        axes = figure.add_subplot(grid[0, column])
        for name, row, style in zip(names, rows, styles):
            values = [_value(row.run, step, key) for step in row.steps]
            axes.plot(row.steps, [math.nan if v is None else v for v in values], label=name, **style)
        axes.set(xlabel="step", ylabel=key.replace("_", " "))
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
        _plot_differences(figure.add_subplot(grid[1, column], sharex=axes), rows, key, tolerance)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, handlelength=4, frameon=False, fontsize="small")
    figure.axes[1].set_title(f"difference from {names[0]}, colours as above", loc="left", fontsize="medium")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _plot_differences(axes, rows: list[Row], key: str, tolerance: float | None) -> None:
    """Markers on a logarithmic scale, nested where runs coincide; zeros in a band below it, a line for each run.

    Infinity has no place on the scale either: crosses on the upper edge.
    """
    drawn = [v for row in rows[1:] for v in row.differences[key] if 0 < v < HUGE]
    tolerance = tolerance if tolerance and tolerance < HUGE else None
    drawn += [tolerance] if tolerance else []
    low = math.floor(math.log10(min(drawn, default=1e-16)))  # decades
    high = math.ceil(math.log10(max(drawn, default=1e-15)) + 0.3)
    band = 0.25 * (high - low)
    axes.axhspan(10 ** (low - band), 10**low, color="0.93", zorder=0)
    axes.text(-0.015, 10 ** (low - band / 2), "0", transform=axes.get_yaxis_transform(), ha="right", va="center")
    for index, row in enumerate(rows[1:]):
        place, size = (index + 0.5) / (len(rows) - 1), 8 - 5 * index / max(1, len(rows) - 2)
        zero = 10 ** (low - band * place)
        style = {"color": f"C{index}", "marker": "osD^vph*"[index % 8], "linestyle": "none"}
        style |= {"markerfacecolor": "none", "markersize": size, "markeredgewidth": 1}
        values = [(v or zero) if v < HUGE else math.nan for v in row.differences[key]]
        axes.plot(row.steps, values, **style)
        if apart := [step for step, v in zip(row.steps, row.differences[key]) if not v < HUGE]:
            edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "marker": "x"}
            axes.plot(apart, [1.0] * len(apart), **style | edge)
    if tolerance:
        axes.axhline(tolerance, color="black", linestyle=(0, (6, 3)), linewidth=1)
        axes.text(0.99, tolerance, "tolerance", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set(xlabel="step", ylabel=f"rel. difference, {key.replace('_', ' ')}", yscale="log")
    axes.set_ylim(10 ** (low - band), 10**high)
    axes.set_yticks([10.0**decade for decade in range(low, high + 1, math.ceil((high - low) / 6))])
    axes.minorticks_off()
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:  # a NaN would let everything pass
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 0, 1 (above the tolerance) or 2 (cannot be compared)."""
    parser = OneLineParser(prog="python -m common.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that a run wrote (--run-dir)")
    parser.add_argument("--tolerance", type=_tolerance, help="exit with 1 if a relative difference exceeds it")
    parser.add_argument("--out", default="compare.png", help="the picture (default: %(default)s)")
    parser.add_argument("--key", default=",".join(KEYS), help="what to compare (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="compare only the steps below this")
    arguments = parser.parse_or_exit(argv)
    keys = tuple(key.strip() for key in arguments.key.split(",") if key.strip())
    try:
        if not keys:
            raise UsageError("--key names nothing to compare")
        rows = compare([read_run(path) for path in arguments.runs], keys, arguments.steps)
        print(table(rows))
        for note in notes(rows):
            print(f"note: {note}")
    except UsageError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    try:
        plot(rows, arguments.out, arguments.tolerance)
    except (OSError, ValueError) as error:  # no such folder, or a format that matplotlib does not know
        print(f"compare: --out {arguments.out}: {error}", file=sys.stderr)
        return 2
    print(f"picture: {arguments.out}")
    if arguments.tolerance is None:
        return 0
    failed = [
        (name, key, value, step)
        for name, row in zip(labels([row.run for row in rows]), rows)
        for key, (value, step) in row.worst.items()
        if value > arguments.tolerance
    ]
    for name, key, value, step in failed:
        print(f"FAIL {name}: {key} differs by {value:.2e} at step {step}, more than {arguments.tolerance:g}")
    if not failed:
        print(f"OK: no difference exceeds {arguments.tolerance:g}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
