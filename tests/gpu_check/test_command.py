"""The command `python -m tests.gpu_check`: its parts, and where their ranks are placed."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common.layers import rotate
from common.model import silu_and_multiply
from step08_5d.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from tests.gpu_check import __main__ as command
from tests.gpu_check import launching, test_node, test_training
from tests.gpu_check.findings import Findings
from tests.gpu_check.rivals import rivals
from tests.harness.observing import configure
from tests.harness.ranks import ROOT, CommandTimeout, run_script
from tests.mechanisms.step08.kernels.case import Maker
from tests.mechanisms.step08.kernels.cases import KERNELS
from tests.mechanisms.step08.kernels.compare import assert_same, needs_triton


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_a_node_trains_can_be_divided(ranks):
    for shape, division, _ in test_node.CASES.values():
        flags = f"{test_node.SHAPES[shape]} {division.format(ranks) if ranks > 1 else ''} --device cpu"
        config = configure(8, flags, ranks)
        bubble = (ranks - 1) / 32 if "--pp" in flags else 0.0  # of 32 micro-batches
        assert test_node.predicted(8.0, ranks, vars(config)) == pytest.approx(8.0 / ranks * (1 + bubble))


def test_which_gpu_a_rank_gets(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    own, shared = ([launching.placement(rank, ranks, False) for rank in (0, 1)] for ranks in (2, 3))
    assert own == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}]
    assert shared == [{"CUDA_VISIBLE_DEVICES": "4", "NCCL_HOSTID": f"host-{rank}"} for rank in (0, 1)]
    assert launching.placement(0, 2, True) == {"CUDA_VISIBLE_DEVICES": "4"}


def test_ranks_that_differ_or_cannot_meet(tmp_path, monkeypatch):
    """A layout that gives another curve is named; and where no two ranks can meet, the part ends at once."""
    found, run_on_ranks = Findings(tmp_path / "part", torch.device("cpu"), True), launching.run_on_ranks

    def wrong(found, *arguments):
        run_on_ranks(found, *arguments)
        curve = found.folder / "2 ranks, step 3, 0" / "metrics.jsonl"
        curve.write_text(re.sub(r'("loss": \d\.\d{8})\d', r"\g<1>", curve.read_text()))

    monkeypatch.setattr(test_training, "run_on_ranks", wrong)
    with pytest.raises(AssertionError, match="--zero 1 --recompute full"):
        test_training.check_layouts(found, "nccl", "2 ranks, step 3", "gloo")
    monkeypatch.setattr(launching.Agents, "statuses", lambda *_: [None, 1])
    with pytest.raises(pytest.exit.Exception, match="cannot talk to each other"):
        launching.need_ranks(Findings(tmp_path / "part", torch.device("cuda"), True))


TESTS = """
import os, pathlib, time
from tests.gpu_check.findings import on_devices
@on_devices([], quick=["passes", "raises", "dies", "waits"])
def test_played(found, item):
    found.row("table", ["name"], [item])
    if item == "raises":
        raise ValueError("what it said")
    if item == "dies":
        os._exit(7)
    while item == "waits" and pathlib.Path(__file__).with_name("slow").exists():
        time.sleep(0.1)
"""


def test_one_process_after_the_other(tmp_path, monkeypatch, capsys):
    """A test that fails ends its process, and the rest goes on; what takes too long goes on in the next command."""
    (tmp_path / "test_part.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.gpu_check.conftest import *")
    (tmp_path / "slow").touch()
    processes, report = [], tmp_path / "out/cpu-quick/gpu.md"

    def run(arguments, timeout):
        processes.append(arguments)
        try:
            return run_script(*arguments[1:], timeout=10 if len(processes) == 3 else 60)
        except CommandTimeout:
            (tmp_path / "slow").unlink()
            raise

    monkeypatch.setattr(command, "run_command", run)
    monkeypatch.setattr(command, "PARTS", {"played": (99, tmp_path / "test_part.py"), "other": (9, "absent.py")})
    check = ["--device", "cpu", "--quick", "--out", str(tmp_path / "out"), "--only"]
    assert command.main([*check, "played"]) == 1
    assert len(processes) == 3 and "## played: unfinished," in report.read_text()
    assert command.main([*check, "played", "other"]) == 1 and len(processes) == 5
    text = report.read_text()
    assert "## played: failed," in text and "## other: failed," in text
    assert "| name |\n| --- |\n| passes |\n| raises |\n| dies |\n| waits |" in text
    assert "passed: test_played[cpu-passes]" in text and "passed: test_played[cpu-waits]" in text
    assert "failed**: test_played[cpu-raises]: what it said" in text
    assert "failed**: test_played[cpu-dies]: its process ended with status 7" in text
    assert command.main([*check, "played"]) == 1 and len(processes) == 5, "it is kept"
    assert command.main([*check, "other", "--again"]) == 1 and len(processes) == 6
    if not torch.cuda.is_available():
        capsys.readouterr()
        assert command.main([]) == 0 and capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    "page, title", [("step08_5d", "## On a GPU"), ("step08_5d/narrow_numbers", "## On an H100")], ids=str
)
def test_pages_show_what_a_gpu_has_shown(page, title):
    """Each model's row is one of the results, with its milliseconds rounded."""
    results = (ROOT / "tests/gpu_check/results/h100.md").read_text()
    section = (ROOT / page / "measurements.md").read_text().split(title)[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| .*\d \|$", line)]
    found = [line.strip("| ").split(" | ") for line in results.splitlines() if re.match(r"\| \d x ", line)]
    known = [[f"{float(ms):,.0f}", *numbers, gib] for _, _, ms, *numbers, gib in found if "%" in numbers[1]]
    assert len(rows) >= 3
    for _, *cells in rows:
        assert any({cell.replace(" %", "%") for cell in cells} <= set(each) for each in known), cells


def test_parts_exist():
    """Each fits into a command of ten minutes, and names tests."""
    tests = [f"tests/gpu_check/{test}" for limit, *part in command.PARTS.values() for test in part]
    assert max(limit for limit, *_ in command.PARTS.values()) < 9 * 60
    done = run_script("-m", "pytest", "--collect-only", "-q", *tests)
    assert done.returncode == 0 and all(test in done.stdout for test in tests), done.stdout


LIGER = SimpleNamespace(  # which need not be installed: the formulas under its names, with its arguments
    liger_rms_norm=lambda x, weight, eps, in_place: rms_norm_reference(x, weight, eps),
    liger_fused_add_rms_norm=lambda x, residual, weight, eps, in_place: add_rms_norm_reference(
        x, residual, weight, eps
    ),
    liger_swiglu=silu_and_multiply,
    liger_rope=lambda q, k, cos, sin: rotate(q, k, cos[0], sin[0]),
    liger_cross_entropy=lambda logits, targets, reduction: F.cross_entropy(logits, targets, reduction=reduction),
    liger_fused_linear_cross_entropy=lambda x, weight, targets, reduction: F.cross_entropy(
        F.linear(x, weight), targets, reduction=reduction
    ),
)


RIVALS = {
    "rms_norm": {"Liger", "PyTorch"},
    **dict.fromkeys(("add_rms_norm", "rotary", "swiglu", "cross_entropy", "linear_cross_entropy"), {"Liger"}),
    **{name: {"PyTorch"} for name in KERNELS if name.startswith("attention") or name == "adamw"},
    **dict.fromkeys(("grouped_matmul", "grouped_matmul of gradients"), {"PyTorch"}),
}


@needs_triton
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.timed])
def test_rivals_compute_the_same(name, monkeypatch):
    """Their times can be compared."""
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", LIGER)
    case = KERNELS[name].case(Maker(torch.float64, torch.device("cpu")), *KERNELS[name].sizes[0])
    found = rivals(name, case)
    assert found.keys() == RIVALS.get(name, set())
    if name == "adamw":
        found["PyTorch"](*case.inputs, *case.settings)
    elif not name.startswith("grouped"):  # which PyTorch multiplies in bfloat16 only
        for function in found.values():
            assert_same(case, function)
