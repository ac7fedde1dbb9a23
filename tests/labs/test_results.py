"""What `grade` hands out: a result for each upload, feedback without files that are gone, a page that shows repairs."""

import json
import zipfile

from common.labs import __main__ as command
from common.labs import checkout, grade, marker, recheck, rows, submit
from common.labs.checkout import Checked
from common.labs.design import BOARD
from common.labs.find import ROOT, lab
from tests.labs.test_course import TABLE, TYPES, student


def test_the_result_of_one_student(tmp_path, monkeypatch):
    """Gradescope wants a file in any case: also of what is no submission, or of nothing."""
    monkeypatch.setattr(checkout, "_run", lambda copy, scratch, labs, *_: [Checked(labs[0]["id"], score=1.0)])
    monkeypatch.setattr(checkout.OURS, "begin", lambda: None)
    (tmp_path / "nothing").mkdir()
    monkeypatch.setattr(grade, "clean_checkout", lambda: checkout.packed(tmp_path / "nothing"))
    monkeypatch.setattr(grade, "try_out", lambda *_: None)
    labs = ["--labs", f"{TABLE.id},{TYPES.id}", "--out", str(tmp_path / "out")]

    def result(folder):
        path = tmp_path / "results" / "results.json"
        assert command.main(["grade", str(folder), *labs, "--gradescope", str(path)]) == 0
        found = json.loads(path.read_text())
        path.unlink()
        return found["score"], found["output"], len(found["tests"])

    assert result(tmp_path / "nothing") == (0, "there is no file that `submit` has made", 0)
    upload = tmp_path / "upload"
    upload.mkdir()
    (upload / "essay.zip").write_bytes(b"PK\x03\x04 cut off")
    score, output, tests = result(upload)
    assert (score, tests) == (0, 0) and output.startswith("essay.zip: it is no ZIP archive")
    home = student(tmp_path, 7, TABLE.id)
    (home / TABLE.id / "schedule.csv").write_text("F0,B0\n")
    assert command.main(["submit", "--home", str(home)]) == 0
    zipfile.ZipFile(home / "submission-7.zip").extractall(tmp_path / "unpacked")
    assert result(tmp_path / "unpacked") == (1, "", 2), "the lab that is missing counts as well"


def test_what_a_busy_machine_cut_off_is_checked_again(tmp_path, monkeypatch, capsys):
    """It is no grade: the row says so, and `--resume` does not take it."""
    found = Checked(TABLE.id, feedback=["too busy to tell"], unsure=True)
    monkeypatch.setattr(grade, "check_in_copy", lambda *_: ([found], []))
    monkeypatch.setattr(checkout.OURS, "begin", lambda: None)
    (tmp_path / "class").mkdir()
    monkeypatch.setattr(grade, "clean_checkout", lambda: checkout.packed(tmp_path / "class"))
    monkeypatch.setattr(grade, "try_out", lambda *_: None)
    home = student(tmp_path, 7, TABLE.id)
    (home / TABLE.id / "schedule.csv").write_text("F0,B0\n")
    assert command.main(["submit", "--home", str(home)]) == 0
    (home / "submission-7.zip").rename(tmp_path / "class" / "submission-7.zip")
    words = ["grade", str(tmp_path / "class"), "--out", str(tmp_path / "out")]
    assert command.main(words) == 0
    assert "too busy to tell; `--resume` checks it once more" in (tmp_path / "out" / "grades.csv").read_text()
    found = Checked(TABLE.id, 1.0)
    for _ in range(2):
        assert command.main([*words, "--resume"]) == 0
        assert " 1.00  submission-7.zip" in capsys.readouterr().out
        found = Checked(TABLE.id, 0.5)  # by now, it is known


def test_characters_that_turn_lines_around_are_shown_by_their_numbers(tmp_path):
    """A reader of the page sees what Python reads, in the same order."""
    write = lab("write-03-a")
    write.start(tmp_path, 7)
    text = (tmp_path / "sketch.py").read_text() + "x = '\u202e\u2066<b>\u2028'\nname\u200b = 'é\t'\n"
    files, about = {"sketch.py": text.replace("\n", "\r\n").encode()}, {"labs": {}}
    row = rows.Row(rows.Student(7, "A\u202eb"), "a.zip", submit.Submission(tmp_path, about, {write.id: files}, ()))
    row.results[write.id] = Checked(write.id, 1.0, ["found \u2069"])
    page = marker.write_page([row], [write.id], tmp_path / "marker.html").read_text()
    assert all(each.isprintable() or each in "\n\t" for each in page)
    odd = [f"<span class=odd>\\{each}</span>" for each in ("u202e", "u2066", "u2028", "u200b", "u2069")]
    assert f"<ins>+x = &#x27;{odd[0]}{odd[1]}&lt;b&gt;{odd[2]}&#x27;</ins>\n<ins>+name{odd[3]} = &#x27;é\t" in page
    assert f"A{odd[0]}b" in page and f"found {odd[4]}" in page and "sketch.py has 4 characters" in page


def test_a_damaged_file_is_its_student_s(tmp_path):
    (tmp_path / "submission-8.zip").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "submission-9.zip").write_bytes(b"PK\x03\x04 cut off")
    first, other = rows.collect(tmp_path, {8: rows.Student(8, "Hal")}, None)
    assert (first.name, first.file) == ("Hal", "submission-8.zip") and "no ZIP archive" in first.notes[0]
    assert other.who is None and other.file == "submission-9.zip"


def test_feedback_names_no_file_that_is_gone(tmp_path):
    lines = ["It is wrong.", f"As a picture: {tmp_path}/check.png", "2 of 3", BOARD, "1. 3 tokens/s  student 7: dp 4"]
    assert recheck.to_keep(lines, tmp_path) == ["It is wrong.", "2 of 3"]


def test_the_page_shows_the_repair_of_a_hunt(tmp_path):
    hunt, file = lab("hunt-01-a"), "step01_single_gpu/mixed_precision.py"
    files = {file: (ROOT / file).read_bytes() + b"# repaired\n", "answer.toml": b'why = "it is so"\n'}
    about = {"student": 7, "labs": {hunt.id: {"student": 7}}}
    row = rows.Row(rows.Student(7, "Ada"), "a.zip", submit.Submission(tmp_path, about, {hunt.id: files}, ()))
    row.results[hunt.id] = Checked(hunt.id, 0.5)
    page = marker.write_page([row], [hunt.id], tmp_path / "marker.html").read_text()
    assert f"<details open><summary>{file}</summary>" in page and "+# repaired" in page
    assert "white-space: pre-wrap" in page and "CUT HERE" not in page
    files["answer.toml"] += b"#" * marker.LONGEST + b"hidden"
    page = marker.write_page([row], [hunt.id], tmp_path / "marker.html").read_text()
    assert "CUT HERE" in page and "hidden" not in page
