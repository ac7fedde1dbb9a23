"""RUN_DIR/metrics.jsonl: one line for each step of a run."""

import json
import math
from pathlib import Path


def line_of(record: dict) -> str:
    """The record of a step as a line. JSON knows no numbers that are not finite: they are strings here."""
    strings = {key: json.dumps(each) for key, each in record.items() if type(each) is float and not math.isfinite(each)}
    return json.dumps(record | strings, allow_nan=False) + "\n"


def _with_numbers(values: dict) -> dict:
    return {key: float(value) if value in ("NaN", "Infinity", "-Infinity") else value for key, value in values.items()}


def read_metrics(path: Path) -> list[dict]:
    """The steps of a `metrics.jsonl`, without a last line that is half written, as a run that was killed leaves it.

    Raises ValueError with the number of the first other line that is not the record of a step.
    """
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line, object_hook=_with_numbers))
            int(records[-1]["step"])  # what is no object or has no step is no record either
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path.name}, line {number} is not the record of a step: {line[:60]!r}") from None
    return records
