"""The curve of a run, from whatever wrote it down: our run record, JSON, JSONL, a table (CSV), or printed lines.

Only three columns matter, which programs give many names: the step, the loss of training, and the norm of the gradient.
A learning rate and a loss scale (float16) help where they are there.
"""

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from common.errors import UsageError
from common.metrics import read_metrics

# After `plain`: without capitals, punctuation, and words such as "train/"
NAMES = {
    "step": ("global_step", "step", "steps", "iteration", "iter", "it", "optimizer_step", "num_updates", "update"),
    "loss": ("loss", "lm_loss", "global_avg_loss", "avg_loss", "loss_avg", "ce_loss", "cross_entropy", "nll_loss")
    + ("loss_step",),
    "grad_norm": ("grad_norm", "gradnorm", "gradient_norm", "global_grad_norm", "grad_norm_total", "total_norm")
    + ("gnorm", "norm"),
    "lr": ("lr", "learning_rate", "rate"),
    "loss_scale": ("loss_scale", "grad_scale", "scale", "loss_scaler"),
}
WORDS = r"(train|training|trainer|losses|loss_metrics|optim|optimizer|metrics|perf)_"
ESCAPES = re.compile(r"\x1b\[[\d;]*m")  # colours of a terminal
NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))\b"
PRINTED = re.compile(rf"([a-zA-Z_][\w/-]*(?: [a-zA-Z_]\w*)*) *[:=] *{NUMBER}|([a-zA-Z_]\w*) +{NUMBER}")


@dataclass(frozen=True)
class Log:
    """What a run has written down.

    config      of our run record, else {}
    values      by column (those of `NAMES` that there are) and step
    columns     what the file calls them
    """

    path: Path
    config: dict = field(default_factory=dict)
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)

    def resolution(self, key: str) -> float:
        """Half a unit of the last digit that is written, as a share of the values: 0.00005 of 1.234 is 4e-5."""
        written = [Decimal(repr(value)) for value in self.values[key].values() if math.isfinite(value) and value]
        if not written:
            return 0.0
        places = min(value.as_tuple().exponent for value in written)  # "%.4f" writes as many after the point
        digits = max(len(value.as_tuple().digits) for value in written)  # "%.4e" writes as many in all
        return max(10.0**places / statistics.median(abs(float(value)) for value in written), 10.0 ** (1 - digits)) / 2


def read_log(path: Path | str, columns: dict[str, str] | None = None) -> Log:
    """Read a run's folder, or a file. `columns` says which column is "step", "loss" or "grad_norm", where it is there.

    Raises UsageError, in one line, for what cannot be read, or has no step or no loss.
    """
    path, config = Path(path), {}
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        if path.is_dir() and not file.exists() and (path / "trainer_state.json").exists():
            file = path / "trainer_state.json"
        if file.name == "metrics.jsonl":
            rows = read_metrics(file)
            if (file.parent / "config.json").exists():
                config = dict(json.loads((file.parent / "config.json").read_text(encoding="utf-8")))
        else:
            rows = list(_rows(file.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    found = _columns(rows, columns or {}, file)
    values = {key: _values(rows, found["step"], name) for key, name in found.items() if key != "step"}
    if not values["loss"]:
        first = ", ".join(f"{name} = {rows[0].get(name)!r}" for name in (found["step"], found["loss"]))
        raise UsageError(f"{file} holds no step with a loss: in its first row, {first}, and one is no number")
    return Log(path, config, values, found)


def _rows(text: str) -> Iterator[dict]:
    """The rows of a JSON document (a list, or its `log_history`), of JSON lines, of a table, or of printed lines."""
    if not re.match(r"\s*(\{|\[\s*\{)", text):
        yield from _of_words(text.splitlines() or [""])
        return
    try:
        whole = json.loads(text)
    except ValueError:
        lines = text.splitlines()
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield dict(json.loads(line))
                except (ValueError, TypeError):
                    if 1 < number == len(lines) and not text.endswith("\n"):
                        return  # half written, by a program that was killed or goes on
                    raise ValueError(f"line {number} is no JSON object: {line[:60]!r}") from None
        return
    if isinstance(whole, dict):
        whole = whole.get("log_history", [whole])
    yield from (dict(row) for row in whole)


def _of_words(lines: list[str]) -> Iterator[dict]:
    """A table with a header, or what programs print: "iteration 10/ 100 | lm loss: 2.1E+00 |", "iter 10: loss 2.1"."""
    delimiter = max(",;\t", key=lines[0].count)
    if delimiter in lines[0]:
        table = list(csv.DictReader(lines, delimiter=delimiter))
    else:
        table = [dict(zip(lines[0].split(), line.split())) for line in lines[1:]]
    printed = []
    for line in lines:
        found = PRINTED.findall(re.sub("[\"']", "", ESCAPES.sub("", line)))
        printed.append({name or word: number or after for name, number, word, after in found})
    known = [
        [sum(plain(name) in NAMES[key] for row in rows for name in row if name) for key in ("step", "loss")]
        for rows in (table, printed)
    ]
    yield from table if known[0] >= known[1] else printed


def plain(name: str) -> str:
    """The name of a column without what programs put around it: "run 7 - train/Grad Norm" is "grad_norm"."""
    name = re.sub(r"\W+", "_", name.rpartition(" - ")[2].lower()).strip("_")
    while (shorter := re.sub(f"^{WORDS}", "", name)) != name:
        name = shorter
    return name


def _columns(rows: list[dict], chosen: dict[str, str], file: Path) -> dict[str, str]:
    """Which column of the rows is which."""
    headers = list(dict.fromkeys(name for row in rows for name in row if isinstance(name, str)))
    found = {}
    for key, names in NAMES.items():
        if chosen.get(key) in headers:
            found[key] = chosen[key]
            continue
        # The best name; of two alike, the first column. The _step of wandb also counts what is logged in between
        fitting = [
            (header.startswith("_"), names.index(plain(header)), header) for header in headers if plain(header) in names
        ]
        if fitting:
            found[key] = min(fitting, key=lambda each: each[:2])[2]
        elif key in chosen:
            raise UsageError(f"{file} has no column {chosen[key]!r}; its columns are {', '.join(headers)}")
    for key in "step", "loss":
        if key not in found:
            has = f"its columns are {', '.join(headers)}" if headers else "it holds no step"
            raise UsageError(f"{file} has no column that is the {key} (--columns {key}=NAME); {has}")
    return found


def _values(rows: Iterable[dict], step: str, column: str) -> dict[int, float]:
    """The numbers of a column by step. If a step occurs twice, as after a resume, the later one counts, unless it is a
    NaN: so pandas and wandb write what is not there, the loss beside an evaluation, say.

    Raises UsageError for a step that is not whole, such as an epoch.
    """
    found = {}
    for row in rows:
        at, value = row.get(step), row.get(column)
        if at not in (None, "") and value not in (None, ""):
            try:
                number, found_value = float(at), float(value)
            except (TypeError, ValueError):
                continue  # a header in the middle, or a remark
            if not number.is_integer():
                raise UsageError(f"{step!r} is {at}, which is no number of a step (--columns step=NAME)")
            if int(number) not in found or not math.isnan(found_value):
                found[int(number)] = found_value
    return dict(sorted(found.items()))
