"""What a hunt says of the place that a student names, with a repair and without one."""

import os

from common.labs.copies import read, shown
from common.labs.hunt import GUESSES, OUTSIDE, Hunt, _parts
from step03_zero.labs import hunt_shards
from tests.labs.test_hunts import LABS, answer, place, repair


def test_a_repair_without_a_sentence(tmp_path, monkeypatch):
    """Nothing was said of the place, so nothing is said of another one; an answer with a wrong name is told which."""
    lab, bug = LABS[1], LABS[1].bug(0)
    lab.start(tmp_path, 0)
    repair(tmp_path, bug)
    monkeypatch.setattr(Hunt, "_wrong_after_fix", lambda *_: None)
    file, line = place(lab, bug)
    answer(tmp_path, file, line, "avg")
    found = lab.check(tmp_path, 0)
    assert found.score == 0.5 and "it has 1" in found.feedback[0] and "elsewhere" not in str(found.feedback)
    answer(tmp_path, "common/model.py", line)
    found = lab.check(tmp_path, 0)
    assert found.score == 0.5 and "works, and is not in common/model.py" in found.feedback[0]
    (tmp_path / file).write_text(shown(file, bug.beside + bug.edits))
    with (tmp_path / "common/model.py").open("a") as model:
        model.write("# corrected here\n")
    found = lab.check(tmp_path, 0)
    assert found.score == 0.5 and "corrects in common/model.py what goes wrong before" in found.feedback[0]
    (tmp_path / "answer.toml").write_text(f'file = "{file}"\nlin = {line}\n')
    assert "`lin` is none of file, line and why." in lab.check(tmp_path, 0).feedback[0]


def test_a_missing_line_may_be_added_in_another_place(tmp_path, monkeypatch):
    """In hunt-03-a, whoever makes the specs of shards can say who owns them; where nothing was repaired is no place."""
    if not os.environ.get("TEST_ALL"):
        monkeypatch.setattr(Hunt, "_wrong_after_fix", lambda *_: None)
    (lab,), file = hunt_shards.LABS, "step03_zero/unit.py"
    lab.start(tmp_path, 1)
    text = read(tmp_path / file)
    line = 1 + text[: text.index("piece.spec = replace(")].count("\n")
    answer(tmp_path, file, line)
    found = lab.check(tmp_path, 1)
    assert found.score == 0 and f"the bug is not in {file}" in found.feedback[0]
    owned = "owner=parameter.spec.owner and self.replicas.rank == 0, flat_range="
    (tmp_path / file).write_text(text.replace("flat_range=(low", f"{owned}(low"))
    assert lab.check(tmp_path, 1).passed
    for other in ((file, line + 40), ("common/model.py", line)):
        answer(tmp_path, *other)
        found = lab.check(tmp_path, 1)
        assert found.score == 0.5 and f"it is in {file}: name the line" in found.feedback[0], other
    answer(tmp_path, *place(lab, lab.bug(1)))
    assert lab.check(tmp_path, 1).passed


def test_a_place_is_judged_by_how_near_it_is(tmp_path):
    """A wrong line of the right function is told apart from one of another; the question comes with the second."""
    (lab,), (file, line) = hunt_shards.LABS, place(hunt_shards.LABS[0], hunt_shards.LABS[0].bug(0))
    lab.start(tmp_path, 0)
    lines = read(tmp_path / file).splitlines()
    head = max(number for number in range(1, line) if "def complete" in lines[number - 1])
    told = {}
    for where in (head, head - 5, line + 3, 999, line - 2, line + 2):
        answer(tmp_path, file, where)
        told[where] = lab.check(tmp_path, 0)
    assert [found.score for found in told.values()] == [0.25] * 4 + [0.5] * 2
    assert f"but it has only {len(lines)} lines." in told[999].feedback[0]
    assert f"right, {file}, near line {line + 2}: it is line {line}." in told[line + 2].feedback[0]
    assert f"{file} is right, and so is `complete`, but not line {head}. (Wrong place 1" in told[head].feedback[0]
    assert f"but line {head - 5} is in another part. {lab.bug(0).ask}" in told[head - 5].feedback[0]


def test_a_line_missing_at_the_end_of_a_function_is_missing_in_it():
    """Or `line = 1` would be told that its part of the file is right."""
    for lab, bug in ((hunt, bug) for hunt in LABS for bug in hunt.bugs):
        for file, ranges in lab.places(bug).items():
            parts = _parts(bug.texts[file])
            assert all({parts(low), parts(high)} - {OUTSIDE} for low, high in ranges), (lab.id, file, ranges)


def test_who_tries_all_places_is_told_no_more(tmp_path, monkeypatch):
    """From then on a place counts with a repair that works; naming a wrong one once more is no further guess."""
    lab, bug = LABS[1], LABS[1].bug(0)
    assert GUESSES == 5 and "after five wrong ones" in " ".join(lab.task.split())
    lab.start(tmp_path, 0)
    file, line = place(lab, bug)
    for number in [*range(1, GUESSES + 1), 1, 2]:
        answer(tmp_path, "common/model.py", number)
        found = lab.check(tmp_path, 0)
        assert "the bug is not in common/model.py" in found.feedback[0], number
    assert f"(Wrong place {GUESSES} of {GUESSES}.)" in found.feedback[0]
    for guess in (("common/model.py", GUESSES + 1), (file, line + 40), (file, line)):
        answer(tmp_path, *guess)
        found = lab.check(tmp_path, 0)
        assert found.score == 0 and f"you have named {GUESSES} wrong ones" in found.feedback[0], guess
    repair(tmp_path, bug)
    monkeypatch.setattr(Hunt, "_wrong_after_fix", lambda *_: "the loss is wrong")
    assert lab.check(tmp_path, 0).score == 0
    monkeypatch.setattr(Hunt, "_wrong_after_fix", lambda *_: None)
    assert lab.check(tmp_path, 0).passed
