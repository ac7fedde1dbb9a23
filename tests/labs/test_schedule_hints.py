"""A schedule lab's hints and its feedback, taken literally, lead to a table that passes: in each variant."""

import re

import pytest

from step05_pipeline.labs import tables
from step05_pipeline.labs.schedule_tables import LABS
from step05_pipeline.schedules.catalogue import build_schedule

WHOLE, SPLIT = LABS
TRIES = 30  # checks that a student makes
READY = r"rank (\d) waits for (\w+) until \S+, and (\w+) could run"
BEHIND = r"because rank (\d) does (W\d+) before (\w+), and nobody waits"


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr(tables, "draw", lambda panels, path, unit: path)


def taking_turns(case: tables.Case) -> list[list[str]]:
    """The last hint of 05-a, without its last sentence."""
    table = []
    for rank in range(case.pp):
        ahead = min(case.pp - rank, case.unfinished)
        pairs = [f"B{n},F{n + ahead}" for n in range(case.micro_batches - ahead)]
        rest = (f"B{n}" for n in range(case.micro_batches - ahead, case.micro_batches))
        table.append(",".join([*(f"F{n}" for n in range(ahead)), *pairs, *rest]).split(","))
    return table


def in_halves(case: tables.Case) -> list[list[str]]:
    """The first hint of 05-b."""
    rows = build_schedule("1f1b", case.pp, case.micro_batches).actions
    halves = [
        [str(each).replace("B", "I") + f",W{each.micro_batch}" * (each.kind == "B") for each in row] for row in rows
    ]
    return [",".join(row).split(",") for row in halves]


def put_off(case: tables.Case) -> list[list[str]]:
    """The last hint of 05-b."""
    table = []
    for row in in_halves(case):
        done, waiting, held = [], [], 0
        order = [cell for cell in row if cell[0] != "W"]
        for place, cell in enumerate(order):
            if cell[0] == "F":
                if held == case.unfinished:
                    done.append(waiting.pop(0))
                    held -= 1
                done.append(cell)
                held += 1
            else:
                done.append(cell)
                waiting.append(f"W{cell[1:]}")
                if not any(later[0] == "F" for later in order[place:]):
                    done.append(waiting.pop(0))
        table.append(done + waiting)
    return table


def follow(lab: tables.Tables, student: int, table: list[list[str]], folder) -> tuple[int, tables.Verdict]:
    """Check, and do what the line about waits says, until it passes. Returns how often, and the last verdict."""
    number = 0
    while number < TRIES:
        number += 1
        (folder / "schedule.csv").write_text("\n".join(map(",".join, table)) + "\n")
        verdict = lab.check(folder, student)
        said = "\n".join(verdict.feedback)
        match = re.search(READY, said) or re.search(BEHIND, said)
        if verdict.passed or not match:
            break
        row = table[int(match[1])]
        moved, place = (match[3], match[2]) if match.re.pattern == READY else (match[2], match[3])
        row.remove(moved)
        row.insert(row.index(place) + (match.re.pattern == BEHIND), moved)
    return number, verdict


@pytest.mark.parametrize("student", range(len(WHOLE.cases)))
def test_taking_turns(student, tmp_path):
    """It passes at once if memory suffices; else the hint's last sentence is what the feedback says, step by step."""
    case = WHOLE.case(student)
    number, verdict = follow(WHOLE, student, taking_turns(case), tmp_path)
    assert verdict.passed and (number == 1) == (case.unfinished >= case.pp)


@pytest.mark.parametrize("student", range(len(SPLIT.cases)))
def test_putting_off(student, tmp_path):
    number, verdict = follow(SPLIT, student, in_halves(SPLIT.case(student)), tmp_path)
    assert verdict.passed and number > 1, "from 1F1B with halves on, by what the feedback says"
    number, verdict = follow(SPLIT, student, put_off(SPLIT.case(student)), tmp_path)
    assert verdict.passed and number == 1


def test_a_verdict_without_a_picture(tmp_path, monkeypatch):
    """A full disk, a read-only folder; and a picture of another table does not stay."""

    def fail(*_):
        raise tables.UsageError("schedule.png cannot be written")

    (tmp_path / "schedule.png").touch()
    (tmp_path / "schedule.csv").write_text("F0,B0\n" * WHOLE.case(0).pp)
    assert WHOLE.check(tmp_path, 0).score == 0 and not (tmp_path / "schedule.png").exists()
    monkeypatch.setattr(tables, "draw", fail)
    WHOLE.write_best(tmp_path, 0)
    found = WHOLE.check(tmp_path, 0)
    assert found.passed and found.feedback[-1] == "not drawn: schedule.png cannot be written"
