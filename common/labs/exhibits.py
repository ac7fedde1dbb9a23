"""What slides show in HTML: tables, examples, commands and code, and the Markdown of paragraphs."""

import html
import math
import re
import textwrap
from pathlib import Path

from common.labs.shown_code import in_context

# Pixels of a slide of 1280 x 720, as slides.html draws it: under the heading; of a table's row
ROOM, ROW = 606, 41
MONO, LARGEST, LABEL, LEAD = 1.4, 22, 26, 209  # of code, its label, text before it
CELLS, LETTERS = 92, 1900  # letters in a line of a table; of code, times its size
UNEVEN = 1.08  # of a table's lines, which end between words


def exhibit(block: re.Match, folder: Path) -> tuple[str, float]:
    """A table, an example, commands or code as HTML, and how high that is."""
    if block["table"]:
        rows = [re.split(r"(?<!\\)\|", row.strip().strip("|")) for row in block["table"].splitlines()]
        cells = [[inline(cell.strip()) for cell in row] for row in (rows[0], *rows[2:])]
        plain = [[len(re.sub(r"<.*?>", "", cell)) for cell in row] for row in cells]
        widths = [max(column) for column in zip(*plain)]
        narrow = sum(widths) / CELLS  # a column then has room for that much less than its longest cell
        narrow = narrow * UNEVEN if narrow > 1 else 1
        high = [max(lines(size * narrow, max(width, 1)) for size, width in zip(row, widths)) for row in plain]
        body = "".join("<tr><td>" + "</td><td>".join(row) + "</td></tr>" for row in cells)
        return f"<table>{body}</table>", sum(ROW + (ROW - 11) * (most - 1) for most in high) + 16
    text = fitted(textwrap.dedent(block["code"] or block["example"]).rstrip(), block["language"])
    where, code = in_context(text + "\n", folder) if block["language"] == "python" else ("", html.escape(text))
    plain = html.unescape(re.sub(r"<.*?>", "", code)).splitlines()
    size = min(LARGEST, LETTERS / max(map(len, plain)), (ROOM - LEAD) / MONO / len(plain))
    label = f'<p class="where">{where}</p>' if where else ""
    high = size * MONO * len(plain) + 32 + (LABEL if where else 0)
    most = min(LETTERS / max(map(len, plain)), 1.4 * LARGEST)
    return f'{label}<pre style="--own: {size:.1f}px; --most: {max(most, size):.1f}px">{code}</pre>', high


def fitted(text: str, language: str | None) -> str:
    """Commands in lines that can be read from the last row, and a table without needless blanks between its columns."""
    width = int(LETTERS / LARGEST)
    if language == "bash":
        return "\n".join(command_lines(line, width) for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines())
    rows = text.splitlines()
    if language or max(map(len, rows)) <= width or "|" in text:  # in a diagram, blanks are time
        return text
    wide = [row.ljust(max(map(len, rows))) for row in rows if row.strip()]
    blank = [all(row[at] == " " for row in wide) for at in range(len(wide[0]))]
    kept = [at for at in range(len(blank)) if not all(blank[max(0, at - 2) : at + 1])]
    return "\n".join("".join(row[at] for at in kept if at < len(row)).rstrip() for row in rows)


def command_lines(command: str, width: int) -> str:
    """A command in lines of `width`, broken before flags as a shell reads them."""
    found = [""]
    for word in re.split(r" (?=--|\| |>)", command):
        if found[-1] and len(found[-1]) + len(word) + 3 > width:
            found.append("   ")
        found[-1] += " " + word if found[-1] else word
    return " \\\n".join(found)


def lines(letters: float, width: int) -> int:
    return math.ceil(letters / width)


def inline(text: str) -> str:
    """A paragraph of Markdown as HTML: code, bold, italics; of links the text alone; an item of a list with its dot."""
    text = re.sub(r"\A- ", "• ", re.sub(r"^> ?", "", text, flags=re.MULTILINE))
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`]+)`|\\([*_`|~#<>\[\]])", literal, text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"(?<![\w*])\*([^*]+)\*(?![\w*])", r"<i>\1</i>", text)


def literal(found: re.Match) -> str:
    """Code, or a character after a backslash, in which a star is a star."""
    code = f"<code>{found[1]}</code>".replace("\\|", "|") if found[1] else found[2]
    return code.replace("*", "&#42;").replace("_", "&#95;")
