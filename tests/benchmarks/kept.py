"""The results that benchmarks leave: with their date, and with the files whose code ran, so that stale ones are known.

A result is stale when the code of one of these files has changed since: comments, docstrings, imports and blank lines
do not count, nor does a new flag, which what was measured did not have: of flags, the defaults of then are kept. The
files are those of `common` and of the steps that a step under measurement called, and the benchmark's own.
"""

import ast
import dataclasses
import hashlib
import io
import json
import os
import platform
import sys
import time
import tokenize
from collections.abc import Callable
from pathlib import Path

import torch

from common.config import TrainConfig
from tests.harness.ranks import ROOT

RESULTS = Path(__file__).parent / "results"
NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}


def files_run(function: Callable) -> list[str]:
    """Call the function, and return which files of `common` and of the steps have Python code that ran meanwhile."""
    seen: set[str] = set()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    found = (Path(name).relative_to(ROOT) for name in seen if Path(name).is_relative_to(ROOT))
    return sorted(str(path) for path in found if path.parts[0] == "common" or path.parts[0].startswith("step"))


def code_of(source: str) -> str:
    """The lines of a file of Python without comments, docstrings, imports, blank lines and flags."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        skipped = node if isinstance(node, ast.Import | ast.ImportFrom) or _is_flag(node) else None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            skipped = node.body[0]
        if skipped is not None:
            lines[skipped.lineno - 1 : skipped.end_lineno] = [""] * (skipped.end_lineno - skipped.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_flag(node: ast.AST) -> bool:
    """Whether it is a line such as `seq_len: int = flag(256, ...)`."""
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.value or node).startswith("flag(")


def hash_of(path: str) -> str | None:
    """A short hash of a file's code, or None if there is no such file."""
    file = ROOT / path
    return hashlib.sha256(code_of(file.read_text("utf-8")).encode()).hexdigest()[:12] if file.exists() else None


def keep(name: str, rows: dict, pairs: int, whole: bool) -> None:
    """Write the figures to tests/benchmarks/results/NAME.json, with the date, the machine, and hashes of the files.

    Args:
        whole: whether these are all figures of the benchmark. Some of them would replace the others: none is written.
    """
    if not whole:
        print("not written: only a run with the default options replaces the results")
        return
    own = {f"tests/benchmarks/{each}.py" for each in (name, "paired")}
    ran = {path for row in rows.values() if isinstance(row, dict) for path in row.pop("files", ())}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    hardware = {"device": device, "cores": os.cpu_count(), "torch": torch.__version__}
    hardware |= {"date": time.strftime("%Y-%m-%d"), "pairs": pairs}
    files = {path: hash_of(path) for path in sorted(own | ran)}
    content = {"hardware": hardware, "files": files, "defaults": DEFAULTS} | rows
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"written: {path}")


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def changed_files(results: dict) -> list[str]:
    """The files whose code is not that which was measured, and the flags that have another default."""
    flags = [name for name, default in results["defaults"].items() if DEFAULTS.get(name, "gone") != default]
    return [path for path, measured in results["files"].items() if hash_of(path) != measured] + flags
