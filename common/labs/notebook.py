"""The labs in a notebook: a cell starts a lab, a cell fills each of its gaps, and a cell checks it.

    from common.labs.notebook import check, lab, start
    start("write-03-a")

    %%fill write-03-a
    (the body, as in the file between its two marks; `%%fill write-01-a 2` fills the second gap of a file)

    check("write-03-a")

`%%fill predict-03-a answer.toml` writes a file of that name into the lab's folder, and `lab("hint", "write-03-a")` does
what the command `python -m common.labs hint write-03-a` does.
"""

import re
import subprocess
import sys
import textwrap
import time

from common.errors import UsageError
from common.labs.cut import MARKED
from common.labs.find import ROOT
from common.labs.picture import NAME
from common.labs.state import HOME

home = HOME  # where files and results are kept


def lab(*words: str) -> None:
    """Do a command of `python -m common.labs`, and show what it prints."""
    command = [sys.executable, "-m", "common.labs", *words, "--home", str(home)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    print(re.sub(r"python -m common\.labs ([a-z]\w*)((?: [\w-]+)*)", _as_a_cell, done.stdout), end="")


def _as_a_cell(match: re.Match) -> str:
    """A command of the terminal, as one says it in a cell."""
    return f"lab({', '.join(repr(word) for word in (match[1], *match[2].split()))})".replace("'", '"')


def start(id: str, student: int | None = None) -> None:
    """Make the files of a lab, and show its task, and what its file is like around the gaps."""
    lab("start", id, *([] if student is None else ["--student", str(student)]))
    for file in sorted((home / id).glob("*.py")):
        if MARKED.search(text := file.read_text(encoding="utf-8")):
            print(f"\n{file.name}:\n\n{text}")


def check(id: str) -> None:
    """Grade a lab, and show what was found, also as a picture if the check has drawn one."""
    begun, picture = time.time(), home / id / NAME
    lab("check", id)
    if picture.is_file() and picture.stat().st_mtime >= begun - 1 and "IPython" in sys.modules:
        from IPython.display import Image, display

        display(Image(filename=str(picture)))


def fill(line: str, cell: str) -> None:
    """Put a cell into a lab's file: `line` is the lab's id, and a gap's number (1 if none is given) or a file's name.

    Raises UsageError if the lab has not been started, or has no such gap.
    """
    id, _, where = line.strip().partition(" ")
    folder = home / id
    if not id or not folder.is_dir():
        raise UsageError(f'{id or "fill"} has not been started: start("{id or "write-03-a"}")')
    if where and not where.isdecimal():
        if "/" in where or "\\" in where:
            raise UsageError(f"{where} must be the name of a file in the lab's folder")
        (folder / where).write_text(cell, encoding="utf-8")
        return
    number, gaps = int(where or 1), [file for file in sorted(folder.glob("*.py")) if MARKED.search(_text(file))]
    if not gaps or not 1 <= number <= len(MARKED.findall(_text(gaps[0]))):
        raise UsageError(f"{id} has no gap {number}; say which file the cell is, such as answer.toml")
    match = list(MARKED.finditer(text := _text(gaps[0])))[number - 1]
    body = textwrap.indent(textwrap.dedent(cell).strip("\n") + "\n", match[1])
    gaps[0].write_text(text[: match.start(2)] + body + text[match.end(2) :], encoding="utf-8")
    if textwrap.dedent(cell).strip() == "raise NotImplementedError":
        print(f"{gaps[0].name}: the gap is as it was at the start, and still to be written.")
        return
    print(f"{gaps[0].name}, line {text.count(chr(10), 0, match.start(2)) + 1}, is written.")


def _text(file) -> str:
    return file.read_text(encoding="utf-8")


def register() -> None:
    """Make `%%fill` known to the notebook that imports this; outside of notebooks, do nothing."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        shell.register_magic_function(fill, "cell")


register()
