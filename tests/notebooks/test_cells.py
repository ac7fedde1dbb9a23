"""What a student's cells do: start a lab of any kind, fill it, check it; and what is wrong is one line."""

import io
import re
import sys
from pathlib import Path

import pytest

from common.errors import UsageError
from common.labs import __main__ as command
from common.labs import notebook
from common.labs.answers import filled, without_comments
from common.labs.cut import bodies_of
from common.labs.find import all_labs
from tests.notebooks.test_notebooks import LABS, sources


@pytest.fixture
def cells(tmp_path, monkeypatch, capsys):
    """Call a function of the notebook; returns what it printed. Commands run in this process."""
    monkeypatch.setattr(notebook, "home", tmp_path)
    monkeypatch.setattr(notebook, "_do", lambda words: command.main([*words, "--home", str(tmp_path)]) in (0, 1))

    def call(function, *words):
        function(*words)
        printed = capsys.readouterr()
        return printed.out + printed.err

    call.home = tmp_path
    return call


def fill(line: str, cell: str) -> None:
    notebook._fill_or_say_why_not(line, cell)


@pytest.mark.parametrize(
    "id", ["write-01-a", "predict-03-a", "hunt-02-a", "schedule-05-a", "design-08-b", "write-04-c"]
)
def test_start_shows_what_is_to_be_filled_in(cells, id):
    """All of each file, and cells for it, which can be run as they are."""
    printed = cells(notebook.start, id)
    folder = cells.home / id
    files = [*folder.glob("answer.toml"), *folder.glob("*.csv"), *(folder.glob("*.py") if id[0] == "w" else ())]
    assert files and all(f"\n{file.name}:\n\n{file.read_text()}" in printed for file in files)
    heads = re.findall(rf"^    %%fill {id}(.*)$", printed, re.MULTILINE)
    gaps = len(all_labs()[id].bodies) if id[0] == "w" else 0
    assert heads[:gaps] == ([f" {number}" for number in range(1, gaps + 1)] if gaps > 1 else [])
    assert [head.strip() for head in heads[gaps:] if "..." not in head] == [
        file.name for file in files if file.suffix != ".py"
    ]
    assert f'    check("{id}")' in printed and (f"!bash {folder}/run.sh" in printed) == (id[0] == "h")
    if (folder / "answer.toml").exists():
        before = (folder / "answer.toml").read_text()
        lines = printed.partition(f"    %%fill {id} answer.toml\n")[2].partition("\n\n")[0]
        assert "answer.toml now has:" in cells(fill, f"{id} answer.toml", lines)
        assert (folder / "answer.toml").read_text().split() == before.split()
    assert f"# {id}: " in cells(notebook.start, id), "a cell that is run twice"


def test_answers_are_set_and_questions_stay(cells):
    cells(notebook.start, "predict-03-a")
    path = cells.home / "predict-03-a" / "answer.toml"
    before = path.read_text()
    printed = cells(fill, "predict-03-a  answer.toml ", "stage_1 = 2 * 4  # bytes\nstag_2 = 3\n")
    assert "  stage_1 = 2 * 4\nLeft out: answer.toml has no line for stag_2. It asks for stage_1, stage_2," in printed
    assert path.read_text() == before.replace("stage_1 = \n", "stage_1 = 2 * 4  # bytes\n")
    assert "as it was" in cells(fill, "predict-03-a answer.toml", "# nothing\nstag_2 = 3")
    cells(fill, "predict-03-a answer.toml", "stage_3 = 9")
    cells(fill, "predict-03-a answer.toml", "stage_3 = 9")
    assert path.read_text().count("stage_3 = 9\n") == 1 and "stage_1 = 2 * 4" in path.read_text()


def test_a_table_is_replaced_and_its_limits_stay(cells):
    cells(notebook.start, "schedule-05-a")
    path = cells.home / "schedule-05-a" / "schedule.csv"
    limits = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for _ in range(2):
        cells(fill, "schedule-05-a schedule.csv", "F0,B0\nF0,B0\n")
        assert len(limits) >= 4 and path.read_text().splitlines() == [*limits, "F0,B0", "F0,B0"]


def test_a_file_of_a_hunt_is_replaced(cells):
    """Also by a cell that `%load` has made of it."""
    cells(notebook.start, "hunt-02-a")
    path = cells.home / "hunt-02-a" / "common" / "model.py"
    before = path.read_text()
    cells(fill, "hunt-02-a common/model.py", f"# %load runs/labs/hunt-02-a/common/model.py\n{before}")
    assert path.read_text() == before
    cells(fill, "hunt-02-a common/model.py", "x = 1\n")
    assert path.read_text() == "x = 1\n"


def test_a_gap_is_filled_with_or_without_its_marks(cells):
    cells(notebook.start, "write-03-a")
    path = cells.home / "write-03-a" / "sketch.py"
    marks = "    # --- write this yourself ---\n{}    # --- until here ---\n"
    for cell in (marks.format("    x = 1\n"), "x = 1", "\n\n    x = 1\n\n"):
        assert "is written" in cells(fill, "write-03-a", cell)
        assert bodies_of(path.read_text()) == ["x = 1\n"], cell
    for source in sources(LABS):
        head, _, body = source.partition("\n")
        if head == "%%fill write-03-a":
            assert "still to be written" in cells(fill, "write-03-a", body)


WRONG = {  # what somebody writes -> what the line says
    ("start", "wirte-03-a"): "error: there is no lab wirte-03-a; did you mean",
    ("check", "write-03-a"): "error: write-03-a has not been started",
    ("check",): "error: check needs the id of a lab, such as write-01-a",
    ("lab", "check"): "error: check needs the id of a lab, such as write-01-a",
    ("lab", "hint"): "error: hint needs the id",
    ("lab", "chekc"): "error: there is no command chekc; did you mean check?",
    ("lab", "submit"): "error: no lab has been started",
    ("fill", "wirte-03-a", "x"): "error: there is no lab wirte-03-a; did you mean",
    ("fill", "write-03-a", "x"): 'error: write-03-a has not been started: start("write-03-a")',
    ("fill", "", "x"): "error: of which lab? %%fill write-03-a",
    ("fill", "../write-01-a", "x"): "error: there is no lab ../write-01-a",
}
WRONG_LATER = {
    ("fill", "write-01-a 3", "x"): "error: write-01-a has no gap 3; it has 2",
    ("fill", "write-01-a 0", "x"): "error: write-01-a has no gap 0; it has 2",
    ("fill", "write-01-a two", "x"): "error: two must be the name of a file in the folder of write-01-a",
    ("fill", "write-01-a", " \n"): "error: the cell is empty",
    ("fill", "predict-03-a", "x = 1"): "error: predict-03-a has no gap 1; say which file the cell is",
    ("fill", "predict-03-a anwser.toml", "x = 1"): "error: anwser.toml must be the name of a file in the folder of "
    "predict-03-a, where it is not; did you mean answer.toml?",
    ("fill", "predict-03-a ../state.json", "x = 1"): "error: ../state.json must be the name of a file",
    ("fill", "predict-03-a /etc/hosts", "x = 1"): "error: /etc/hosts must be the name of a file",
    ("fill", "predict-03-a answer.toml", "stage_1: 3"): "error: line 1 of the cell: 'stage_1: 3' is not of the form",
    ("fill", "predict-03-a answer.toml", "stage_1 = 2 *\n  3"): "error: line 2 of the cell: '3' is not of the form",
    ("start", "write-03-a", "seven"): "error: a student's number is a whole number",
}


@pytest.mark.parametrize("call", [*WRONG, *WRONG_LATER], ids=" ".join)
def test_wrong_use_is_one_line(cells, call):
    if call in WRONG_LATER:
        cells(notebook.start, "write-01-a")
        cells(notebook.start, "predict-03-a")
    kept = {path: path.read_bytes() for path in cells.home.glob("*/*")}
    function = {"start": notebook.start, "check": notebook.check, "lab": notebook.lab, "fill": fill}[call[0]]
    printed = cells(function, *call[1:])
    assert printed.startswith((WRONG | WRONG_LATER)[call]) and printed.count("\n") == 1, printed
    assert kept == {path: path.read_bytes() for path in cells.home.glob("*/*")}


def test_a_check_without_a_name_is_of_the_lab_that_was_filled(cells):
    cells(notebook.start, "predict-03-a")
    cells(notebook.start, "schedule-05-a")
    assert "The table is still to be filled in" in cells(notebook.check)
    cells(fill, "predict-03-a answer.toml", 'stage_1 = ""')
    assert cells(notebook.check).startswith("predict-03-a: 0%")


def test_a_full_disk_leaves_the_answers(cells, monkeypatch):
    cells(notebook.start, "predict-03-a")
    path = cells.home / "predict-03-a" / "answer.toml"
    before = path.read_text()

    def write_text(self, *_, **__):
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", write_text)
    printed = cells(fill, "predict-03-a answer.toml", "stage_1 = 3")
    assert printed.startswith("error: ") and "No space left" in printed and printed.count("\n") == 1
    monkeypatch.undo()
    assert path.read_text() == before and not list(path.parent.glob("*.part"))


# ---- commands --------------------------------------------------------------------------------------------------------


class Printing:
    """A process that prints a text."""

    def __init__(self, text: str):
        self.stdout, self.returncode = io.StringIO(text), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_commands_are_said_as_a_cell_says_them(monkeypatch, capsys):
    text = (
        "  If you are stuck: python -m common.labs hint write-03-a\n(`python -m common.labs solution x-1 --give-up`)\n"
        "Then: python -m common.labs check\nNext: python -m common.labs start write-01-b\n"
        "`python -m common.labs` lists them\n"
        "`bash runs/labs/predict-05-a/commands.sh` runs it\nDraw: `python -m step05_pipeline.schedules --pp 2`\n"
        "    python -m step08_5d.planning plan\n"
    )
    monkeypatch.setattr(notebook.subprocess, "Popen", lambda *_, **__: Printing(text))
    notebook.lab("check", "write-03-a")
    assert capsys.readouterr().out == (
        '  If you are stuck: lab("hint", "write-03-a")\n(`lab("solution", "x-1", "--give-up")`)\n'
        'Then: check()\nNext: start("write-01-b")\n`lab()` lists them\n'
        "`!bash runs/labs/predict-05-a/commands.sh` runs it\nDraw: `!python -m step05_pipeline.schedules --pp 2`\n"
        "    !python -m step08_5d.planning plan\n"
    )
    notebook.lab("watch", "write-03-a")
    assert capsys.readouterr().out.startswith("watch is for a terminal.")


def test_new_pictures_are_shown_and_old_ones_are_not(tmp_path, monkeypatch):
    """Of a check, of whichever lab, and of the score board."""
    monkeypatch.setattr(notebook, "home", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old.png").touch()
    shown = []

    def run(*_, **__):
        (tmp_path / "a" / "check.png").touch()
        (tmp_path / "board.png").touch()
        return Printing("")

    monkeypatch.setattr(notebook, "_show", shown.extend)
    monkeypatch.setattr(notebook.subprocess, "Popen", run)
    notebook.lab("check")
    assert sorted(path.name for path in shown) == ["board.png", "check.png"]


STANDS_IN = f"""#!{sys.executable}
import os, signal, time

def end(*_):
    print("\\nended by Ctrl-C", flush=True)
    os._exit(130)

signal.signal(signal.SIGINT, end)  # a shell cannot: what runs in the background may have been told to ignore it
print("ready", flush=True)
time.sleep(600)
"""


def test_an_interrupted_cell_ends_its_command(tmp_path, monkeypatch, capsys):
    """As Ctrl-C does in a terminal: the command says so in a line, and nothing goes on."""
    script, usual, calls = tmp_path / "python", notebook._print_lines, []
    script.write_text(STANDS_IN)
    script.chmod(0o755)

    def print_lines(process):
        calls.append(process)
        if len(calls) == 1:
            assert process.stdout.readline() == "ready\n"
            raise KeyboardInterrupt
        usual(process)

    monkeypatch.setattr(notebook, "_print_lines", print_lines)
    monkeypatch.setattr(notebook.sys, "executable", str(script))
    monkeypatch.setattr(notebook, "home", tmp_path)
    notebook.lab("check", 7)
    assert capsys.readouterr().out == "\nended by Ctrl-C\n" and calls[0].returncode == 130


# ---- answers ---------------------------------------------------------------------------------------------------------

FILE = """\
# Where? # and why?

file = ""  # such as "common/model.py"
line = 0
why = "" # in a sentence
these words are no answer
"""


@pytest.mark.parametrize(
    ("cell", "changes"),
    [
        ("line = 7", {"line = 0": "line = 7"}),
        ("  line=7   ", {"line = 0": "line = 7"}),
        ("line = 7\n\n# of step 2\nline = 8", {"line = 0": "line = 8"}),
        ('why = "it # divides = twice"', {'why = "" #': 'why = "it # divides = twice"  #'}),
        ("why = 'a \"quoted\" word'  # sure", {'why = "" # in a sentence': "why = 'a \"quoted\" word'  # sure"}),
        ("why = it divides twice", {'why = ""': "why = it divides twice "}),
        ("why = “it divides”", {'why = ""': "why = “it divides” "}),
        ('file = "a.py"#b', {'""  # such as "common/model.py"': '"a.py"  #b'}),
        ("line =", {"line = 0": "line = "}),
        ("line = 2 * 3_000\r\nfile = 'x'\r\n", {"line = 0": "line = 2 * 3_000", 'file = ""': "file = 'x'"}),
        ("\ufeff# only this\n", {}),
    ],
)
def test_a_cell_sets_answers(cell, changes):
    text, _, unknown, names = filled(FILE, cell)
    expected = FILE
    for before, after in changes.items():
        assert before in FILE
        expected = expected.replace(before, after)
    assert text == expected and not unknown and names == ["file", "line", "why"]


@pytest.mark.parametrize("cell", ["[answers]", 'why = """one\ntwo"""', 'why = "a" "b"', "line: 7", 'why = "a', "= 3"])
def test_a_cell_that_is_no_answer_is_refused(cell):
    with pytest.raises(UsageError, match="line 1 of the cell: .* is not of the form name = value, in one line"):
        filled(FILE, cell)


def test_names_that_the_file_has_not():
    text, written, unknown, _ = filled(FILE, "lien = 3\nwhy = 'x'")
    assert unknown == ["lien"] and written == ["why = 'x'"] and "lien" not in text
    assert filled("a = 1\na = 2\n", "a = 3")[0] == "a = 3\na = 3\n", "the last one counts"
    assert without_comments(FILE) == ['file = ""', "line = 0", 'why = ""']
