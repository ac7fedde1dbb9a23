"""A lesson as slides: figures, tables, worked examples, code and commands, and what it prints in bold.

    python -m common.labs slides          # all steps, into runs/slides
    python -m common.labs slides 3

The file needs no network. Arrow keys, space and Page Down lead through it, Home and End to its ends; f fills the
screen.
"""

import base64
import html
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FIGURE = re.compile(r"^!\[(.*?)\]\((\S+?)\)(?:\n+\*([^*]+)\*)?", flags=re.MULTILINE)
TYPES = {".png": "png", ".gif": "gif", ".svg": "svg+xml", ".jpg": "jpeg"}
SENTENCE = 3  # words: shorter ones in bold are headings
LEFT_OUT = ("Exercises", "Answers")  # sections that give the exercises away
HEIGHT, WIDTH = 18, 130  # lines of a slide, and characters of one, in HTML
PROBLEM, ROW = "The problem", 3  # lines of a paragraph
# What a slide shows besides figures: a block of code, an indented example, a table, a sentence in bold
BLOCK = re.compile(
    r"^```\w*\n(?P<code>.*?)^```|(?P<example>(?:^    [^\n]*\n)+)|(?P<table>(?:^\|[^\n]*\n)+)|\*\*(?P<bold>.+?)\*\*",
    flags=re.MULTILINE | re.DOTALL,
)

STYLE = """\
body { margin: 0; background: #fff; color: #222; font: 2.6vh/1.45 system-ui, sans-serif; }
section { display: none; box-sizing: border-box; height: 100vh; padding: 4vh 6vw; flex-direction: column; }
section.now { display: flex; }
h1, h2 { margin: 0 0 2vh; font-weight: 600; }
h1 { font-size: 6vh; margin-top: 24vh; }
h2 { font-size: 3.6vh; color: #446; }
figure { margin: 0; flex: 1; min-height: 0; display: flex; flex-direction: column; }
img { flex: 1; min-height: 0; object-fit: contain; } figcaption { margin-top: 2vh; }
table { border-collapse: collapse; margin: 1.5vh 0; } td { padding: 0.6vh 1vw; border-bottom: 1px solid #ccd; }
pre { background: #f3f3f6; padding: 1.5vh 1.5vw; white-space: pre-wrap; font-size: 2.2vh; }
li { margin: 1.6vh 0; } footer { position: fixed; right: 2vw; bottom: 1vh; color: #999; font-size: 1.8vh; }
@media print { section { display: flex; page-break-after: always; } footer { display: none; } }
"""
SCRIPT = """\
const slides = document.querySelectorAll("section"), mark = document.querySelector("footer");
let now = Math.min(slides.length, Math.max(1, parseInt(location.hash.slice(1)) || 1)) - 1;
function show(to) {
  slides[now].classList.remove("now");
  now = Math.min(slides.length - 1, Math.max(0, to));
  slides[now].classList.add("now");
  mark.textContent = (now + 1) + " / " + slides.length;
  history.replaceState(null, "", "#" + (now + 1));
}
document.addEventListener("keydown", event => {
  const by = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1 }[event.key];
  if (by) show(now + by);
  else if (event.key === "Home") show(0);
  else if (event.key === "End") show(slides.length - 1);
  else if (event.key === "f") document.documentElement.requestFullscreen();
  else return;
  event.preventDefault();
});
document.addEventListener("click", () => show(now + 1));
show(now);
"""


class Section(NamedTuple):
    """What stands under one heading of a lesson."""

    heading: str
    text: str


def write_slides(step_folder: Path, out: Path) -> Path:
    """Write the slides of the lesson in `step_folder` to the file `out`, whose folder is made, and return it."""
    text = (step_folder / "README.md").read_text(encoding="utf-8")
    first, *rest = sections(text)
    slides = [f"<h1>{inline(first.heading)}</h1>\n<p>{inline(promise(first.text))}</p>"]
    for section in (first, *rest):
        if not section.heading.startswith(LEFT_OUT):
            slides += slides_of(section, step_folder)
    body = "\n".join(f"<section>\n{slide}\n</section>" for slide in slides)
    page = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(first.heading)}</title>\n'
    page += f"<style>\n{STYLE}</style>\n{body}\n<footer></footer>\n<script>\n{SCRIPT}</script>\n</html>\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def sections(text: str) -> Iterator[Section]:
    """The parts of a lesson under its headings of the first and the second level."""
    parts = re.split(r"(?:^## |\A# )(.+)$", text, flags=re.MULTILINE)[1:]
    yield from map(Section, parts[::2], parts[1::2])


def promise(text: str) -> str:
    """The first paragraph."""
    return next(part for part in text.strip().split("\n\n") if not part.startswith(("!", "#", "|", "```", "-")))


def prose(text: str) -> list[str]:
    """The paragraphs of a section, as HTML."""
    parts = [part for part in text.strip().split("\n\n") if not part.startswith(("!", "#", "|", "```", "-", " ", "*"))]
    return [f"<p>{inline(part)}</p>" for part in parts]


def slides_of(section: Section, folder: Path) -> Iterator[str]:
    """A slide for each figure (a second one where it moves); then all else, as much on a slide as there is room for."""
    heading = f"<h2>{inline(section.heading)}</h2>"
    for alternative, path, caption in FIGURE.findall(section.text):
        moving = re.search(r"\[As an\s+animation\]\((\S+?\.gif)\)", caption)
        still = re.sub(r"\s*\(?\[As an\s+animation\]\(\S+?\)\.?\)?", "", caption)
        for file in (path, *([moving[1]] if moving else [])):
            kind, data = TYPES[Path(file).suffix], base64.b64encode((folder / file).read_bytes()).decode()
            image = f'<img alt="{html.escape(alternative)}" src="data:image/{kind};base64,{data}">'
            yield f"{heading}\n<figure>{image}<figcaption>{inline(still)}</figcaption></figure>"
    shown, filled = [], 0
    text = re.sub(r"<details>.*?</details>", "", section.text, flags=re.DOTALL)
    found = list(pieces(text))
    if section.heading == PROBLEM:  # what the lesson answers: how it begins, and how it comes to a question
        begins, *rest = prose(text)
        found = [(begins, ROW), *found, *((part, ROW) for part in rest[-2:])]
    for piece, lines in found:
        if shown and filled + lines > HEIGHT:
            yield "\n".join([heading, *shown])
            shown, filled = [], 0
        shown.append(piece)
        filled += lines
    if shown or not FIGURE.search(section.text):
        yield "\n".join([heading, *(shown or [f"<p>{inline(promise(section.text))}</p>"])])


def pieces(text: str) -> Iterator[tuple[str, int]]:
    """What a section shows besides its figures, in order, as HTML; and how many lines that takes."""
    for block in BLOCK.finditer(text):
        words = (block["bold"] or "").split()
        if block["table"]:
            rows = [re.split(r"(?<!\\)\|", row.strip().strip("|")) for row in block["table"].splitlines()]
            cells = ["".join(f"<td>{inline(cell)}</td>" for cell in row) for row in (rows[0], *rows[2:])]
            lines = sum(-(-len(row) // WIDTH) for row in cells) + 1
            yield "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>", lines
        elif block["code"] or block["example"]:
            code = textwrap.dedent(block["code"] or block["example"]).rstrip()
            yield f"<pre>{html.escape(code)}</pre>", len(code.splitlines()) + 1
        elif len(words) >= SENTENCE and words[-1].endswith((".", "?", "!")):
            yield f"<p>{inline(' '.join(words))}</p>", 2


def inline(text: str) -> str:
    """A line of Markdown as HTML: code, bold, italics; of links the text alone."""
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"(?<![\w*])\*([^*]+)\*(?![\w*])", r"<i>\1</i>", text)
