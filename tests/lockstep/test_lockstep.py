"""Lockstep finds no difference where there is none, and names known-wrong variants at their place."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from common.errors import UsageError
from common.launching.command_line import parse
from common.lockstep import __main__ as command
from common.lockstep.explain import explain
from common.lockstep.notes import Note, Seen
from common.lockstep.observe import prepare
from tests.harness.ranks import run_command, run_script
from tests.lockstep.__main__ import PAGE, page
from tests.lockstep.mutants import MUTANTS, PLACE_OF, near, rows
from tests.lockstep.runs import Case, compare
from tests.mechanisms.step08.kernels.compare import needs_triton
from tests.parity.cases import ALL, hard_cases

ALWAYS = (
    "embedding mask off by one",
    "norm gradients not summed",
    "positions not permuted",
    "sent back in another order",
)
FLAGS = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 24 --data synthetic --global-batch 4"
FLAGS += " --device cpu --no-tie-embeddings"
STEP_1, STEP_4 = f"step01_single_gpu/train.py {FLAGS}", f"step04_tensor_parallel/train.py {FLAGS} --tp 2"


def test_mutants_are_named_at_their_place():
    """The rows of `mutants.md`; the others with TEST_ALL=1."""
    found, written = rows(ALWAYS), PAGE.read_text(encoding="utf-8")
    assert near(found) == len(ALWAYS), found
    for name, (what, on, kind, *_) in found.items():
        assert f"| {name} | {PLACE_OF[name]} | {what} | {on} | {kind} |" in written


def test_the_table_has_all_that_change_numbers():
    written = PAGE.read_text(encoding="utf-8")
    assert PLACE_OF.keys() == MUTANTS.keys(), "say in PLACES where a new one is, and call python -m tests.lockstep"
    assert all(f"\n| {name} |" in written for name in MUTANTS)


@pytest.mark.skipif(not ALL, reason="all mutants: with TEST_ALL=1")
@needs_triton
def test_the_whole_table():
    assert near(rows()) >= 0.8 * len(MUTANTS)
    assert page() == PAGE.read_text(encoding="utf-8")


HARD = [(step, ranks) for step in range(2, 8) for ranks in hard_cases(step) if ranks] if ALL else []


@pytest.mark.skipif(not ALL, reason="all hard layouts: with TEST_ALL=1")
@pytest.mark.parametrize("step, ranks", HARD)
def test_sound_runs_are_alike(step, ranks):
    every = hard_cases(step)[ranks]
    for flags, (difference, said) in zip(every, compare(ranks, [Case(step, flags) for flags in every]), strict=True):
        assert difference is None, f"{flags}: {said}"


# ---- the command -----------------------------------------------------------------------------------------------------


def observe_forked(kind: str, launcher: list[str], script: list[str], folder: str, steps: int) -> list:
    """`observe`, but on forked processes: torchrun takes seconds."""
    ranks = int(launcher[-1]) if "--nproc_per_node" in launcher else 1
    command = "common/lockstep/rank.py", folder, kind, steps
    done = run_script(*command, *script, ranks=ranks, module="common.lockstep.observe")
    assert done.returncode == 0, done.stderr
    return [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob(f"*.{kind}"))]


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(command, "observe", observe_forked)
    candidate = f"torchrun --nproc_per_node 2 {STEP_4}"
    assert command.main(["--reference", STEP_1, "--candidate", candidate]) == 0
    assert "no difference: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "candidate, message",
    [
        (f"{STEP_4} --seed 7", "--seed is 0 in the reference and 7 in the candidate"),
        (f"{STEP_4} --tpp 2", "--tpp is not a flag of step04_tensor_parallel"),
        (f"{STEP_4} --pp 2", "--pp is not a flag of step04_tensor_parallel; step05_pipeline introduces it"),
        (f"nothing-like-it {STEP_4}", "--candidate: there is no program 'nothing-like-it'"),
        (f"torchrun '{STEP_4}", "No closing quotation"),
    ],
)
def test_what_has_no_common_step_is_one_line(candidate, message, capsys):
    assert command.main(["--reference", STEP_1, "--candidate", candidate]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_no_step_at_all(capsys):
    assert command.main(["--reference", STEP_1, "--candidate", STEP_4, "--steps", "0"]) == 2
    assert "--steps 0 must be at least 1" in capsys.readouterr().err


def test_nothing_in_common_is_no_agreement():
    with pytest.raises(UsageError, match="no tensor of the reference"):
        explain(Seen(), [Seen()])
    weights = [Note(0, "weight", name, (np.arange(2),), np.ones(2)) for name in ("head.weight", "module.head.weight")]
    with pytest.raises(UsageError, match="The first names are head.weight and module.head.weight$"):
        explain(*(Seen(notes=[each]) if each is weights[0] else [Seen(notes=[each])] for each in weights))


@pytest.mark.parametrize("flags", ["--fp8 tile", "--resume auto --run-dir runs/x"])
def test_what_cannot_be_in_lockstep(flags):
    with pytest.raises(UsageError, match=flags.partition(" ")[0]):
        prepare(parse(8, flags.split()), 2)


def test_other_scripts_are_refused():
    with pytest.raises(UsageError, match="your_own_model.md"):
        command.divide("candidate", "torchrun mine.py")


@pytest.mark.skipif(not ALL, reason="starts torchrun: with TEST_ALL=1")
def test_the_command_with_torchrun():
    args = "--reference", STEP_1, "--candidate", f"torchrun --nproc_per_node 2 {STEP_4}"
    done = run_command([command.sys.executable, "-m", "common.lockstep", *args], timeout=300)
    assert done.returncode == 0 and "no difference: " in done.stdout, done.stderr
