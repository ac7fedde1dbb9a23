"""What the parts of the check find out, and the report that is made of it."""

import contextlib
import importlib
import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

NOT_ON_CPU = "not measured on the CPU"


@dataclass
class Findings:
    """What one part has found so far. Its file is up to date after every line, so a part that is killed loses nothing.

    folder: of this part alone, for its runs and its file, findings.json.
    quick: as small and short as possible: does everything work?
    rows: of the parts that measure rows of tables, only those with this in their names.
    lines: what was found, in order; `passed` is None where there is nothing to pass.
    """

    folder: Path
    device: torch.device
    quick: bool
    rows: str = ""
    lines: list[dict] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "findings.json"

    def read(self) -> None:
        """Take over what another process has found for this part."""
        self.lines = json.loads(self.file.read_text()) if self.file.exists() else []

    def has(self, what: str) -> bool:
        """Whether there is a line of this name, perhaps from before this part was interrupted."""
        return any(line["what"] == what for line in self.lines)

    def check(self, what: str, passed: bool | None, value: object = "") -> None:
        """Add something that must be true, in the place of an earlier line of this name."""
        self.lines = [line for line in self.lines if line["what"] != what]
        self.lines.append({"what": what, "value": value, "passed": passed})
        print(f"{MARKS[passed]}{what}: {value}", flush=True)
        self._write()

    def note(self, what: str, value: object) -> None:
        """Add a figure or, as a list of rows of which the first is the header, a table."""
        self.check(what, None, value)

    def row(self, table: str, header: list[str], cells: list[str]) -> None:
        """Add a row to the table of this name, in the place of an earlier one with the same first two cells."""
        found = [line["value"] for line in self.lines if line["what"] == table]
        if not found:
            return self.note(table, [header, cells])
        found[0][:] = [*(row for row in found[0] if row[:2] != cells[:2]), cells]
        print(*cells, sep=" | ", flush=True)
        self._write()

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """In this block an error is something that failed, and what comes after the block goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(what, False, f"{type(error).__name__}: {str(error).strip()[:SHOWN]}")

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.lines))


SHOWN = 600  # characters of an error
MARKS = {None: "", True: "passed: ", False: "**failed**: "}


def facts(device: torch.device) -> dict[str, str]:
    """Return when, where and with what the check runs, by name."""
    result = {"date": now(), "device": "CPU"}
    result["command"] = " ".join(["python -m tests.gpu_check", *sys.argv[1:]])
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        count = torch.cuda.device_count()
        result["device"] = f"{count} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        result["driver"] = nvidia_smi("--query-gpu=driver_version").partition("\n")[0] or "unknown"
        result |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    result |= {"torch": torch.__version__, "Python": platform.python_version()}
    try:
        return result | {"triton": importlib.import_module("triton").__version__}
    except ImportError:
        return result | {"triton": "not installed"}


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def nvidia_smi(query: str) -> str:
    """Return what nvidia-smi answers, and an empty string where it is missing."""
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_report(out: Path, about: dict[str, str], parts: list[dict]) -> None:
    """Write OUT/gpu.json and the same as a text, OUT/gpu.md.

    A part has a name, a status (passed, failed or unfinished), its seconds and date, its lines and, unless it passed,
    what it printed last.
    """
    (out / "gpu.json").write_text(json.dumps({"about": about, "parts": parts}, indent=1) + "\n")
    summary = [["part", "status", "seconds", "date"]]
    summary += [[part["part"], part["status"], f"{part['seconds']:.0f}", part["date"]] for part in parts]
    text = ["# What GPUs show", "", *(f"- {name}: {value}" for name, value in about.items()), *_table(summary)]
    for part in parts:
        text += ["", f"## {part['part']}", ""]
        for line in part["lines"]:
            what = f"- {MARKS[line['passed']]}{line['what']}"
            rows = isinstance(line["value"], list)
            text += [f"{what}:", *_table(line["value"])] if rows else [f"{what}: {line['value']}".rstrip(": ")]
        if part["printed"]:
            text += ["", "What it printed last:", "", "```", part["printed"].replace("```", "'''"), "```"]
    (out / "gpu.md").write_text("\n".join(text) + "\n")


def _table(rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown."""
    header, *rows = ([cell.replace("|", "/") for cell in row] for row in rows)
    return ["", *("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)), ""]
