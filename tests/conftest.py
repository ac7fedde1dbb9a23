"""What holds for every test: few threads, no network, no window, no process left behind."""

import gc
import os
from importlib import metadata

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries of Hugging Face are imported
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy
import pytest
import torch

from tests.harness.ranks import stop_fork_server

torch.set_num_threads(1)  # several tests run side by side
gc.set_threshold(50_000, 20, 20)  # by default, collections take a tenth of the time
if not torch.cuda.device_count():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a test, or a process that it starts, loads Triton


def stay_on_one_core():
    """Where no core is to spare, the first workers have one each, which their ranks stay on: a rank on another core has
    to be woken for each message, which takes processor time. Further workers go where a core is idle.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if int(worker) < len(cores) <= int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
            os.sched_setaffinity(0, {cores[int(worker)]})


def pytest_configure():
    """Refuse to run without assertions, and the one pair of versions that pyproject.toml's ranges allow and that cannot
    run the kernels here.
    """
    stay_on_one_core()
    if not __debug__:
        raise pytest.UsageError("python -O and PYTHONOPTIMIZE remove the assertions that tests are made of")
    try:
        old = numpy.lib.NumpyVersion(metadata.version("triton")) < "3.7.0"
    except metadata.PackageNotFoundError:  # the tests of kernels are skipped
        return
    if old and os.environ.get("TRITON_INTERPRET") == "1" and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        raise pytest.UsageError("Triton 3.6's interpreter cannot run kernels with NumPy 2.4: pip install 'numpy<2.4'")


# The longest first, so that no worker is left alone with one at the end of `make test`. Beside the fault tests, which
# often wait, go those that need both cores
LONGEST = "test_faults test_nodes parity test_readme resume test_flags mutants labs mechanisms".split()


def pytest_collection_modifyitems(items):
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in str(item.path)), len(LONGEST)))
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_sessionfinish():
    stop_fork_server()
