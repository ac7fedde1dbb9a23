"""What `grade` has found of a class is kept as it was, also if grading ends early, or a submission would change it."""

import csv
from pathlib import Path

import pytest

from common.labs import checkout, grade, grades, rows
from common.labs.checkout import OURS, Checked, Limits, Stopped, check_in_copy, packed
from common.labs.submit import printable
from tests.labs.test_course import ABOUT, TABLE, archive


def hand_in(folder: Path):
    """Two submissions, and the call that grades them."""
    (folder / "inbox").mkdir()
    for number in (7, 8):
        about = ABOUT.replace('"student": 7, "name": "A"', f'"student": {number}, "name": "A\\u001b[31m"')
        files = {"submission.json": about, f"{TABLE.id}/schedule.csv": f"F{number}"}
        archive(folder / "inbox" / f"{number}.zip", **files)
    return lambda *words: grade.main([str(folder / "inbox"), "--out", str(folder / "out"), *words])


def table(folder: Path) -> dict[str, dict]:
    with (folder / "out/grades.csv").open(encoding="utf-8-sig", newline="") as file:
        return {row["number"]: row for row in csv.DictReader(file)}


def check_by(check, monkeypatch) -> None:
    """Let `grade` ask this function in the place of checks in copies of a checkout."""
    monkeypatch.setattr(grade, "check_in_copy", check)
    for name in ("clean_checkout", "try_out", "keep_to_itself"):
        monkeypatch.setattr(grade, name, lambda *_: None)
    monkeypatch.setattr(OURS, "begin", lambda: None)
    monkeypatch.setattr(grade.signal, "signal", lambda *_: None)


def test_a_class_that_is_interrupted(tmp_path, monkeypatch, capsys):
    """What was found before is in the table, and `--resume` checks the others alone."""
    checked, run = [], hand_in(tmp_path)

    def check(pristine, asked, limits):
        checked.append(asked[0]["student"])
        if len(checked) == 2:
            OURS.stopped.set()
            raise Stopped
        return [Checked(TABLE.id, 0.5, ["ok: your file starts a process (os.fork), which it need not."])], []

    check_by(check, monkeypatch)
    assert run() == 143 and "--resume" in capsys.readouterr().err
    rows = table(tmp_path)
    assert (rows["7"]["total"], rows["8"]["total"]) == ("0.500", "") and rows["8"]["notes"].startswith("not checked")
    assert not (tmp_path / "out/results/8.json").exists() and rows["8"][TABLE.id] == ""
    assert "8: not checked" in (tmp_path / "out/marker.html").read_text().replace("A[31m", "").replace(" :", ":")
    assert "REFUSED" in rows["7"]["notes"] and rows["7"]["name"] == "A[31m"
    assert run("--resume") == 0 and checked == [7, 8, 8]
    assert table(tmp_path)["8"]["total"] == "0.500" and "REFUSED" in table(tmp_path)["7"]["notes"]
    assert run() == 0 and checked == [7, 8, 8, 7, 8]


def test_rows_of_others_cannot_be_changed(tmp_path, monkeypatch):
    """Number 8 gives 7 a full score, and plants what it would like to be found of itself."""
    run, rows = hand_in(tmp_path), tmp_path / "out/rows"

    def check(pristine, asked, limits):
        for path in rows.glob("7-*.json"):
            path.write_text(path.read_text().replace('"score": 0.5', '"score": 1.0'))
            (rows / "8-0123456789abcdef.json").write_text("{}")
        return [Checked(TABLE.id, 0.5)], []

    check_by(check, monkeypatch)
    for words in ((), ("--resume",)):
        assert run(*words) == 0
        found = table(tmp_path)
        assert [found[number]["total"] for number in "78"] == ["0.500", "0.500"]
        assert "CHANGED" in found["8"]["notes"] and not found["7"]["notes"].startswith("what")
    assert len(list(rows.iterdir())) == 2


def test_nothing_is_begun_once_grading_is_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(checkout.Checkout, "write", lambda *_: pytest.fail("a copy was unpacked"))
    OURS.stopped.set()
    try:
        with pytest.raises(Stopped):
            check_in_copy(checkout.Checkout(b"", {}), [{"id": "a", "student": 1, "files": {}}], Limits())
    finally:
        OURS.stopped.clear()


def test_a_copy_is_looked_at_after_every_lab(tmp_path, monkeypatch):
    """Whoever changes it in one lab, and changes it back in the next, is found out after the first."""
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "a.py").write_text("x = 1")

    def run(copy, scratch, labs, limits, before):
        (copy / "a.py").write_text("x = 2")
        changed = checkout.changes(copy, before)
        (copy / "a.py").write_text("x = 1")
        return [Checked(labs[0]["id"], 1.0, changed=changed)]

    monkeypatch.setattr(checkout, "_run", run)
    asked = [{"id": id, "student": 1, "files": {}} for id in "ab"]
    results, changed = check_in_copy(packed(tmp_path / "clean"), asked, Limits())
    assert changed == ["a.py"] and [each.fault[:11] for each in results] == ["", "not checked"]


def test_a_note_says_why_there_is_nothing(tmp_path, monkeypatch):
    """Of what hangs or is not there yet, in the table and on the marker's page; not of what is wrong, or unsure."""
    run, said = hand_in(tmp_path), "With 1 rank: it does not end. rank 0 is at line 9: `while True:`."
    archive(tmp_path / "inbox/9.zip", **{"submission.json": ABOUT.replace('"student": 7', '"student": 9')})
    (tmp_path / "class.csv").write_text("number,name\n7,A\n8,A\n9,A\n10,A\n")
    hangs, unsure = Checked(TABLE.id, 0.0, [said, "x"], unjudged=True), Checked(TABLE.id, 0.0, [said], "", True, True)
    for found, note in ((hangs, f"{TABLE.id}: {said}"), (Checked(TABLE.id, 0.0, [said]), ""), (unsure, "too busy")):
        check_by(lambda _, asked, limits, found=found: ([found] if asked else [], []), monkeypatch)
        assert run("--roster", str(tmp_path / "class.csv")) == 0
        notes = {number: row["notes"] for number, row in table(tmp_path).items()}
        assert note in notes["7"] and (said in notes["7"]) == (found is hangs)
    page = (tmp_path / "out/marker.html").read_text().partition("</table>")[0]
    for number, note in (("9", rows.EMPTY), ("10", rows.NOTHING)):
        assert notes[number].startswith(note) and page.count(note) == 1
    assert rows.EMPTY in (tmp_path / "out/results/9.json").read_text()


def test_names_do_not_command_a_terminal():
    assert printable("A\x1b[2J\x07\u202eß") == "A[2Jß" and grades.harmless("a\x1b") == "a"
