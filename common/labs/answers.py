"""A student's answers to questions: a file answer.toml with a line for each, `name = value`.

A number may be written as one would say it: `135_808`, `135,808`, `1.36e5` or `2 * 4 * 33952`.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Iterable
from pathlib import Path

from common.errors import UsageError

LINE = re.compile(r"""(\w+)\s*=\s*(?:["“”]([^"“”]*)["“”]|'([^']*)'|([^"'“”#]*))\s*(?:\#.*)?""")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
DIGITS = 40  # that a number may have
PREDICTIONS, PLACES = "stored.jsonl", "places.jsonl"  # and wrong places of a hunt: `reset` takes neither back
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def read_answers(folder: Path) -> dict[str, str]:
    """What the file says, as text. (The part of TOML that it needs; Python 3.10 cannot read the whole.)

    Raises UsageError, with the line, where it is something else.
    """
    path, found = folder / "answer.toml", {}
    if not path.is_file():
        raise UsageError(f"{path} is missing: `reset` brings it back")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.strip().startswith("#"):
            match = LINE.fullmatch(line.strip())
            if not match:
                raise UsageError(f"{path}, line {number}: {line.strip()!r:.100} is not of the form name = value")
            value = next((each for each in match.groups()[1:] if each is not None), "").strip()
            if value.isdecimal() and len(value) > DIGITS:
                raise UsageError(f"{path}, line {number}: {match[1]} has {len(value)} digits")
            found[match[1]] = value
    return found


def unknown(answers: dict[str, str], names: Iterable[str]) -> str:
    """A sentence about answers that nobody asked for, which often are misspelt; "" if there is none."""
    *most, last = names
    asked = f"{', '.join(most)} and {last}" if most else last
    if found := [f"`{name:.40}`" for name in answers if name not in (*most, last)]:
        verb = "is" if len(found) == 1 else "are"
        return f"answer.toml: {', '.join(found[:3])} {verb} {'none of' if most else 'not'} {asked}."
    return ""


def number(answers: dict[str, str], name: str) -> float | None:
    """The number that was answered; None if there is no answer yet.

    Raises UsageError, which says why, if it is no number.
    """
    text = answers.get(name, "")
    if not text:
        return None
    try:
        plain = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text).replace("_", "")
        value = float(_value(ast.parse(plain.replace("×", "*").replace("^", "**"), mode="eval").body))
    except OverflowError:
        value = math.inf
    except ZeroDivisionError:
        raise UsageError(f"answer.toml: {name} = {text:.60} divides by zero") from None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        comma = "; write a decimal point, not a comma" if re.fullmatch(r"\d+,\d+", text) else ""
        raise UsageError(f"answer.toml: {name} = {text:.60} is not a number{comma}") from None
    if not math.isfinite(value):
        raise UsageError(f"answer.toml: {name} = {text:.60} is not a number: it is too large for one") from None
    return value


def _value(node: ast.AST) -> float:
    """Of an expression of numbers, + - * / ** and brackets. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return float(_value(node.left) ** _value(node.right))  # of floats, it is quick, whatever the exponent
    raise ValueError(ast.dump(node))


def keep(path: Path, row: dict) -> str | None:
    """Add a line to a file of rows. Returns why that cannot be done, on a full disk or in a read-only folder."""
    try:
        half = path.is_file() and not path.read_bytes().endswith(b"\n")  # a line for which there was no room
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * half + json.dumps(row) + "\n")
    except OSError as error:
        return f"{path.name} cannot be written: {error.strerror}"
    return None


def kept(path: Path) -> list[dict]:
    """The rows of such a file; lines that are damaged do not count."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def filled(text: str, cell: str) -> tuple[str, list[str], list[str], list[str]]:
    """Set answers in the text of an answer.toml, and keep its comments and all that is not answered.

    Returns the text, the answers that were set, the names in the cell that the file has not, and those that it has.
    Raises UsageError, with the line, where the cell has something else than answers and comments.
    """
    given: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(cell.removeprefix("\ufeff").splitlines(), 1):
        if line.strip() and not line.strip().startswith("#"):
            if (parts := _parts(line)) is None:
                form = f"{line.strip()!r:.100} is not of the form name = value, in one line"
                raise UsageError(f"line {number} of the cell: {form}; nothing is written")
            given[parts[0]] = parts[1:]
    names, lines = [], text.splitlines()
    for at, line in enumerate(lines):
        name, _, comment = _parts(line) or ("", "", "")
        names += [name] * bool(name)
        if name in given:
            value, comment = given[name][0], given[name][1] or comment
            lines[at] = f"{name} = {value}" + f"  {comment}" * bool(comment)
    written = [f"{name} = {value}" for name, (value, _) in given.items() if name in names]
    return "\n".join(lines) + "\n", written, [name for name in given if name not in names], list(dict.fromkeys(names))


def without_comments(text: str) -> list[str]:
    """The lines of an answer.toml that are answers, or that wait for one."""
    return [f"{parts[0]} = {parts[1]}" for line in text.splitlines() if (parts := _parts(line))]


def _parts(line: str) -> tuple[str, str, str] | None:
    """Of a line `name = value  # comment`: its name, its value with quotes, and its comment. None for another line."""
    line = line.strip()
    if line.startswith("#") or not (match := LINE.fullmatch(line)):
        return None
    group = next((each for each in (2, 3) if match[each] is not None), 4)
    end = match.end(group) + (group < 4)
    return match[1], line[line.index("=") + 1 : end].strip(), line[end:].strip()
