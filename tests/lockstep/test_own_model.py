"""In a model of somebody else's, lockstep says what the page shows: see common/your_own_model.md."""

import pytest

from tests.foreign.test_page import BEGINNING, PAGE, PROGRAMS
from tests.harness.ranks import run_script
from tests.parity.cases import ALL

PROGRAM = PROGRAMS[BEGINNING] + PROGRAMS["The first tensor that differs"]
POSITIONS = "at], position_ids=at[None])", "at])"
SUMS = "dist.all_reduce(share, group=group.handle)", "pass"


@pytest.mark.skipif(not ALL, reason="the page's program runs anyway: with TEST_ALL=1")
@pytest.mark.parametrize("old, new", [POSITIONS, SUMS], ids=["positions", "sums"])
def test_it_names_the_mistake(tmp_path, old, new):
    assert PROGRAM.count(old) == 1
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace(old, new), encoding="utf-8")
    done = run_script(path, ranks=2, module="tests.foreign.models")
    said = done.stdout.partition("\nloss ")[0]
    assert done.returncode == 0 and said.count("\n") == 4, done.stdout + done.stderr
    assert f"```\n{said}\n```" in PAGE.read_text(encoding="utf-8"), said
