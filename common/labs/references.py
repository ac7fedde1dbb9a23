"""What a slide says of tables and pictures on earlier ones: there is no "table above", so it says where that is."""

import re

TABLE = re.compile(  # its columns are apart by blanks, in two lines
    r"<table|<pre[^>]*>(?:[^<\n]*\n)*?[^<\n]*\S {3,}\S[^<\n]*\n[^<\n]*\S {3,}\S"
)
POINTS = re.compile(
    r"\b(?P<whole>[Tt]he table above)\b|\b(?P<the>[Tt]he) table's (?P<part>(?:first|last) \w+)"
    r"|\b(?P<rows>[Tt]he (?:first|last) (?:two |three |four )?rows?|[Tt]he row <i>\w+</i>)(?! of)"
)
PICTURED = re.compile(
    r"\b(?P<whole>[Tt]he (?:first )?picture)(?: above)?(?![\w' ]*\b(?:of|on|with|is)\b)\b(?!')|\b(?P<panel>panel \d)\b"
    r"|\b(?P<the>[Tt]he) (?:picture|figure)'s (?P<part>(?:\w+ )?(?:timeline|half|side|titles?))\b"
)
DIAGRAM = re.compile(r"\b(?P<whole>[Tt]he diagram) above\b")


def is_table(body: str) -> bool:
    """Whether an item of a slide, in HTML, is a table, or text that is set as one."""
    return bool(TABLE.search(body))


def said_of_table(body: str, where: str) -> str:
    """A paragraph in HTML, in which a table is the one `where` it can be seen, such as "on the slide before"."""

    def named(found: re.Match) -> str:
        if found["whole"]:
            return f"{found['whole'].removesuffix(' above')} {where}"
        if found["part"]:
            return f"{found['the']} {found['part']} of the table {where}"
        return f"{found['rows']} of the table {where}"

    speaks_of_next = re.match(r"<p>(?:Here|These) (?:is|are)\b", body)
    return POINTS.sub(named, body) if body.startswith("<p>") and not speaks_of_next else body


def said_of_picture(body: str, where: str, what: re.Pattern = PICTURED) -> str:
    """A paragraph in HTML, in which a picture is the one `where` it can be seen; this is said once."""

    def named(found: re.Match) -> str:
        parts = found.groupdict()
        if parts.get("the"):
            return f"{parts['the']} {parts['part']} of the picture {where}"
        return f"{parts['whole'] or parts['panel'] + ' of the picture'} {where}"

    return what.sub(named, body, count=1) if body.startswith("<p>") else body


def where_things_are(items: list, places: list[tuple[int, int]]) -> list:
    """Items of slides (`slides.Item`) whose paragraphs say on which slide a table or a picture is.

    A table is the last one of their section, and so is a picture, or else it is the lesson's first. `places` are the
    first item of each slide, and the one after its last.
    """
    slide_of = [number for number, (start, end) in enumerate(places, 1) for _ in range(start, end)]
    first = next((at for at, item in enumerate(items) if is_picture(item.body)), None)
    found, seen = [], {}
    for at, item in enumerate(items):
        for kind, (is_kind, said) in KINDS.items():
            thing = seen.get((kind, item.section), first if kind == "picture" else None)
            if thing is not None and slide_of[thing] < slide_of[at] and not leads_to_picture(items, at):
                where = on_slides(thing, at, items, slide_of)
                longer = item.longer and (said(item.longer[0], where), item.longer[1])
                item = item._replace(body=said(item.body, where), longer=longer)
            if is_kind(item.body) and not (kind == "picture" and at and is_same_picture(items[at - 1], item)):
                seen[kind, item.section] = at
        found.append(item)
    return found


def on_slides(thing: int, at: int, items: list, slide_of: list[int]) -> str:
    """Where the item `thing` is, as the item `at` would say it: a picture may be on two slides, in halves."""
    end = thing
    while end + 1 < at and is_same_picture(items[end], items[end + 1]) and "data:image/gif" not in items[end + 1].body:
        end += 1
    if slide_of[end] > slide_of[thing]:
        return f"on slides {slide_of[thing]} and {slide_of[end]}"
    return "on the slide before" if slide_of[thing] == slide_of[at] - 1 else f"on slide {slide_of[thing]}"


def is_picture(body: str) -> bool:
    return "<figure" in body


def is_diagram(body: str) -> bool:
    return "<pre" in body


def is_same_picture(before, item) -> bool:
    """Whether an item is the next part of the picture before it, or that picture in motion."""
    alternatives = [re.search(r'<figure[^>]*><img alt="([^"]*)"', each.body) for each in (before, item)]
    return all(alternatives) and alternatives[0][1] == alternatives[1][1]


def leads_to_picture(items: list, at: int) -> bool:
    """Whether the picture of which a paragraph speaks is the one behind it."""
    return at + 1 < len(items) and is_picture(items[at + 1].body) and items[at].notes.rstrip().endswith(":")


KINDS = {  # what shows it, and what paragraphs say of it
    "table": (is_table, said_of_table),
    "picture": (is_picture, said_of_picture),
    "diagram": (is_diagram, lambda body, where: said_of_picture(body, where, DIAGRAM)),
}
