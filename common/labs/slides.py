"""A lesson as slides: figures, tables, worked examples, code and commands, each with the sentence that carries it.

    python -m common.labs slides          # all steps, into runs/slides
    python -m common.labs slides 3

The file needs no network. Arrow keys, space and Page Down lead through it, Home and End to its ends; f fills the
screen, and n opens a window with notes for who speaks: what the lesson says between this slide and the next.
"""

import html
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.labs.pictures import pictures
from common.labs.shown_code import in_context

LOOKS = Path(__file__).with_name("slides.html")  # style and script
LEFT_OUT = ("Exercises", "Answers")  # sections that give the exercises away
PROBLEM = "The problem"  # what the lesson answers: its last paragraph is the question
SENTENCE = 3  # words: shorter ones in bold are headings
SHORT = 50  # letters of a sentence that says little without the one before it
# Heights in hundredths of a slide's height, as LOOKS draws them
ROOM, LINE, ROW, MONO, LARGEST = 80, 4.0, 5.4, 1.4, 2.8
ACROSS, CELLS, LETTERS = 100, 115, 260  # characters in a line of text and of a table; of code, times its size
BLOCK = re.compile(
    r"^!\[(?P<alternative>.*?)\]\((?P<picture>\S+?)\)(?:\n+\*(?P<caption>[^*]+)\*)?"
    r"|^```(?P<language>\w*)\n(?P<code>.*?)^```|(?P<example>(?:^    [^\n]*\n)+)|(?P<table>(?:^\|[^\n]*\n)+)",
    flags=re.MULTILINE | re.DOTALL,
)


class Section(NamedTuple):
    """What stands under one heading of a lesson."""

    heading: str
    text: str


class Slide(NamedTuple):
    section: str
    body: str  # HTML
    notes: list[str]  # paragraphs, Markdown


def write_slides(step_folder: Path, out: Path) -> Path:
    """Write the slides of the lesson in `step_folder` to the file `out`, whose folder is made, and return it."""
    text = (step_folder / "README.md").read_text(encoding="utf-8")
    first, *rest = sections(re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL))
    begins, *others = paragraphs(first.text)
    slides = [Slide("", f"<h1>{inline(first.heading)}</h1>\n<p>{inline(begins)}</p>", others)]
    for section in (first, *rest):
        if not section.heading.startswith(LEFT_OUT):
            slides += slides_of(section, step_folder)
    body = "\n".join(shown(slide, first.heading) for slide in slides)
    page = LOOKS.read_text(encoding="utf-8").replace("TITLE", html.escape(first.heading)).replace("SLIDES", body)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def shown(slide: Slide, lesson: str) -> str:
    """A slide with its notes, which the page hides. Its footer names the lesson, and the section."""
    notes = "\n".join(f"<p>{inline(each)}</p>" for each in slide.notes)
    footer = " · ".join(dict.fromkeys(filter(None, (inline(lesson), inline(slide.section)))))
    return f'<section data-place="{footer}">\n{slide.body}\n<aside>\n{notes}\n</aside>\n</section>'


def sections(text: str) -> Iterator[Section]:
    """The parts of a lesson under its headings of the first and the second level."""
    parts = re.split(r"(?:^## |\A# )(.+)$", text, flags=re.MULTILINE)[1:]
    yield from map(Section, parts[::2], parts[1::2])


def paragraphs(text: str) -> list[str]:
    """The paragraphs and lists of a text without figures, code and tables."""
    text = re.sub(r"^#+ (.*)$", r"**\1**", BLOCK.sub("", text), flags=re.MULTILINE)
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def slides_of(section: Section, folder: Path) -> Iterator[Slide]:
    """What a section shows, in order: a slide for each picture, and all else as much on a slide as there is room for.

    The paragraph before what is shown leads to it: its last sentence is on the slide, and so are sentences in bold.
    """
    heading, made, room, end = f"<h2>{inline(section.heading)}</h2>", [], 0.0, 0
    for block in [*BLOCK.finditer(section.text), None]:
        text = paragraphs(section.text[end : block.start() if block else len(section.text)])
        before, lead = (text[:-1], text[-1:]) if block else (text, [])
        if made:
            made[-1].notes.extend(before)
        said = bold(text) + leading(lead) if block and not block["picture"] else bold(text)
        said += text[-1:] if not block and section.heading == PROBLEM and text[-1] not in said else []
        parts = [(f"<p>{inline(each)}</p>", LINE * lines(each, ACROSS) + 2) for each in said]
        if block and not block["picture"]:
            parts.append(exhibit(block, folder))
        elif not block and not made and not said:  # a section of prose
            parts.append((f"<p>{inline(text[0])}</p>", 0))
        high = sum(each for _, each in parts)
        if parts and not (0 < high <= room):
            made.append(Slide(section.heading, heading, [] if made else before))
            room = ROOM
        room -= high
        if parts:
            made[-1] = made[-1]._replace(body="\n".join([made[-1].body, *(part for part, _ in parts)]))
        if block and block["picture"]:
            caption = block["caption"] or block["alternative"]
            bodies = pictures(folder, block["picture"], block["alternative"], caption, inline)
            made += [Slide(section.heading, body, [] if made else before) for body in bodies]
            room = 0.0
        made[-1].notes.extend(lead) if made else None
        end = block.end() if block else end
    yield from made


def bold(text: list[str]) -> list[str]:
    """The sentences in bold."""
    found = [" ".join(each.split()) for part in text for each in re.findall(r"\*\*(.+?)\*\*", part, flags=re.DOTALL)]
    return [each for each in found if len(each.split()) >= SENTENCE and each.endswith((".", "?", "!"))]


def leading(text: list[str]) -> list[str]:
    """The last sentence of a paragraph, or two if it is short, unless it is in bold; of a list, nothing."""
    if not text or text[0].startswith(("- ", "1. ")):
        return []
    *others, last = re.split(r"(?<=[.?!])\s+(?=[A-Z*`(])", " ".join(text[0].split()))
    if len(last) < SHORT and others:
        last = f"{others[-1]} {last}"
    return [] if "**" in last else [last]


def exhibit(block: re.Match, folder: Path) -> tuple[str, float]:
    """A table, an example, commands or code as HTML, and how high that is."""
    if block["table"]:
        rows = [re.split(r"(?<!\\)\|", row.strip().strip("|")) for row in block["table"].splitlines()]
        cells = ["".join(f"<td>{inline(cell)}</td>" for cell in row) for row in (rows[0], *rows[2:])]
        high = sum(ROW * lines(re.sub(r"<.*?>", "", row), CELLS) for row in cells) + 3
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>", high
    text = textwrap.dedent(block["code"] or block["example"]).rstrip()
    where, code = in_context(text + "\n", folder) if block["language"] == "python" else ("", html.escape(text))
    plain = html.unescape(re.sub(r"<.*?>", "", code)).splitlines()
    size = min(LARGEST, LETTERS / max(map(len, plain)), (ROOM - 12) / MONO / len(plain))
    label = f'<p class="where">{where}</p>' if where else ""
    high = size * MONO * len(plain) + (8 if where else 5)
    return f'{label}<pre style="font-size: {size:.2f}vh">{code}</pre>', high


def lines(text: str, width: int) -> int:
    return -(-len(text) // width)


def inline(text: str) -> str:
    """A paragraph of Markdown as HTML: code, bold, italics; of links the text alone; the items of a list on lines."""
    text = re.sub(r"(?:\n *|\A)- ", "\0• ", re.sub(r"\n(?= *\d+\. )", "\0", text))
    text = html.escape(" ".join(text.split()), quote=False).lstrip("\0").replace("\0", "<br>")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"(?<![\w*])\*([^*]+)\*(?![\w*])", r"<i>\1</i>", text)
