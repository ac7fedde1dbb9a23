"""A student's answers to questions: a file answer.toml with a line for each, `name = value`."""

import math
import re
from pathlib import Path

from common.errors import UsageError

LINE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([-+\w.]*))\s*(?:\#.*)?""")


def read_answers(folder: Path) -> dict[str, str]:
    """What the file says, as text. (The part of TOML that it needs; Python 3.10 cannot read the whole.)

    Raises UsageError, with the line, where it is something else.
    """
    path, found = folder / "answer.toml", {}
    if not path.is_file():
        raise UsageError(f"{path} is missing: `reset` brings it back")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.strip().startswith("#"):
            match = LINE.fullmatch(line.strip())
            if not match:
                raise UsageError(f"{path}, line {number}: {line.strip()!r} is not of the form name = value")
            found[match[1]] = next((each for each in match.groups()[1:] if each is not None), "")
    return found


def number(answers: dict[str, str], name: str) -> float | None:
    """The number that was answered, which may have underscores; None if there is no answer yet.

    Raises UsageError if it is no number.
    """
    text = answers.get(name, "").replace("_", "")
    try:
        value = float(text) if text else None
        if value is not None and not math.isfinite(value):
            raise ValueError
        return value
    except ValueError:
        raise UsageError(f"answer.toml: {name} = {text} is not a number") from None
