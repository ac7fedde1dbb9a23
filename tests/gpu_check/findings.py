"""What the parts of the check find out, and the report that is made of it."""

import importlib.util
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch


def on_devices(items: Iterable, quick: Iterable = ()) -> pytest.MarkDecorator:
    """Parametrise a test by `found` and `item`: a GPU has all, a CPU only tries the quick ones."""
    cases = [pytest.param("cpu", item, id=f"cpu-{item}") for item in quick]
    cases += [pytest.param("cuda", item, id=f"cuda-{item}", marks=pytest.mark.gpu) for item in items]
    return pytest.mark.parametrize("found, item", cases, indirect=["found"])


@dataclass
class Findings:
    """What one part has found. Its file is always up to date, so a part that is killed loses nothing.

    folder: of this part alone, for its runs and its file, findings.json.
    quick: as small and short as possible: does everything work?
    """

    folder: Path
    device: torch.device
    quick: bool

    @property
    def lines(self) -> list[dict]:
        """What was found, in order; `passed` is None where there is nothing to pass."""
        file = self.folder / "findings.json"
        return json.loads(file.read_text()) if file.exists() else []

    def write(self, lines: list[dict]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "findings.json").write_text(json.dumps(lines))

    def note(self, what: str, value: object, passed: bool | None = None) -> None:
        """Add a figure or a table, as rows, or replace the one of this name."""
        lines = [line for line in self.lines if line["what"] != what]
        self.write([*lines, {"what": what, "value": value, "passed": passed}])

    def row(self, table: str, header: list[str], cells: list[str]) -> None:
        """Add a row to a table, or replace the one with the same first two cells."""
        rows = next((line["value"][1:] for line in self.lines if line["what"] == table), [])
        self.note(table, [header, *(row for row in rows if row[:2] != cells[:2]), cells])
        print(*cells, sep=" | ", flush=True)

    def report(self) -> list[str]:
        """Return all of it in Markdown."""
        text = []
        for line in self.lines:
            what = {None: "- ", True: "- passed: ", False: "- **failed**: "}[line["passed"]] + line["what"]
            rows = isinstance(line["value"], list)
            text += [f"{what}:", *_table(line["value"])] if rows else [f"{what}: {line['value']}".rstrip(": ")]
        return text


def facts(device: torch.device) -> list[str]:
    """Return when, where and with what the check runs, in lines."""
    result = [now(), " ".join(["python -m tests.gpu_check", *sys.argv[1:]]), "CPU"]
    if device.type == "cuda":
        properties, nccl = torch.cuda.get_device_properties(device), ".".join(map(str, torch.cuda.nccl.version()))
        result[2] = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        result += [f"CUDA {torch.version.cuda}, NCCL {nccl}"]
    result += [f"torch {torch.__version__}, Python {platform.python_version()}"]
    if importlib.util.find_spec("triton"):
        result += [f"triton {importlib.import_module('triton').__version__}"]
    return [*(f"- {line}" for line in result), ""]


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _table(rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown."""
    header, *rows = ([cell.replace("|", "/") for cell in row] for row in rows)
    return ["", *("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)), ""]
