"""A lesson's picture on a slide: as large as the slide allows, in parts if it is still too small, with its caption."""

import base64
import html
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

# Of a slide of 1280 x 720 pixels, as slides.html draws it: what a picture has beside, and above, its caption
BESIDE, ABOVE, LINE, LETTERS = (900, 670), (1220, 640), 26, 120
SMALLEST = 0.62  # of a picture's own size; its smallest words, 9 points at 120 dots an inch, are then 9 pixels high
GAP = 8  # empty rows between which a picture may be cut


def pictures(folder: Path, path: str, alternative: str, caption: str, inline: Callable[[str], str]) -> Iterator[str]:
    """The picture, in HTML for each slide that it takes; then the same as an animation, if the caption names one."""
    moving = re.search(r"\[As\s+an\s+animation\]\((\S+?\.gif)\)", caption)
    words = re.sub(r"\s*\(?\[As\s+an\s+animation\]\(\S+?\)\.?\)?", "", caption)
    for file in (path, *([moving[1]] if moving else [])):
        for data, size in parts(folder / file, len(words)):
            beside = scale(size, BESIDE) > scale(size, above(len(words)))
            image = f'<img alt="{html.escape(alternative)}" src="data:image/{Path(file).suffix[1:]};base64,{data}">'
            kind = ' class="beside"' if beside else ""
            yield f"<figure{kind}>{image}<figcaption>{inline(words)}</figcaption></figure>"


def above(letters: int) -> tuple[float, float]:
    """The room above a caption."""
    return ABOVE[0], ABOVE[1] - LINE * -(-letters // LETTERS)


def scale(size: tuple[int, int], room: tuple[float, float]) -> float:
    return min(room[0] / size[0], room[1] / size[1])


def parts(file: Path, letters: int) -> list[tuple[str, tuple[int, int]]]:
    """A picture's bytes in base64, and its size; of one that would be too small, those of its upper and lower half."""
    from PIL import Image

    with Image.open(file) as image:
        size = image.size
        small = max(scale(size, BESIDE), scale(size, above(letters))) < SMALLEST
        cut = middle(image) if small and file.suffix == ".png" else None
        if cut is None:
            return [(base64.b64encode(file.read_bytes()).decode(), size)]
        found = []
        for top, bottom in ((0, cut), (cut, size[1])):
            half = image.crop((0, top, size[0], bottom))
            half.save(stored := io.BytesIO(), "PNG", optimize=True)
            found.append((base64.b64encode(stored.getvalue()).decode(), half.size))
        return found


def middle(image) -> int | None:
    """The row nearest to the middle of a picture at which it can be cut: `GAP` rows around it are empty."""
    empty = (numpy.asarray(image.convert("L")) > 250).all(axis=1)
    half = GAP // 2
    rows = [row for row in range(half, len(empty) - half) if empty[row - half : row + half].all()]
    return min(rows, key=lambda row: abs(row - len(empty) / 2), default=None)
