"""Ask a student's file, in a process of its own: for labs whose files need neither ranks nor PyTorch.

`ask` starts this file as a script. It imports nothing of the project, so a check takes a fraction of a second.
"""

import contextlib
import faulthandler
import importlib.util
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

BUSY = 10  # seconds for all questions, which should take a hundredth


class Answer(NamedTuple):
    """What became of a question: its value, or the name and the text of what it raised."""

    value: object = None
    raised: str = ""
    text: str = ""  # for the student, with the line


class Refused(Exception):
    """The file cannot be asked anything; the text says why."""


def ask(file: Path, source: Path, questions: list[str], seconds: float = BUSY) -> list[Answer]:
    """Evaluate expressions in the module that `file` defines. Tuples come back as lists.

    Raises Refused if it is no Python, does not end in `seconds`, ends the process, or reads `source`, which it was cut
    from.
    """
    from common.labs.apart import apart, give_up_rights, leave_out  # not above: the student's process has no project
    from common.labs.find import solutions

    command = [sys.executable, "-I", "-B", __file__, str(file), str(source), str(seconds)]
    options = {"input": json.dumps(questions).encode(), "timeout": seconds + BUSY, "cwd": file.parent}
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")

        def work() -> None:
            leave_out(solutions(str(source)))
            give_up_rights()
            with out.open("wb") as output, errors.open("wb") as other, contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdout=output, stderr=other, **options)
                Path(folder, "ended").touch()

        apart(work)
        if not Path(folder, "ended").exists():
            raise Refused("it does not end.")
        said, complained = (path.read_text(encoding="utf-8", errors="replace") for path in (out, errors))
    try:
        found = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        raise Refused(_last_words(complained, file, seconds)) from None
    if isinstance(found, str):
        raise Refused(found)
    return [Answer(*each) for each in found]


def _last_words(text: str, file: Path, seconds: float) -> str:
    """What the traceback of a process says that was ended, or has ended itself."""
    lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', text)
    if "Timeout" not in text:
        return "it ended the process before it had answered."
    return (
        f"it does not end: after {seconds:g} s it is at {_quoted(file, int(lines[0]))}."
        if lines
        else "it does not end."
    )


def _quoted(file: Path, line: int) -> str:
    return f"line {line}: `{linecache.getline(str(file), line).strip()}`"


# ---- what follows runs in the student's process ----------------------------------------------------------------------


def _answer_all(file: Path, source: Path, questions: list[str]) -> list[tuple] | str:
    """An answer for each question, or why there are none."""

    closed, leave, out = _neighbor("closed"), os._exit, os.dup(1)

    def end(why: str) -> NoReturn:
        os.write(out, json.dumps(why).encode() + b"\n")
        leave(0)

    closed.close(Path(__file__).resolve().parents[2], source, str(file), end)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return [_answer(file, question, vars(module)) for question in questions]
    except SyntaxError as error:
        return f"line {error.lineno} is no Python: {error.msg}."
    except BaseException as error:  # SystemExit too
        if "None in sys.modules" in str(error):
            return closed.REFERENCE
        return f"it cannot be imported: {_told(error, file)}"


def _neighbor(name: str):
    """A module of this folder that imports nothing of the project."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(file: Path, question: str, names: dict) -> tuple:
    try:
        return (eval(question, names),)
    except ImportError:
        raise
    except NotImplementedError as error:
        where = _lines_of(error, file)[-1:]
        return None, "NotImplementedError", "".join("`{}` is not written yet (line {}).".format(*at) for at in where)
    except Exception as error:
        return None, type(error).__name__, _told(error, file)


def _told(error: BaseException, file: Path) -> str:
    lines = _lines_of(error, file)
    where = f" in {_quoted(file, lines[-1][1])}" if lines else ""
    return f"{type(error).__name__}{where}: {str(error).partition(chr(10))[0]}"


def _lines_of(error: BaseException, file: Path) -> list[tuple[str, int]]:
    """Function and line of each call in the student's file. This opens no other file, as `extract_tb` does."""
    walked = traceback.walk_tb(error.__traceback__)
    return [(at.f_code.co_name, line) for at, line in walked if at.f_code.co_filename == str(file)]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    with contextlib.redirect_stdout(None):
        answered = _answer_all(Path(sys.argv[1]), Path(sys.argv[2]), json.load(sys.stdin))
    print(json.dumps(answered, default=repr))
