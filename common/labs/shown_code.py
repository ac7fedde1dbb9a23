"""The code that a lesson shows, as a slide needs it: in color, with file and line, and between the lines around it."""

import builtins
import functools
import html
import keyword
import re
import textwrap
from pathlib import Path

from common.labs.find import ROOT

AROUND = 2  # lines before and after an excerpt
WIDTH = 84  # characters of a line: of those around only so many are shown, and of the excerpt longer ones are broken
HEADS = "def ", "class "
MARKS = r" *# --- (write this yourself|until here) ---"  # of labs
TOKEN = re.compile(
    r"""(?P<comment>\#.*)|(?P<string>[frb]*(?:"[^"]*"|'[^']*'))|(?P<word>[A-Za-z_]\w*)|(?P<number>\d[\d_.e]*)"""
)
KINDS = {name: "builtin" for name in dir(builtins) if name.islower()} | dict.fromkeys(keyword.kwlist, "keyword")


def colored(line: str) -> str:
    """A line of Python as HTML. (It takes each line alone, so it knows no string that goes over several.)"""
    found, end = [], 0
    for token in TOKEN.finditer(line):
        kind = KINDS.get(token[0]) if token.lastgroup == "word" else token.lastgroup
        if kind:
            found += [html.escape(line[end : token.start()], quote=False), spanned(token[0], kind)]
            end = token.end()
    return "".join(found) + html.escape(line[end:], quote=False)


def broken(line: str) -> list[str]:
    """A line of Python in lines of `WIDTH`, for large letters: its comment above it, and then as its commas allow."""
    tokens = [token for token in TOKEN.finditer(line) if token.lastgroup in ("comment", "string")]
    blanks = indentation(line) * " "
    if len(line) <= WIDTH:
        return [line]
    if tokens and tokens[-1].lastgroup == "comment" and (code := line[: tokens[-1].start()].rstrip()):
        return textwrap.wrap(blanks + tokens[-1][0], WIDTH, subsequent_indent=f"{blanks}# ") + broken(code)
    bare = "".join(
        " " if any(each.start() <= at < each.end() for each in tokens) else letter for at, letter in enumerate(line)
    )
    depth = [sum((letter in "([{") - (letter in ")]}") for letter in bare[:at]) for at in range(WIDTH)]
    commas = [at for at in range(indentation(line), min(WIDTH, len(line) - 1)) if bare[at] == "," and depth[at]]
    if not commas:
        return [line]
    end = max(commas, key=lambda at: (-depth[at], at)) + 1
    return [line[:end], *broken(f"{blanks}        {line[end:].lstrip()}")]


def spanned(text: str, kind: str) -> str:
    return f'<span class="{kind}">{html.escape(text, quote=False)}</span>'


def in_context(excerpt: str, folder: Path) -> tuple[str, str]:
    """Where an excerpt of the lesson in `folder` is from, "file, line 3", and itself as HTML, with dim lines around it.

    Lines ... in it stand for lines that are left out. If it is in no file, it is shown as it is, and is from "".
    """
    parts = [part.splitlines() for part in re.split(r"^ *\.\.\.\n", excerpt, flags=re.MULTILINE) if part.strip()]
    for file in files_of(folder):
        lines = lines_of(file)
        places = [position(part, lines) for part in parts]
        if None not in places:
            break
    else:
        return "", "\n".join(colored(each) for line in excerpt.splitlines() for each in broken(line))
    dimmed = [(line, "around") for line in lines]
    gap, first, behind = (8 * " " + "...", "around"), places[0], places[-1] + len(parts[-1])
    head = enclosing(lines, first)
    whole = lines[first].lstrip().startswith(HEADS)
    start = first if whole else max(first - AROUND, head + 1)
    shown = [dimmed[head], *([gap] if head + 1 < start else []), *dimmed[start:first]] if head >= 0 else []
    for number, (place, part) in enumerate(zip(places, parts)):
        shown += [gap] * (number > 0) + [(line, "") for line in lines[place : place + len(part)]]
    end = next((at for at in range(behind, len(lines)) if ends(lines[at], lines[head])), len(lines)) if head >= 0 else 0
    shown += dimmed[behind : behind if whole else min(behind + AROUND, end)]
    shown = [(line, kind) for line, kind in shown if not re.fullmatch(MARKS, line)]
    bare = textwrap.dedent("\n".join(line for line, _ in shown)).splitlines()
    text = []
    for line, (_, kind) in zip(bare, shown):
        cut = line if len(line) <= WIDTH else f"{line[: WIDTH - 2]} …"
        text += [spanned(cut, kind)] if kind else map(colored, broken(line))
    return f"{file.relative_to(ROOT)}, line {first + 1}", "\n".join(text).rstrip()


@functools.cache
def files_of(folder: Path) -> list[Path]:
    """Where to look for an excerpt: in the lesson's own step first."""
    found = [file for name in ("common", "step*") for file in sorted(ROOT.glob(f"{name}/**/*.py"))]
    return sorted(found, key=lambda file: (folder.resolve() not in file.parents, "labs" in file.parts))


@functools.cache
def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def position(part: list[str], lines: list[str]) -> int | None:
    """The index of the first of these lines in a file, whatever their indentation; None if they are not there."""
    wanted = [line.strip() for line in part]
    starts = (place for place, line in enumerate(lines) if line.strip() == wanted[0])
    return next((at for at in starts if [line.strip() for line in lines[at : at + len(wanted)]] == wanted), None)


def enclosing(lines: list[str], place: int) -> int:
    """The index of the `def` or `class` that a line is in; -1 if it is in none."""
    for number in range(place - 1, -1, -1):
        if lines[number].lstrip().startswith(HEADS) and indentation(lines[number]) < indentation(lines[place]):
            return number
    return -1


def ends(line: str, head: str) -> bool:
    """Whether the function that begins with `head` has ended before this line."""
    return bool(line.strip()) and indentation(line) <= indentation(head)
