"""The parts of tests/gpu_check work, as far as a CPU can tell; ranks are forked instead of started by torchrun."""

import os
import re
import signal
import subprocess

import pytest
import torch

from step08_5d.gpu_ladder import machine
from tests.gpu_check import __main__ as command
from tests.gpu_check import faults, launching, node, one_gpu, parity, profiles, rows
from tests.gpu_check.findings import Findings
from tests.harness.observing import configure
from tests.harness.ranks import CommandTimeout, run_script

KERNELS = [  # as Kineto tells of them, in microseconds of its own clock
    {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1000, "dur": 40},
    {"ph": "X", "cat": "kernel", "name": "norm|x", "ts": 1050, "dur": 10},
    {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1060, "dur": 40},
]


def forked(found, name, command, ranks, seconds, together=False):
    """What `run_on_ranks` does, without torchrun."""
    done = run_script(*command, ranks=ranks, timeout=seconds)
    return [done.returncode], done.stderr


@pytest.fixture
def found(tmp_path, monkeypatch) -> Findings:
    monkeypatch.setattr(launching, "run_on_ranks", forked)
    monkeypatch.setattr(
        node, "torchrun", lambda n, *call, timeout, env=None: run_script(*call, ranks=n, timeout=timeout)
    )
    monkeypatch.setattr(rows, "run_command", lambda command, timeout: run_script(*command[1:], timeout=timeout))
    monkeypatch.setattr(torch, "compile", torch.compile)  # which `trace_only` replaces
    rows.trace_only(torch.device("cpu"))
    (tmp_path / "ranks can meet on cpu").touch()
    return Findings(tmp_path / "part", torch.device("cpu"), quick=True)


# `shared_gpu` differs from `nccl` in how ranks are launched, and `faults` kills what has been launched
IN_THIS_PROCESS = [part for part in command.PARTS if part not in (parity.shared_gpu, faults.faults)]


@pytest.mark.parametrize("part", IN_THIS_PROCESS, ids=lambda part: part.__name__)
def test_parts_pass_on_the_cpu(part, found, monkeypatch):
    monkeypatch.setattr(one_gpu, "run_command", lambda *_, **__: subprocess.CompletedProcess([], 0, "1 skipped", ""))
    if part is parity.nccl:
        (found.folder.parent / "ranks can meet on cpu").unlink()
    part(found)
    assert any(line["passed"] for line in found.lines)
    assert all(line["passed"] is not False for line in found.lines), found.lines


RANK = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
folder.mkdir(exist_ok=True)
(folder / rank).write_text(f"{os.getpid()} {os.environ['NCCL_HOSTID']}")
if rank == "0":
    while not (folder / "1").exists():
        time.sleep(0.01)
    (folder / "metrics.jsonl").write_text("{}\\n" * 5)
    while pathlib.Path("/proc", (folder / "1").read_text().split()[0]).exists():
        time.sleep(0.01)
    sys.exit(1)
time.sleep(60)
"""


def test_a_lost_rank_under_real_launchers(found, tmp_path, monkeypatch):
    """The ranks are only played: rank 0 waits for the end of rank 1."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    monkeypatch.setattr(faults, "training", lambda found, name, flags: [script, found.folder / name])
    faults.lose_a_rank(found, signal.SIGKILL, timeout=20)
    assert [line["passed"] for line in found.lines] == [True, True, None], found.lines
    assert found.lines[-1]["value"] == "1, -9"
    hosts = {(found.folder / "SIGKILL" / rank).read_text().split()[1] for rank in "01"}
    assert len(hosts) == 2, "NCCL takes the ranks for those of two hosts"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_a_node_trains_can_be_divided(ranks):
    for case in node.CASES.values():
        flags = f"{node.SHAPES[case.shape]} {case.flags.format(ranks) if ranks > 1 else ''} --device cpu"
        config = configure(8, flags, ranks)
        bubble = (ranks - 1) / 32 if "--pp" in flags else 0.0  # of 32 micro-batches
        assert node.predicted(8.0, ranks, vars(config)) == pytest.approx(8.0 / ranks * (1 + bubble))


def test_which_gpu_a_rank_gets(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    own, shared = ([launching.placement(rank, ranks, False) for rank in (0, 1)] for ranks in (2, 3))
    assert own == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}]
    assert shared == [{"CUDA_VISIBLE_DEVICES": "4", "NCCL_HOSTID": f"host-{rank}"} for rank in (0, 1)]
    assert launching.placement(0, 2, True) == {"CUDA_VISIBLE_DEVICES": "4"}


def test_a_layout_that_fails_does_not_stop_the_others(found, monkeypatch):
    """The first one gives another curve, and the second ends its processes. What is found is not looked for again."""
    left = []

    def broken(found, name, command, ranks, seconds, together):
        left.append(command[-3:])
        answer = forked(found, name, command, ranks, seconds)
        if len(left) > 1:
            return answer
        (found.folder / "5.done").unlink()
        (found.folder / "6.done").unlink()
        curve = found.folder / "4" / "metrics.jsonl"
        curve.write_text(re.sub(r'("loss": \d\.\d{8})\d', r"\g<1>", curve.read_text()))
        return [1], "error: what it said"

    monkeypatch.setattr(launching, "run_on_ranks", broken)
    parity.check_layouts(found, [4, 5, 6], "gloo")
    assert left == [[4, 5, 6], [found.folder, "cpu", 6]]
    assert [line["passed"] for line in found.lines] == [False, False, True, True], found.lines
    assert "what it said" in found.lines[1]["value"]
    parity.check_layouts(found, [4, 5, 6], "gloo")
    assert len(left) == 2


def test_slow_ranks_are_not_wrong(found, monkeypatch):
    """Each time only one layout is ready when the time is over. At last none is, and that one has failed."""
    left = []

    def slow(found, name, command, ranks, seconds, together):
        left.append(command[4:])
        if len(left) < 3:
            found.folder.mkdir(exist_ok=True)
            (found.folder / f"{left[-1][0]}.done").write_text("gloo")
        return [None], "still at it"

    monkeypatch.setattr(launching, "run_on_ranks", slow)
    monkeypatch.setattr(parity, "train_alone", lambda *_: None)
    monkeypatch.setattr(parity, "difference", lambda *_: 0.0)
    parity.check_layouts(found, [4, 5, 6], "gloo")
    assert left == [[4, 5, 6], [5, 6], [6]]
    assert [line["passed"] for line in found.lines] == [True, True, False]


def test_ranks_that_cannot_meet_are_said_at_once(found, monkeypatch):
    (found.folder.parent / "ranks can meet on cpu").unlink()
    monkeypatch.setattr(launching, "run_on_ranks", lambda *_: ([None, 1], "Duplicate GPU"))
    for part in (parity.nccl, parity.bfloat16, parity.starts, faults.faults):
        part(found)
        (line,) = found.lines
        assert line["passed"] is False and "Duplicate GPU" in line["value"], part
        found.lines.clear()


def measure(found, name):
    """A row of the test below."""
    if name == "raises":
        raise ValueError("what it said")
    if name == "dies":
        os._exit(7)
    found.row("table", ["name"], [name])


def test_a_row_that_fails_does_not_stop_the_others(found, monkeypatch):
    rows.measure_rows(found, __name__, ["first", "raises", "dies", "last"], 60)
    table, *failed = found.lines
    assert table["value"] == [["name"], ["first"], ["last"]]
    assert [(line["what"], line["passed"]) for line in failed] == [("raises", False), ("dies", False)]
    monkeypatch.setattr(rows, "run_command", None)  # nothing is left to do
    rows.measure_rows(found, __name__, ["first", "raises", "dies", "last"], 60)
    assert len(found.lines) == 3
    assert failed[0]["value"] == "ValueError: what it said" and "status 7" in failed[1]["value"]


def test_the_time_of_a_launch_is_not_that_of_its_kernel(monkeypatch):
    """The GPU is asleep, with cold caches, when its clock starts."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            order.append("event")

        def elapsed_time(self, stop):
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    cache = torch.ones(4)
    stop = machine.clock(lambda: order.append(f"call, cache {cache.sum():g}"), cache)
    assert order == ["sleep", "event", "call, cache 0", "event"] and stop() == 3e-3


def test_figures_of_kernels():
    assert profiles.kernel_rows(KERNELS) == [("gemm", "2", "0.08", "88.9%"), ("norm|x", "1", "0.01", "11.1%")]
    spans = [("step 4", "step", 0, 110), ("forward", "phase", 10, 40), ("backward", "phase", 50, 60)]
    spans = [{"name": name, "cat": kind, "ts": start, "dur": length} for name, kind, start, length in spans]
    rows, ratio = profiles.compare_clocks(spans, KERNELS)
    assert rows == [("forward", "0.04", "0.04", "1.000"), ("backward", "0.06", "0.05", "0.833")] and ratio == 1.1
    nccl = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 1080, "dur": 80}  # 20 of it beside the last
    assert node.communication([*KERNELS, nccl]) == ["0.08", "25%", "0.06", "0.01"]


def test_one_part_after_the_other(tmp_path, monkeypatch, capsys):
    """One passes, one fails, one is cut off: all are in the report, with what they had found. Only the last goes on."""
    ends = {"nccl": 0, "tracer": 1, "starts": CommandTimeout("after 300 s: it is slow")}
    started = []

    def run(arguments, timeout):
        name = arguments[arguments.index("--only") + 1]
        part = Findings(tmp_path / name, torch.device("cpu"), True)
        started.append((name, part.file.exists()))
        part.check(f"first of {name}", True, 7)
        part.note(f"table of {name}", [("a", "b"), ("x|y", "2")])
        if isinstance(ends[name], Exception):
            raise ends[name]
        return subprocess.CompletedProcess(arguments, ends[name], "out", f"Traceback of {name}")

    monkeypatch.setattr(command, "run_command", run)
    check = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--only"]
    assert command.main([*check, *ends]) == 1
    report = (tmp_path / "gpu.md").read_text()
    statuses = re.findall(r"\| (\w+) \| (\S+) \| \d+ \|", report)
    assert dict(statuses) == {"nccl": "passed", "tracer": "failed", "starts": "unfinished"}
    assert all(f"- passed: first of {name}: 7\n" in report for name in ends) and "| x/y | 2 |" in report
    assert "Traceback of tracer" in report and "it is slow" in report and "Traceback of nccl" not in report

    started.clear()
    ends["starts"] = 0
    assert command.main([*check, *ends]) == 1 and started == [("starts", True)]
    assert command.main([*check, "starts"]) == 0 and len(started) == 1
    assert "| tracer | failed |" in (tmp_path / "gpu.md").read_text(), "the report has all parts"
    assert command.main([*check, "nccl", "--again"]) == 0 and started[1:] == [("nccl", False)]
    assert command.main([*check, "nccl", "--rows=x"]) == 0 and started[2:] == [("nccl", False)]
    if not torch.cuda.is_available():
        capsys.readouterr()
        assert command.main([]) == 0 and capsys.readouterr().out.count("\n") == 1
    assert max(command.PARTS.values()) < 9 * 60, "so that each fits into a command of ten minutes"
