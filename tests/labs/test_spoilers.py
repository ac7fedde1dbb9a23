"""Nothing that a student is handed shows what another lab asks for."""

import os
import re
import sys
from pathlib import Path

import pytest

from common.labs.copies import HIDDEN, copy_project, shown
from common.labs.cut import bodies_of
from common.labs.find import ROOT, all_labs
from common.labs.hunt import Hunt
from common.labs.write import Writing
from tests.harness.ranks import run_command

LABS = all_labs()
FEW = 0.5  # of a body's lines that may stand elsewhere: short ones do by chance


def lines_of(text: str) -> list[str]:
    """Without comments, blanks and what hardly says anything."""
    found = (re.sub(r"\s+#.*|^#.*", "", line.strip()) for line in text.splitlines())
    return [line for line in found if len(line) > 20]


BODIES = {id: "\n".join(lab.solution(1).split(lab.moral)[:1]) for id, lab in LABS.items() if isinstance(lab, Writing)}


def spoiled(text: str, but: str = "") -> dict[str, float]:
    """The labs of whose bodies this text shows too much, and how much."""
    there, found = set(lines_of(text)), {}
    for id, body in BODIES.items():
        share = sum(line in there for line in lines_of(body)) / len(lines_of(body))
        if id != but and share > FEW:
            found[id] = share
    return found


def test_it_finds_what_it_looks_for():
    for id, lab in LABS.items():
        if isinstance(lab, Writing):
            assert id in spoiled((ROOT / lab.source).read_text()), id


@pytest.mark.parametrize("id", LABS)
def test_what_a_student_is_handed(id, tmp_path, monkeypatch):
    lab = LABS[id]
    if isinstance(lab, Hunt):
        monkeypatch.setattr("common.labs.hunt.copy_project", lambda *_: None)
    for student in range(2):
        lab.start(tmp_path, student)
        text = "\n".join(file.read_text() for file in tmp_path.rglob("*") if file.suffix in (".py", ".txt", ".sh"))
        assert not spoiled(text) and not spoiled(lab.task), id


def test_hunts(tmp_path):
    """The copy of the last step, which has all files of the others, and each file that a bug changes."""
    copy_project(tmp_path, 8)
    for file in tmp_path.rglob("*.py"):
        path = file.relative_to(tmp_path).as_posix()
        text = file.read_text()
        assert "write this yourself" not in text and not spoiled(text), path
        if path != HIDDEN:
            assert text.count("\n") == (ROOT / path).read_text().count("\n"), f"{path}: other line numbers"
    for lab in LABS.values():
        for bug in getattr(lab, "bugs", ()):
            for edit in bug.edits:
                assert edit.new in shown(edit.file, bug.beside + bug.edits), (
                    f"{lab.id}: its bug is in what a lab asks for"
                )


CODE = """
import torch
from step01_single_gpu.recompute import recompute
from step05_pipeline.schedules.catalogue import build_schedule
x = torch.ones(3, requires_grad=True)
recompute(lambda a, x: a * x.tanh(), 2.0, x).sum().backward()
print(x.grad.allclose(2 * (1 - torch.ones(3).tanh() ** 2)), len(build_schedule("1f1b", 3, 4).actions))
"""


@pytest.mark.skipif(not os.environ.get("TEST_ALL"), reason="TEST_ALL: the hunt that is tried by default runs it, too")
def test_what_is_out_of_sight_runs(tmp_path):
    copy_project(tmp_path, 5)
    done = run_command([sys.executable, "-c", CODE], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, timeout=60)
    assert done.stdout == "True 3\n", done


def test_a_body_that_is_not_all_of_its_function(tmp_path):
    from common.labs.cut import unseen

    text = "def f(x):\n    # --- write this yourself ---\n    y = x\n    # --- until here ---\n    return y\n"
    with pytest.raises(ValueError, match=r"a\.py: f does not end with its marked body"):
        unseen(text, "a.py")
    assert bodies_of(text) == ["y = x\n"] and Path(HIDDEN).name == "out_of_sight.py"
