"""Rows of a table, one after another in one process; when a row has failed, a new process goes on with the next.

An illegal access on the GPU lets everything fail that its process does afterwards, and a kernel may never end.
"""

import faulthandler
import functools
import importlib
import sys
from pathlib import Path

import torch

from tests.gpu_check.findings import Findings
from tests.harness.ranks import CommandTimeout, run_command

START = 60  # seconds that a process may take before its first row
FAILED = 3  # the status of a process whose last row has failed, and has said so


def measure_rows(found: Findings, module: str, names: list[str], seconds: int) -> None:
    """Call `measure(found, name)` of this module for each name that --rows chooses.

    A row that takes more than `seconds`, raises, or ends its process has failed. Rows of an interrupted check are kept.
    """
    left = [name for name in names if found.rows in name and not _done(found, name).exists()]
    while left:
        command = [sys.executable, "-m", "tests.gpu_check.rows", module, found.folder, found.device.type]
        command += ["quick" if found.quick else "full", seconds, *left]
        try:
            done = run_command(command, timeout=START + seconds * len(left))
            status, printed = done.returncode, done.stderr
        except CommandTimeout as error:
            status, printed = "unknown", str(error)
        found.read()
        while left and _done(found, left[0]).exists():
            left.pop(0)
        if left and status != FAILED:
            name = left.pop(0)
            found.check(name, False, f"its process ended with status {status}: {printed.strip()[-1000:]}")
            _done(found, name).touch()


def trace_only(device: torch.device) -> None:
    """On the CPU, let torch.compile need no C++ compiler: it traces functions and runs them as they are."""
    if device.type == "cpu":
        torch.compile = functools.partial(torch.compile, backend="eager")


def _done(found: Findings, name: str) -> Path:
    return found.folder / f"{name}.done"


def main(module: str, folder: str, device: str, size: str, seconds: str, *names: str) -> int:
    """Measure the rows, and leave a file for each. Returns the exit status."""
    found = Findings(Path(folder), torch.device(device), size == "quick")
    found.read()
    trace_only(found.device)
    measure = importlib.import_module(module).measure
    for name in names:
        faulthandler.dump_traceback_later(int(seconds), exit=True)
        ended = False
        with found.attempt(name):
            measure(found, name)
            ended = True
        _done(found, name).touch()  # what measures has made the folder
        if not ended:
            return FAILED
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
