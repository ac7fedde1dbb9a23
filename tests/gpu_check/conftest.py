"""Runs the tests of this folder: on a CPU, as small as possible, or as `python -m tests.gpu_check` says.

An illegal access on the GPU lets everything fail that its process does afterwards, and a kernel may never end. So the
command starts a new process after each failure, and here a test is a failure from its start to its end.
"""

import faulthandler
import functools
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_check.findings import Findings

STARTED = "it has been started"
TIME = 350  # seconds for a test
LONG = "test_lost_rank", "test_dimension"  # which start torchrun. Others kill its ranks in `make test`


def pytest_addoption(parser):
    group = parser.getgroup("python -m tests.gpu_check")
    group.addoption("--record", type=Path, metavar="FOLDER", help="what it finds; what has ended is not run again")
    group.addoption("--device", choices=("cuda", "cpu"))
    group.addoption("--quick", action="store_true")


def record(config) -> Findings | None:
    """What this process adds to, if `python -m tests.gpu_check` has started it."""
    if (folder := config.getoption("--record", None)) is None:
        return None
    return Findings(folder, torch.device(config.getoption("--device")), config.getoption("--quick"))


@pytest.fixture
def found(request, tmp_path_factory, monkeypatch) -> Findings:
    if request.param == "cpu":  # trace functions and run them as they are, which needs no C++ compiler
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    if found := record(request.config):
        return found
    if request.param == "cuda":
        pytest.skip("`python -m tests.gpu_check` runs it")
    if request.node.originalname in LONG and not os.environ.get("TEST_ALL"):
        pytest.skip("starts torchrun: `python -m tests.gpu_check --device cpu`, or TEST_ALL=1")
    return Findings(tmp_path_factory.getbasetemp() / request.module.__name__, torch.device("cpu"), True)


def pytest_collection_modifyitems(config, items):
    """Leave what is for this device, and has not ended."""
    if (found := record(config)) is None:
        return
    names = {item.name for item in items}
    if found.quick:
        names = {name for name in names if name.replace("[cuda", "[cpu") in names}
    names -= {line["what"] for line in found.lines}
    items[:] = [each for each in items if each.name in names and f"[{found.device.type}" in each.name]


def pytest_runtest_setup(item):
    if found := record(item.config):
        found.note(item.name, STARTED, False)
        faulthandler.dump_traceback_later(TIME, exit=True, file=sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if (found := record(item.config)) and (call.when == "call" or not report.passed):
        value = report.longrepr[2] if report.skipped else str(call.excinfo.value)[:600] if report.failed else ""
        found.note(item.name, value, {"passed": True, "failed": False, "skipped": None}[report.outcome])
    return report
