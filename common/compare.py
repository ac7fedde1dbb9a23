"""`python -m common.compare RUN RUN...`: draw the curves of runs, and print how far each is from the first.

The exit status is 1 if a difference exceeds the tolerance, and 2, after one line, if the runs cannot be compared.
With --explain, two runs of any program are compared: is what differs rounding, or a bug?
"""

import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from common.config import TrainConfig, flag_names, spelled
from common.drawing.curves import plot
from common.drawing.tables import aligned
from common.errors import UsageError
from common.explaining.command import add_flags, explain_files
from common.explaining.written import changed_settings
from common.launching.command_line import OneLineParser, one_line_errors
from common.metrics import read_metrics

KEYS = ("loss", "grad_norm")
TINY = sys.float_info.min  # so that a reference of 0 does not divide by 0


@dataclass(frozen=True)
class Record:
    """One run record: `config` is its config.json ({} if there is none), `records` its metrics by step."""

    path: Path
    config: dict
    records: dict[int, dict]

    @property
    def label(self) -> str:
        """The step and every layout flag that is not at its default, as `step02 dp 2 dp-mode naive`, or the folder."""
        if not self.config.get("step_name"):
            return readable(self.path.name)
        parts = [self.config["step_name"].partition("_")[0]]
        for name in flag_names("layout"):
            value, default = self.config.get(name), 1 if name == "dp" else getattr(TrainConfig, name)
            if value not in (None, default):
                no = "no-" if value is False else ""
                parts.append(spelled(no + name)[2:] + ("" if type(value) is bool else f" {value}".removesuffix(".0")))
        return " ".join(parts)

    def value(self, step: int, key: str) -> float:
        """A number from the record of one step. Raises UsageError if there is none."""
        value = self.records[step].get(key)
        if not isinstance(value, int | float):
            raise UsageError(f"{self.path}/metrics.jsonl: {key!r} at step {step} is {value!r}, not a number")
        return value


@dataclass(frozen=True)
class Comparison:
    """A run against the reference."""

    run: Record
    name: str  # its label, made unique
    steps: list[int]  # those that both have
    worst: dict[str, tuple[float, int]]  # by key: the largest relative difference and the first step where it occurs


def read_run(path: Path | str) -> Record:
    """Read a run directory (or its metrics.jsonl). Raises UsageError if there is nothing to compare."""
    path = Path(path)
    path = path.parent if path.name == "metrics.jsonl" else path
    if path.is_file():
        raise UsageError(f"{path} is a file: --explain reads those of any program, and this needs the folder of a run")
    try:
        records = read_metrics(path / "metrics.jsonl")
        file = path / "config.json"
        config = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not records:
        raise UsageError(f"{path}/metrics.jsonl holds no step")
    return Record(path, config, {record["step"]: record for record in records})


def relative_difference(reference: float, value: float) -> float:
    """|a - b| / max(|a|, tiny); 0 if both are NaN or the same infinity, infinite if only one of them is."""
    if reference == value or math.isnan(reference) and math.isnan(value):
        return 0.0
    difference = abs(reference - value) / max(abs(reference), TINY)
    return difference if math.isfinite(difference) else math.inf


def compare(runs: list[Record], keys: tuple[str, ...] = KEYS, steps: int | None = None) -> list[Comparison]:
    """A row for every run, the reference `runs[0]` included, over the steps (below `steps`) that both have.

    Raises UsageError if two runs read different corpora, have no step in common, or lack a key.
    """
    reference, rows = runs[0], []
    for run, name in zip(runs, labels(runs)):
        corpora = [item.config.get("corpus_sha256") for item in (reference, run)]
        if None not in corpora and corpora[0] != corpora[1]:
            names = " and ".join(str(item.config.get("corpus")) for item in (reference, run))
            raise UsageError(f"{reference.path} and {run.path} read different corpora: --data {names} (corpus_sha256)")
        both = [step for step in sorted(run.records.keys() & reference.records.keys()) if steps is None or step < steps]
        if not both:
            raise UsageError(f"{reference.path} and {run.path} have no step to compare in common")
        worst = {}
        for key in keys:
            found = {step: relative_difference(reference.value(step, key), run.value(step, key)) for step in both}
            worst[key] = max(found.values()), max(found, key=found.get)
        rows.append(Comparison(run, name, both, worst))
    return rows


def labels(runs: list[Record]) -> list[str]:
    """A name for every run: its label, and the folder where that alone is not unique."""
    names = [run.label for run in runs]
    folders = [readable(run.path.name) for run in runs]
    if len(set(folders)) < len(folders):
        folders = [readable(run.path) for run in runs]
    return [f"{name} ({folder})" if names.count(name) > 1 else name for name, folder in zip(names, folders)]


def readable(path: Path | str) -> str:
    """A path as text that can be drawn, whatever encoding the locale has."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def notes(rows: list[Comparison]) -> list[str]:
    """What a reader should know beside the table: other flags or another shape, other lengths, what was not checked."""
    result, reference = [], rows[0].run
    for run, name in ((row.run, row.name) for row in rows):
        if "corpus_sha256" not in run.config:
            result.append(f"{name}: no corpus_sha256 in config.json, the corpus was not checked")
        if run.records.keys() != reference.records.keys():
            result.append(f"{name}: has {len(run.records)} steps, {len(reference.records)} in the reference")
        changed = changed_settings(run.config, reference.config)
        result += [f"{name}: has {', '.join(changed)}"] if changed else []
        tokens = [each.config.get("tokens_sha256") for each in (run, reference)]
        if None not in tokens and tokens[0] != tokens[1]:
            result.append(f"{name}: has other tokens of the same text (tokens_sha256), as of another tokenizer")
    return result


def table(rows: list[Comparison]) -> str:
    """The rows as aligned text: steps, final value, median tokens/s of the whole run; then differences."""
    keys = list(rows[0].worst)
    differences = (word for key in keys for word in (f"max rel diff {key}", "at step"))
    lines = [["run", "steps", f"final {keys[0]}", "tokens/s", *differences]]
    for row in rows:
        records = row.run.records
        speed = statistics.median(row.run.value(step, "tokens_per_s") for step in records)
        line = [row.name, str(len(records)), f"{row.run.value(max(records), keys[0]):.6f}", f"{speed:,.0f}"]
        for value, step in row.worst.values():
            line += ["reference", ""] if row is rows[0] else [f"{value:.2e}", str(step)]
        lines.append(line)
    return "\n".join(line.rstrip() for line in aligned(lines))


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Do what the module says. Returns the exit status."""
    parser = OneLineParser(prog="python -m common.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that a run wrote (--run-dir)")
    parser.add_argument("--tolerance", type=float, help="exit with 1 if a relative difference exceeds it")
    parser.add_argument("--out", default="compare.png", help="the picture (default: %(default)s)")
    parser.add_argument("--key", default=",".join(KEYS), help="what to compare (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="compare only the steps below this")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.explain:
        return explain_files(arguments)
    for name in "type", "columns", "plot":
        if getattr(arguments, name):
            raise UsageError(f"--{name} {getattr(arguments, name)} needs --explain")
    keys, tolerance = tuple(filter(None, arguments.key.split(","))), arguments.tolerance
    if not keys:
        raise UsageError("--key names nothing to compare")
    if tolerance is not None and not tolerance >= 0:  # a NaN would let everything pass
        raise UsageError(f"--tolerance {tolerance} must be at least 0")
    rows = compare([read_run(path) for path in arguments.runs], keys, arguments.steps)
    print("\n".join([table(rows), *(f"note: {note}" for note in notes(rows))]))
    plot(rows, arguments.out, tolerance)
    print(f"picture: {arguments.out}")
    if tolerance is None:
        return 0
    found = [(row.name, key, *worst) for row in rows for key, worst in row.worst.items() if worst[0] > tolerance]
    for name, key, value, step in found:
        print(f"FAIL {name}: {key} differs by {value:.2e} at step {step}, more than {tolerance:g}")
    if not found:
        print(f"OK: no difference exceeds {tolerance:g}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
