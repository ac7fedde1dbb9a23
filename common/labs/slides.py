"""A lesson as slides: figures, tables, worked examples, code and commands, each with the sentence that carries it.

    python -m common.labs slides          # all steps, into runs/slides
    python -m common.labs slides 3

The file needs no network. Arrow keys, space and Page Down lead through it, Home and End to its ends. A number and
Enter go to that slide, and so does #41 at the end of the address. f fills the screen, and n opens a window with notes
for who speaks: what the lesson says between this slide and the next.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.labs.exhibits import ROOM, exhibit, inline, lines
from common.labs.pictures import pictures
from common.labs.references import is_picture, where_things_are
from common.labs.sentences import (
    COMMANDS,
    COUNTED,
    LEADING,
    NUMBERS,
    POINTS_BACK,
    begins_back,
    captions,
    first_sentences,
    is_item,
    points,
    split,
)

LOOKS = Path(__file__).with_name("slides.html")  # style and script
LEFT_OUT = ("Exercises", "Answers")  # sections that give the exercises away
# Pixels of a slide of 1280 x 720, as LOOKS draws it: of a line, of a heading, of the title; letters in a line of text
LINE, SPACE, HEADING, TITLE, ACROSS = 34, 14, 52, 130, 92
MOST = 40  # items of a slide, shown or not
MORE, WHOLE = 180, 480  # letters of an item of a list, and of a paragraph, where there is room
# How bad it is that a section, a topic, or the first topic of a section begins in the middle of a slide
SECTION, TOPIC, FIRST = 0.9, 0.5, 0.12
TORN = 0.5  # how bad a heading at the foot of a slide is, if what stands under it goes on
FILLED = 0.62  # of a slide: one that has less gets more of what the lesson says there
BLOCK = re.compile(
    r"^!\[(?P<alternative>.*?)\]\((?P<picture>\S+?)\)(?:\n+\*(?P<caption>[^*]+)\*)?"
    r"|^```(?P<language>\w*)\n(?P<code>.*?)^```|(?P<example>(?:^    [^\n]*\n)+)|(?P<table>(?:^\|[^\n]*\n)+)",
    flags=re.MULTILINE | re.DOTALL,
)
PROBLEM = "The problem"  # what the lesson answers: its last paragraph is the question
MOVES = "The picture of the slide before, in motion. It needs no key: let it run once, and then say what happens."
LOWER = "The lower half of the picture on the slide before."
BEFORE = "As on the slide before: "
NOT_ALONE = re.compile(r"arXiv|\A\[|\?\*?\Z")  # sources, links, and questions without an answer
SHARES = re.compile(r"[*]*The (?:other|rest|remaining|latter|second|third|last)\b")  # what was said of the others
ANIMATION = r"\s*\(?\[As\s+an\s+animation\]\((\S+?\.gif)\)\.?\)?"


class Section(NamedTuple):
    """What stands under one heading of a lesson, and under one of that section's own headings."""

    heading: str
    topic: str
    text: str


class Item(NamedTuple):
    """A paragraph, or what is shown between paragraphs."""

    section: str
    topic: str
    body: str  # HTML
    high: float  # pixels
    shown: bool  # in any case; otherwise only where a slide has room for it
    notes: str = ""  # Markdown
    follows: bool = False  # it stands on the slide of what is before it
    longer: tuple[str, float] | None = None  # the same at more length, where there is room for it

    @property
    def place(self) -> tuple[str, str]:
        return self.section, self.topic


def write_slides(step_folder: Path, out: Path) -> Path:
    """Write the slides of the lesson in `step_folder` to the file `out`, whose folder is made, and return it."""
    items = items_of_lesson(step_folder)
    lesson, places = items[0].section, divided(items)
    items = where_things_are(items, places)
    body = "\n".join(drawn(items, start, end, lesson) for start, end in places)
    page = LOOKS.read_text(encoding="utf-8").replace("TITLE", html.escape(lesson)).replace("SLIDES", body)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def items_of_lesson(step_folder: Path) -> list[Item]:
    """What the slides of a lesson are made of, in order; its title with its first paragraph comes first."""
    text = (step_folder / "README.md").read_text(encoding="utf-8")
    parts = sections(re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL))
    shown = [part for part in parts if not part.heading.startswith(LEFT_OUT)]
    opening = (shown[0].heading, PROBLEM)
    first, *others = [item for part in shown for item in items_of(part, step_folder, opening)]
    title = f"<h1>{inline(first.section)}</h1>\n{first.body}"
    return [first._replace(body=title, high=first.high + TITLE, shown=True), *others]


def sections(text: str) -> Iterator[Section]:
    """The parts of a lesson under its headings."""
    heading = ""
    for mark, title, part in re.findall(r"(?:^|\A)(##?|###) (.+)\n((?:(?!^##).*\n?)*)", text, flags=re.MULTILINE):
        topic, heading = (title, heading) if mark == "###" else ("", title)
        yield Section(heading, topic, part)


def paragraphs(text: str) -> list[str]:
    """The paragraphs and the items of lists in a text without figures, code and tables."""
    parts = re.split(r"\n\s*\n|\n(?=- |\d+\. )", BLOCK.sub("", text))
    return [part.strip() for part in parts if part.strip()]


def items_of(section: Section, folder: Path, opening: tuple[str, ...] = (PROBLEM,)) -> Iterator[Item]:
    """What a section says and shows, in order; of sections in `opening`, the first sentences are always said."""
    place, end, follows = (section.heading, section.topic), 0, False
    promised = NUMBERS[found[1].lower()] if (found := COUNTED.match(section.topic)) else 0  # by the heading
    for block in [*BLOCK.finditer(section.text), None]:
        text = paragraphs(section.text[end : block.start() if block else len(section.text)])
        lone = bool(section.topic) and not end and not block  # nothing is shown under this heading
        said_of, is_meant = [], False
        for number, each in reversed(list(enumerate(text))):
            last = number == len(text) - 1
            leads = before_list(text, number)
            leads |= last and bool(block and not block["picture"] or not block and section.heading == PROBLEM)
            opens = not number and not end and (lone or section.heading in opening)
            leading = COMMANDS if last and block and block["language"] == "bash" else LEADING
            said_of.insert(0, points(each, leads, opens, is_meant, leading))
            if not end and number < promised:
                said_of[0] = [each] if len(each) <= WHOLE else said_of[0] or [first_sentences(each)]
            is_meant = begins_back(each, said_of[0])
        for number, (each, said) in enumerate(zip(text, said_of)):
            longer = said_as([whole]) if said and (whole := at_length(each)) else None
            yield Item(*place, *said_as(said or [first_sentences(each)]), bool(said), each, follows, longer)
            follows = before_list(text, number)
        follows = bool(text)
        if block and block["picture"]:
            yield from pictured(block, folder, place)
        elif block:
            yield Item(*place, *exhibit(block, folder), shown=True, follows=follows)
        end, follows = block.end() if block else end, False


def at_length(paragraph: str) -> str:
    """What a slide with room says of a paragraph: all, or more of an item of a list. "" if that is too much."""
    if is_item(paragraph):
        return first_sentences(paragraph, MORE)
    return paragraph if len(paragraph) <= WHOLE and not paragraph.startswith(">") else ""


def before_list(text: list[str], number: int) -> bool:
    """Whether a paragraph introduces a list."""
    return not is_item(text[number]) and number + 1 < len(text) and is_item(text[number + 1])


def said_as(sentences: list[str]) -> tuple[str, float]:
    """Paragraphs of a slide as HTML, and how high they are."""
    high = sum(LINE * lines(len(each), ACROSS) + SPACE for each in sentences)
    return "\n".join(f"<p>{inline(each)}</p>" for each in sentences), high


def pictured(block: re.Match, folder: Path, place: tuple[str, str]) -> Iterator[Item]:
    """A picture, its second half if it has one, and its animation."""
    caption = block["caption"] or block["alternative"]
    moving = re.search(ANIMATION, caption)
    words = re.sub(ANIMATION, "", caption)
    notes = words
    drawings = pictures(folder, block["picture"], block["alternative"], captions(words), moving and moving[1], inline)
    for drawing in drawings:
        yield Item(*place, drawing.body, drawing.high, True, MOVES if drawing.moves else notes)
        notes = LOWER


def divided(items: list[Item]) -> list[tuple[int, int]]:
    """The first item of each slide, and the one after its last, so that slides are filled and topics stay together."""
    best, begins = [0.0], [0]
    torn = [0.3 * (item.shown and points_back(items, at)) for at, item in enumerate(items)]
    for end in range(1, len(items) + 1):
        costs = {start: best[start] + cost(items, start, end) + torn[start] for start in range(max(0, end - MOST), end)}
        begins.append(min(costs, key=costs.get))
        best.append(costs[begins[-1]])
    found, end = [], len(items)
    while end:
        found.append((begins[end], end))
        end = begins[end]
    return found[::-1]


def cost(items: list[Item], start: int, end: int) -> float:
    """How bad a slide of these items is; 0.1 for a good one, so that fewer slides are better."""
    part = items[start:end]
    changes = [(a, b) for a, b in zip(part, part[1:]) if a.place != b.place]
    high = HEADING * len(changes) + sum(item.high for item in part if item.shown)
    filled = min(FILLED, (high + sum(item.high for item in part if not item.shown)) / ROOM) / FILLED
    crowded = max(0, high - ROOM) + 1000 * max(0, sum(is_picture(item.body) for item in part) - 1)
    bad = 0.1 + (1 - filled) ** 2 + 1000 * (crowded / ROOM + items[start].follows)
    bad += sum(SECTION if a.section != b.section else TOPIC if a.topic else FIRST for a, b in changes)
    if changes and end < len(items):  # what begins below another heading should end there
        (before, last), goes_on = changes[-1], items[end]
        new_section = before.section != last.section
        bad += TORN * (goes_on.section == last.section if new_section else goes_on.place == last.place)
    return (
        bad
        + 0.15 * (start > 0 and items[start - 1].place == items[start].place)
        + 0.02 * (not items[start].shown)
        + 0.3 * (start > 0 and is_item(items[start].notes) and is_item(items[start - 1].notes))
    )


def points_back(items: list[Item], at: int) -> bool:
    """Whether an item's first words point at what is before it under the same heading."""
    same = at > 0 and items[at - 1].place == items[at].place and not is_item(items[at].notes)
    first = inline(split(items[at].notes)[0]) if same and items[at].notes and not is_picture(items[at].body) else ""
    return bool(first) and first in items[at].body and bool(POINTS_BACK.match(items[at].notes))


def drawn(items: list[Item], start: int, end: int, lesson: str) -> str:
    """A slide of these items, filled from its own paragraphs, with its notes, which the page hides."""
    part, chosen = items[start:end], []
    room = FILLED * ROOM - sum(item.high for item in part if item.shown)
    for before, item in zip([None, *part], part):
        alone = not POINTS_BACK.match(item.notes) or before in chosen and ends_with_its_end(before)
        if item.shown or room > 0 and alone and not NOT_ALONE.search(item.notes):
            chosen.append(item)
            room -= 0 if item.shown else item.high
    for at, item in enumerate(chosen):
        more = item.longer[1] - item.high if item.longer else 0
        back = not begins(item) and SHARES.match(item.notes) and not (at and ends_with_its_end(chosen[at - 1]))
        if 0 < more and room > 0 and not back:
            chosen[at] = item._replace(body=item.longer[0])
            room -= more
    body, place = [], None
    for item in chosen:
        if place is None and start or place not in (None, item.place):
            level = 2 if place is None else 3
            body.append(f"<h{level}>{inline(item.topic or item.section)}</h{level}>")
        place = item.place
        body.append(item.body)
    notes = [item.notes for item in part if item.notes] or [BEFORE + next(i.notes for i in items[start::-1] if i.notes)]
    said = "\n".join(f"<p>{inline(each)}</p>" for each in notes)
    section = chosen[0].section if start else ""
    footer = " · ".join(dict.fromkeys(filter(None, (inline(lesson), inline(section)))))
    shown = "\n".join(body)
    return f'<section data-place="{footer}">\n{shown}\n<aside>\n{said}\n</aside>\n</section>'


def begins(item: Item) -> bool:
    """Whether a slide says a paragraph's first sentence in any case."""
    return inline(split(item.notes)[0]) in item.body


def ends_with_its_end(item: Item) -> bool:
    """Whether a slide says the end of a paragraph, at which the next one may point."""
    return not item.notes or is_picture(item.body) or inline(split(item.notes)[-1]) in item.body
