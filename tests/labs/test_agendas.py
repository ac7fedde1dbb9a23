"""The minutes of teaching.md are those of the lessons and of their slides as they are now."""

import functools
import re

import pytest

from common.experiments.lesson_times import WORDS_PER_MINUTE, words
from common.labs import find, slides

TEXT = (find.ROOT / "common/labs/teaching.md").read_text(encoding="utf-8")
PER_MINUTE = int(re.search(r"words / (\d+)", slides.LOOKS.read_text(encoding="utf-8"))[1])  # in the window of notes
COLUMNS = (  # of the table, by the sections at which they begin; a lesson may have one more, after one of these
    "# ",
    "## Try it",
    "## The code, top to bottom",
    "## What it costs",
    "## When to use it",
    "## Exercises",
)
ONE = re.compile(r"slide (\d+) of slides (\d)")
SHOWN = re.compile(r'slides (\d), to "([^"]+)"((?:(?:,|,? without| and) "[^"]+")*)')  # what an agenda says of a slot
QUESTIONS = 15  # minutes for the room's questions, at the beginning of a session


def minutes_of_sections(step: str) -> list[int]:
    """A lesson's minutes of reading, by the columns of the table."""
    (lesson,) = find.ROOT.glob(f"step0{step}*/README.md")
    text = lesson.read_text(encoding="utf-8")
    starts = [re.search(f"^{column}", text, re.MULTILINE).start() for column in COLUMNS]
    assert starts == sorted(starts)
    parts = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]
    return [round(words(part) / WORDS_PER_MINUTE) for part in parts]


@functools.cache
def spoken(step: str) -> list[tuple[str, str, float]]:
    """For each slide, its section, its heading, and the minutes that its notes take."""
    (folder,) = find.ROOT.glob(f"step0{step}*")
    items, found = slides.items_of_lesson(folder), []
    for start, end in slides.divided(items):
        drawn = slides.drawn(items, start, end, "")
        heading = re.search(r"<h[12]>(.*?)</h[12]>", drawn)[1]
        notes = re.sub(r"<.*?>", " ", drawn.split("<aside>")[1]).split()
        found.append((items[start].section, heading, len(notes) / PER_MINUTE))
    return found


def shown(step: str, last: str, without: str = "") -> float:
    """The minutes of a lesson's slides to the last one that has a heading, without those of some headings."""
    all_slides, left_out = spoken(step), re.findall('"([^"]+)"', without)
    headings = [heading for _, heading, _ in all_slides]
    assert last in headings and set(left_out) <= set(headings), (step, last, without)
    end = len(headings) - headings[::-1].index(last)
    return sum(minutes for _, heading, minutes in all_slides[:end] if heading not in left_out)


def code_minutes(step: str) -> float:
    return sum(minutes for section, _, minutes in spoken(step) if section == "The code, top to bottom")


def agenda(title: str) -> str:
    return TEXT.split(f"\n## {title}")[1].split("\n## ")[0]


def slots_in_hours(title: str) -> list[tuple[int, str]]:
    return [(int(minutes), row) for minutes, row in re.findall(r"^\| (\d+) \|(.*)$", agenda(title), re.MULTILINE)]


@pytest.mark.parametrize("step", "12345678")
def test_the_table_is_what_the_lessons_take_to_read(step):
    (row,) = re.findall(rf"^\| {step} [\w ]+ \| (.*) \| \d+(?: s)? \|$", TEXT, re.MULTILINE)
    assert [int(cell.removesuffix(" min")) for cell in row.split(" | ")] == minutes_of_sections(step)


@pytest.mark.parametrize("title, total", [("Ninety minutes", 90), ("Half a day", 240)])
def test_a_slot_holds_what_is_said_of_its_slides(title, total):
    slots = slots_in_hours(title)
    assert sum(minutes for minutes, _ in slots) == total
    found = [(minutes, shown(*match.groups())) for minutes, row in slots if (match := SHOWN.search(row))]
    assert len(found) >= 3 and all(said <= minutes for minutes, said in found), found
    typed = [
        (minutes, shown(*match.groups())) for minutes, row in slots if "block" in row and (match := SHOWN.search(row))
    ]
    assert typed and all(said + 3 <= minutes for minutes, said in typed), typed  # for commands


@pytest.mark.parametrize("title", ["Ninety minutes", "Half a day"])
def test_they_end_on_the_picture_of_all_dimensions(title):
    minutes, row = slots_in_hours(title)[-1]
    slide, step = ONE.search(row).groups()
    (picture,) = (find.ROOT / "step08_5d/README.md").read_text(encoding="utf-8").split("\n## ")[0].split("![")[1:]
    (folder,) = find.ROOT.glob(f"step0{step}*")
    items = slides.items_of_lesson(folder)
    start, end = slides.divided(items)[int(slide) - 1]
    assert f'alt="{picture.split("]")[0]}"' in slides.drawn(items, start, end, "")
    assert spoken(step)[int(slide) - 1][2] + 3 <= minutes  # for the room


def test_what_an_agenda_leaves_out_is_compared_by_no_slide():
    for row in re.findall(r"^\|.*without.*$", TEXT, re.MULTILINE):
        assert ("ZB-H1" in row) == ("The four side by side" in row)


def test_prose_says_what_the_slots_hold():
    half_day = [shown(*match.groups()) for match in SHOWN.finditer(agenda("Half a day"))]
    said = re.search(r"what is left of lessons 1, 2, 3 and 5 takes (\d+), (\d+), (\d+) and (\d+) minutes", TEXT)
    assert all(abs(int(minutes) - exact) < 1 for minutes, exact in zip(said.groups(), half_day[:4], strict=True))
    code = [code_minutes(step) for step in "12345678"]
    least, most = map(int, re.search(r"take between (\d+) and (\d+) minutes", agenda("Four weeks")).groups())
    assert abs(least - min(code)) < 1 and abs(most - max(code)) < 1


def test_two_days_hold_what_is_said_of_their_slides():
    times = slots_in_hours("Two days")
    begins = [begin for begin, _ in times] + [180]
    length = {begin: end - begin for begin, end in zip(begins, begins[1:])}
    rows = [(length[begin], row) for begin, row in times if "slides" in row]
    found = [(length, match[1], shown(*match.groups())) for length, row in rows for match in SHOWN.finditer(row)]
    assert sorted(step for _, step, _ in found) == list("12345678")
    assert all(said + 3 <= minutes for minutes, _, said in found), found
    assert {length[begin] for begin, row in times if row.startswith(" labs")} == {40}


def test_sessions_of_four_weeks_have_time_for_code_and_lab():
    labs = find.all_labs()
    weeks = re.findall(r"^\| \d \| lessons (\d), (\d) \| `([\w-]+)`, `([\w-]+)` \|", agenda("Four weeks"), re.MULTILINE)
    assert len(weeks) == 4
    for *lessons, one, other in weeks:
        for step, lab in zip(lessons, (one, other)):
            assert QUESTIONS + code_minutes(step) + labs[lab].minutes <= 90, (step, lab)
