"""Whoever imports a mechanism of ours gets no more than that; our own programs prepare their process first."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.harness.ranks import ROOT
from tests.house.test_structure import MODULES, STEPS, imports_of, needed_by


def text_of(module: str) -> str:
    return MODULES[module].read_text(encoding="utf-8")


LOADS_TORCH = r"^(import|from) torch"
PROGRAMS = {module for module in MODULES if '__name__ == "__main__"' in text_of(module)}
PROGRAMS = {module for module in PROGRAMS if not module.startswith("tests.")} | {"tests"}
TRAINS = {f"{step}.train" for step in STEPS}
MECHANISMS = sorted(needed_by(*TRAINS) - TRAINS - {"common.entry"})

STATE = """
import gc, importlib, json, locale, logging, os, random, signal, socket, sys, threading, warnings
import numpy, torch, torch.distributed

def state():
    backends = torch.backends
    return {
        "os.environ": dict(os.environ),
        "sys.path": list(sys.path),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "types": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            backends.cudnn.deterministic,
            backends.cudnn.benchmark,
        ],
        "precision": [
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.allow_tf32,
            backends.cudnn.allow_tf32,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "random": [str(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist()],
        "warnings": list(map(str, warnings.filters)),
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.displayhook)],
        "limits": [sys.getrecursionlimit(), str(gc.get_threshold()), socket.getdefaulttimeout()],
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "locale": locale.setlocale(locale.LC_ALL),
        "process group": torch.distributed.is_initialized(),
    }

before, changed = state(), []
for module in sys.argv[1:]:
    importlib.import_module(module)
    now = state()
    changed += [[module, name, str(before[name]), str(now[name])] for name in now if now[name] != before[name]]
    before = now
print(json.dumps(changed))

from step08_5d.kernels import launching, swiglu
if launching.HAS_TRITON and not torch.cuda.device_count():  # Triton interprets, although no variable says so
    assert swiglu.swiglu(torch.ones(3), torch.ones(3)).shape == (3,)
"""
SET_HERE = "OMP_NUM_THREADS", "KINETO_LOG_LEVEL", "TRITON_INTERPRET", "MPLBACKEND", "HF_HUB_OFFLINE"  # by the tests


def test_importing_a_mechanism_changes_nothing():
    assert {"common", "common.collectives", "step03_zero.zero", "step08_5d.fused"} <= {"common", *MECHANISMS}
    environment = {name: value for name, value in os.environ.items() if name not in SET_HERE}
    command = [sys.executable, "-c", STATE, "common", *MECHANISMS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    changed = json.loads(done.stdout.splitlines()[-1])
    assert not changed, "\n".join(": ".join(each)[:600] for each in changed)


def test_our_programs_prepare_their_process_before_they_load_torch():
    prepared = {module for module in MODULES if "common.entry" in imports_of(module)}
    assert prepared <= PROGRAMS, "only a program may change its process"
    assert TRAINS <= prepared
    for module in PROGRAMS - prepared:
        loading = [other for other in needed_by(module) if re.search(LOADS_TORCH, text_of(other), re.MULTILINE)]
        assert not loading or not imports_of(module), f"{module} loads PyTorch, and has something of ours"
    for module in prepared:
        names = re.findall(r"^(?:from|import) ([\w.]+)", text_of(module), re.MULTILINE)
        first = next(name for name in names if name.partition(".")[0] not in sys.stdlib_module_names)
        assert first == "common.entry", f"{module}: {first} may load PyTorch with its own default"


# What other processes start, sketches and demos that take no flags, and what wants ranks
NO_HELP = r"labs\.(alone|forks|recheck|ragged|latent_ring)$|lockstep\.rank$|on_nodes$|sketch$"
NO_HELP += r"|collectives_tour$|hangs$|autograd_primer$|type_checker$|^tests$"
HELPFUL = sorted(module for module in PROGRAMS if not re.search(NO_HELP, module))
WITHOUT_RUNNING = ["common.drawing.groups", "common.experiments.lesson_times"]  # they did all their work


@pytest.mark.parametrize("module", HELPFUL if os.environ.get("TEST_ALL") else WITHOUT_RUNNING)
def test_help_is_all_that_a_program_does_when_asked_for_it(module):
    command = [sys.executable, "-m", module.removesuffix(".__main__"), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stdout[:7]) == (0, "usage: "), done.stderr


def test_a_process_has_one_thread_unless_told():
    """On busy cores ten steps took 101 s with threads that spin while they wait, and 7 s with a single thread."""
    show = "import common.entry, os; print(os.environ['OMP_NUM_THREADS'])"
    environment = {name: value for name, value in os.environ.items() if name not in SET_HERE}
    for own, threads in ({}, b"1"), ({"OMP_NUM_THREADS": "2"}, b"2"):
        printed = subprocess.check_output([sys.executable, "-c", show], cwd=ROOT, env=environment | own)
        assert printed.strip() == threads
