"""What a slide says of a table that is on an earlier one: there is no "table above", so it says where the table is."""

import re

TABLE = re.compile(  # its columns are apart by blanks, in two lines
    r"<table|<pre[^>]*>(?:[^<\n]*\n)*?[^<\n]*\S {3,}\S[^<\n]*\n[^<\n]*\S {3,}\S"
)
POINTS = re.compile(
    r"\b(?P<whole>[Tt]he table above)\b|\b(?P<the>[Tt]he) table's (?P<part>(?:first|last) \w+)"
    r"|\b(?P<rows>[Tt]he (?:first|last) (?:two |three |four )?rows?|[Tt]he row <i>\w+</i>)(?! of)"
)


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


def where_tables_are(items: list, places: list[tuple[int, int]]) -> list:
    """Items of slides (`slides.Item`) whose paragraphs say on which slide the table of their section is.

    `places` are the first item of each slide, and the one after its last.
    """
    slide_of = [number for number, (start, end) in enumerate(places, 1) for _ in range(start, end)]
    found, table = [], None
    for at, item in enumerate(items):
        if table is not None and items[table].section == item.section and slide_of[table] < slide_of[at]:
            before = slide_of[table] == slide_of[at] - 1
            where = "on the slide before" if before else f"on slide {slide_of[table]}"
            longer = item.longer and (said_of_table(item.longer[0], where), item.longer[1])
            item = item._replace(body=said_of_table(item.body, where), longer=longer)
        found.append(item)
        table = at if is_table(item.body) else table
    return found
