"""The marker's page: what people have to read of a class, in one HTML file without scripts.

Of each lab it shows what the student wrote (code as the difference from the starter), the sentences of hunts, the first
predictions, the hints that were read and what the check says. All of it is a student's text, so all of it is escaped.
"""

import ast
import difflib
import functools
import tempfile
from html import escape
from pathlib import Path

from common.errors import UsageError
from common.labs import find
from common.labs.answers import read_answers

LONGEST = 60_000  # characters of a text that are shown
OPENED = 10_000  # characters of a difference that is not folded, in a file below a folder: the repair of a hunt
UNSEEN = "characters that are not seen, or turn lines around; here they are shown by their numbers."
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px } td, th { border: 1px solid #ccc; padding: .15rem .45rem }
td.n { text-align: right } .zero { background: #fbe3df } .some { background: #fdf3d0 } .full { background: #e1f2e0 }
pre { background: #f6f6f4; padding: .6rem; font-size: 12.5px; white-space: pre-wrap; overflow-wrap: anywhere }
ins { background: #d9f2d9; text-decoration: none } del { background: #fbdcd7; text-decoration: none }
h2 { margin-top: 2.5rem }
.odd { background: #ffb74d }
.note { background: #fdf3d0; padding: .3rem .6rem; margin: .3rem 0 } blockquote { border-left: 4px solid #88a;
margin: .4rem 0; padding: .1rem .8rem; background: #f3f3fa } .overflow { overflow-x: auto }
"""


def write_page(rows: list, labs: list[str], path: Path) -> Path:
    """Write the page of these rows of `grade`. Returns its path."""
    head = "".join(f"<th>{escape(id)}</th>" for id in labs)
    lines = [f"<tr><th>number</th><th>name</th><th>hours late</th>{head}<th>total</th><th>note</th></tr>"]
    parts = []
    for place, row in enumerate(rows):
        who = f"{row.who.number} {row.name}" if row.who else row.file
        cells = "".join(_cell(row.results.get(id)) for id in labs)
        late = f"{row.late:.1f}" if row.late else ""
        link = f'<a href="#r{place}">{_shown(row.name or row.file)}</a>'
        number = row.who.number if row.who else ""
        ended = any(note.startswith("not checked: ") for note in row.notes)
        total = "not checked" if ended else f"{row.total:.2f}"
        why = "" if row.results else _shown("; ".join(row.notes))
        lines.append(f"<tr><td class=n>{number}<td>{link}<td class=n>{late}{cells}<td class=n>{total}<td>{why}</tr>")
        parts.append(f'<h2 id="r{place}">{_shown(who)}: {total}</h2>')
        parts += [f"<p class=note>{_shown(note)}</p>" for note in row.notes]
        parts += [_lab(row, id) for id in labs if id in row.results]
    table = f"<div class=overflow><table>{''.join(lines)}</table></div>"
    title = "Labs: what to read"
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    path.write_text("\n".join([page, table, *parts]) + "\n", encoding="utf-8", errors="replace")
    return path


def _cell(result) -> str:
    if result is None:
        return "<td>"
    kind = "full" if result.score == 1 else "some" if result.score else "zero"
    return f'<td class="n {kind}">{result.score:.2f}'


def _lab(row, id: str) -> str:
    """What there is to read of one lab."""
    result, about = row.results[id], row.submission.about["labs"].get(id, {})
    files, student = row.submission.files[id], about.get("student", row.who.number)
    known = f"variant of number {student}; {about.get('hints', 0)} hints, {about.get('checks', 0)} checks"
    parts = [f"<h3>{id}: {result.score:.0%}</h3><p>{known}; checked again in {result.seconds:g} s</p>"]
    if about.get("first"):
        first = ", ".join(f"{name} = {value}" for name, value in about["first"].items())
        parts.append(f"<p>Predicted first: {_shown(first)}</p>")
    if sentence := sentence_of(files):
        parts.append(f"<blockquote>{_shown(sentence)}</blockquote>")
    parts.append(f"<pre>{_shown(_cut(chr(10).join([*result.feedback, result.fault]).strip()))}</pre>")
    for name, content in sorted(files.items()):
        text = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
        shown = _difference(starter_of(id, student).get(name), text)
        if odd := sum(not _plain(each) for each in text):
            parts.append(f"<p class=note>{escape(name)} has {odd:,} {UNSEEN}</p>")
        opened = " open" if len(shown) < OPENED or name.count("/") == 0 else ""
        parts.append(f"<details{opened}><summary>{_shown(name)}</summary><pre>{shown}</pre></details>")
    return "\n".join(parts)


def sentence_of(files: dict[str, bytes]) -> str:
    """What a hunt's answer.toml says of the bug, if it says something."""
    if "answer.toml" not in files:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "answer.toml").write_bytes(files["answer.toml"])
        try:
            return read_answers(Path(folder)).get("why", "")
        except UsageError:
            return ""


@functools.lru_cache(maxsize=64)
def starter_of(id: str, student: int) -> dict[str, str]:
    """What `start` makes for this number: text by path."""
    with tempfile.TemporaryDirectory() as folder:
        find.lab(id).start(Path(folder), student)
        paths = [path for path in Path(folder).rglob("*") if path.suffix in (".py", ".toml", ".csv")]
        return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _cut(text: str) -> str:
    """A text as it is shown: what is not shown of a long one is told, because it may hide something."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}\n\nCUT HERE: {len(text) - LONGEST:,} more characters are not shown; read the file itself."


def _plain(character: str) -> bool:
    return character.isprintable() or character in "\n\t"


def _shown(text: str) -> str:
    """HTML of a text. What is not seen, or turns lines around, is shown by its number, in the order of Python."""
    return "".join(
        escape(each) if _plain(each) else f"<span class=odd>{each.encode('unicode_escape').decode()}</span>"
        for each in text
    )


def _difference(before: str | None, after: str) -> str:
    """Lines of HTML: what was added and taken away, with three lines around it; all of a file that is new."""
    if before is None:
        return _shown(_cut(after))
    lines = []
    for line in list(difflib.unified_diff(before.split("\n"), _cut(after).split("\n"), lineterm=""))[2:]:
        tag = {"+": "ins", "-": "del"}.get(line[:1])
        lines.append(f"<{tag}>{_shown(line)}</{tag}>" if tag else _shown(line))
    return "\n".join(lines)


def written_by(files: dict[str, bytes]) -> str:
    """The code of a write lab without comments and spaces; nothing if it cannot be read."""
    try:
        return "\n".join(ast.dump(ast.parse(files[name])) for name in sorted(files) if name.endswith(".py"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
