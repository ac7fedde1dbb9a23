"""The labs in a notebook: a cell starts a lab, a cell fills each of its gaps, and a cell checks it.

    from common.labs.notebook import check, lab, start
    start("write-03-a")

    %%fill write-03-a
    (the body, as in the file between its two marks; `%%fill write-01-a 2` fills the second gap of a file)

    check("write-03-a")

`%%fill predict-03-a answer.toml` sets the answers that the cell gives, and keeps the rest of the file. Any other file
of the lab's folder is replaced: `%%fill schedule-05-a schedule.csv`. `lab("hint", "write-03-a")` does what the command
`python -m common.labs hint write-03-a` does.
"""

import difflib
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path, PurePosixPath

from common.errors import UsageError
from common.labs import find
from common.labs.answers import filled, without_comments
from common.labs.cut import MARKED
from common.labs.find import ROOT
from common.labs.state import HOME, State
from common.labs.whole_files import replace

SHOWN = (".py", ".toml", ".csv", ".txt")  # files of a lab that `start` shows; of .py, those that have a gap
MARK = re.compile(r"^ *# --- (?:write this yourself|until here) ---\n?", re.MULTILINE)
OTHERS = re.compile(r"(`(?=bash |python -m )|^ {4,}(?=python -m ))")  # commands that a cell gives to the shell
AS_AT_THE_START = re.compile(r"raise NotImplementedError(?:\(\))?\s*(?:#.*)?")
PATIENCE = 10.0  # seconds that a command has to end, once the cell is interrupted

home = HOME  # where files and results are kept


def lab(*words: object) -> None:
    """Do a command of `python -m common.labs`, and show what it prints, and the pictures that it draws."""
    _do([str(word) for word in words])


def _do(words: list[str]) -> bool:
    """The same. Returns whether there was something to do: a check that is not passed is no error."""
    if words[:1] == ["watch"]:
        print('watch is for a terminal. Here, run check("...") after each %%fill.')
        return False
    before = _pictures()
    kept = [] if words[:1] == ["grade"] else ["--home", str(home)]
    command = [sys.executable, "-m", "common.labs", *words, *kept]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    # In a session of its own, so that whoever interrupts the cell ends it once, by the signal below
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **merged) as process:
        try:
            _print_lines(process)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
            _print_lines(process)
    _show([path for path, when in _pictures().items() if before.get(path) != when])
    return process.returncode in (0, 1)


def _print_lines(process: subprocess.Popen) -> None:
    for line in process.stdout:
        line = re.sub(r"python -m common\.labs ([a-z]\w*)((?: [\w-]+)*)", _as_a_cell, line)
        print(OTHERS.sub(r"\1!", line.replace("`python -m common.labs`", "`lab()`")), end="")


def _as_a_cell(match: re.Match) -> str:
    """A command of the terminal, as one says it in a cell."""
    command, *words = match[1], *match[2].split()
    if command in ("start", "check") and len(words) <= 1:  # these show more than their command prints
        return f'{command}("{words[0]}")' if words else f"{command}()"
    return f"lab({', '.join(repr(word) for word in (command, *words))})".replace("'", '"')


def _pictures() -> dict[Path, int]:
    """When each picture in the folders of labs, and of the score board, was drawn."""
    return {path: path.stat().st_mtime_ns for path in [*home.glob("*.png"), *home.glob("*/*.png")] if path.is_file()}


def _show(pictures: list[Path]) -> None:
    if pictures and "IPython" in sys.modules:
        from IPython.display import Image, display

        for path in pictures:
            display(Image(filename=str(path)))


def start(id: str, student: int | None = None) -> None:
    """Make the files of a lab, show its task and what there is to fill in, and say which cell does that."""
    if not _do(["start", str(id), *([] if student is None else ["--student", str(student)])]):
        return
    files = sorted((home / id).glob("*"), key=lambda path: (path.suffix != ".py", path.name))
    for path in files:
        if path.suffix in SHOWN and (path.suffix != ".py" or MARKED.search(_text(path))):
            print(f"\n{path.name}:\n\n{_text(path)}")
    print(_how_to_fill(id, files))


def _how_to_fill(id: str, files: list[Path]) -> str:
    """What cells write the files of a lab."""
    cells, folder = [], home / id
    for path in files:
        if path.suffix == ".py" and (gaps := len(MARKED.findall(_text(path)))):
            for of in [f" {number}" for number in range(1, gaps + 1)] if gaps > 1 else [""]:
                cells.append(f"%%fill {id}{of}\n(what stands between the marks{of and f' of gap{of}'})")
        elif path.name == "answer.toml":
            cells.append("\n".join([f"%%fill {id} {path.name}", *without_comments(_text(path))]))
        elif path.suffix == ".csv":
            cells.append(f"%%fill {id} {path.name}\n(the whole table)")
    if (folder / "run.sh").is_file():
        where = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
        cells.insert(0, f"!bash {where}/run.sh")
        cells.append(f"%%fill {id} step.../name.py\n(all of a file that you have repaired)")
    return "Cells of this lab:\n\n" + textwrap.indent("\n\n".join([*cells, f'check("{id}")']), "    ")


def check(id: str = "") -> None:
    """Grade a lab, or the one that was started or filled last, and show what was found."""
    lab("check", *([id] if id else []))


def fill(line: str, cell: str) -> None:
    """Put a cell into a lab's file: `line` is the lab's id, and a gap's number (1 if none is given) or a file's name.

    Raises UsageError if the lab has not been started, or has no such gap or file.
    """
    id, where = [*line.split(maxsplit=1), "", ""][:2]
    folder = home / id
    if not id or not folder.is_dir() or not re.fullmatch(r"[a-z]+-\d\d-[a-z]", id):
        id = find.lab(id).id if id else ""
        raise UsageError(f'{id} has not been started: start("{id}")' if id else "of which lab? %%fill write-03-a")
    if not cell.strip():
        raise UsageError("the cell is empty, and nothing is written")
    where = where.strip()
    if where and not (where.isascii() and where.isdecimal()):
        _fill_file(id, where, re.sub(r"\A# %load .*\n+", "", cell))
    else:
        _fill_gap(id, int(where or 1), cell)
    State.load(home).try_to_update(lambda state: setattr(state, "current", id))  # what `check()` grades now


def _fill_file(id: str, where: str, cell: str) -> None:
    """Set the answers of answer.toml; replace another file."""
    folder, path = home / id, PurePosixPath(where)
    if path.is_absolute() or ".." in path.parts or "\\" in where or not (folder / path).is_file():
        names = [each.relative_to(folder).as_posix() for each in sorted(folder.rglob("*")) if each.suffix in SHOWN]
        like = difflib.get_close_matches(where, names, n=1) or ["answer.toml"] * ("answer.toml" in names)
        more = f"; did you mean {like[0]}?" if like else ""
        raise UsageError(f"{where} must be the name of a file in the folder of {id}, where it is not{more}")
    if path.name != "answer.toml":
        if path.suffix == ".csv" and "#" not in cell:  # what a table is to reach is said in comments above it
            cell = "".join(line for line in _text(folder / path).splitlines(True) if line.startswith("#")) + cell
        _write(folder / path, cell)
        print(f"{path} is written.")
        return
    text, written, unknown, names = filled(_text(folder / path), cell)
    if written:
        _write(folder / path, text)
    print("answer.toml now has:" if written else "answer.toml is as it was.")
    for each in written:
        print(f"  {each}")
    if unknown:
        print(f"Left out: answer.toml has no line for {', '.join(unknown)}. It asks for {', '.join(names)}.")


def _fill_gap(id: str, number: int, cell: str) -> None:
    gaps = [file for file in sorted((home / id).glob("*.py")) if MARKED.search(_text(file))]
    found = list(MARKED.finditer(text := _text(gaps[0]))) if gaps else []
    if not 1 <= number <= len(found):
        there = f"it has {len(found)}" if found else "say which file the cell is, such as answer.toml"
        raise UsageError(f"{id} has no gap {number}; {there}")
    match, cell = found[number - 1], textwrap.dedent(MARK.sub("", cell)).strip("\n") + "\n"
    _write(gaps[0], text[: match.start(2)] + textwrap.indent(cell, match[1]) + text[match.end(2) :])
    if AS_AT_THE_START.fullmatch(cell.strip()):
        print(f"{gaps[0].name}: the gap is as it was at the start, and still to be written.")
        return
    print(f"{gaps[0].name}, line {text.count(chr(10), 0, match.start(2)) + 1}, is written.")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start})") from None


def _write(file: Path, text: str) -> None:
    """Replace a file. Raises UsageError if that cannot be done, and leaves it as it was."""
    try:
        replace(file, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None


def _fill_or_say_why_not(line: str, cell: str) -> None:
    """`fill`, for a notebook: what is wrong is one line, and not a traceback."""
    try:
        fill(line, cell)
    except (UsageError, OSError) as error:
        print(f"error: {error}")


def register() -> None:
    """Make `%%fill` known to the notebook that imports this; outside of notebooks, do nothing."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        shell.register_magic_function(_fill_or_say_why_not, "cell", "fill")


register()
