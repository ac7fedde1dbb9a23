"""A lesson's picture on a slide: as large as the slide allows, in parts if it is still too small, with its caption."""

import base64
import html
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy

from common.labs.sentences import Captions

# Of a slide of 1280 x 720 pixels, as slides.html draws it: what a picture and its caption have under the heading
WIDTH, HEIGHT = 1192, 596
COLUMN, NARROW = 290, 20  # pixels that a caption takes beside a picture, and its letters in a line there
LINE, WIDE = 30, 92  # pixels of a caption's line, and its letters below a picture
SMALLEST = 0.74  # of a picture's own size; its smallest words, 9 points at 120 dots an inch, are then 12 pixels high
LARGER = 1.1  # times, if the caption is beside it
GAP, MIDDLE = (8, 13), (0.37, 0.63)  # empty rows at which a picture may be, and should be cut; and where
FAR = 20  # rows that a cut at the middle is worth, for each height of the picture that it would be away


class Cut(NamedTuple):
    """Where a picture is cut if it must be, which rule `middle` cannot see, and what both of its parts have."""

    at: int  # row
    head: int = 0  # rows at the top that the lower part has, too
    foot: int = 0  # rows at the bottom that the upper part has, too


CUTS = {
    "step06_context_parallel/ring_frames.png": Cut(
        560, head=112
    ),  # arrows cross the border between two ranks; the head names the hops
    "step06_context_parallel/ring_zigzag.png": Cut(560, head=112),
    "step08_5d/step.png": Cut(582, foot=84),  # a legend
    "step06_context_parallel/balance.png": Cut(422, head=49),  # columns have names
}


class Picture(NamedTuple):
    body: str  # HTML
    high: float  # pixels that it needs
    moves: bool  # an animation


def pictures(
    folder: Path,
    path: str,
    alternative: str,
    captions: Captions,
    moving: str | None,
    inline: Callable[[str], str],
) -> Iterator[Picture]:
    """The picture, for each slide that it takes, with its caption; then the same as an animation, if there is one."""
    for file in filter(None, (path, moving)):
        found = parts(folder / file, captions.moving if file == moving else captions.whole)
        said = [captions.moving] if file == moving else [captions.whole] if len(found) == 1 else captions[1:3]
        for words, (data, size) in zip(said, found, strict=True):
            beside, below = rooms(words)
            is_beside = scale(size, beside) > LARGER * scale(size, below)
            image = f'<img alt="{html.escape(alternative)}" src="data:image/{Path(file).suffix[1:]};base64,{data}">'
            kind = ' class="beside"' if is_beside else ""
            high = HEIGHT if is_beside else scale(size, below) * size[1] + HEIGHT - below[1]
            body = f"<figure{kind}>{image}<figcaption>{inline(words)}</figcaption></figure>"
            yield Picture(body, high, file == moving)


def rooms(words: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """What a picture has beside its caption, and above it."""
    beside = WIDTH - COLUMN if len(words) / NARROW * LINE < HEIGHT else 1
    return (beside, HEIGHT), (WIDTH, HEIGHT - LINE * -(-len(words) // WIDE) - 12)


def scale(size: tuple[int, int], room: tuple[float, float]) -> float:
    return min(room[0] / size[0], room[1] / size[1])


def parts(file: Path, words: str) -> list[tuple[str, tuple[int, int]]]:
    """A picture's bytes in base64, and its size; of one that would be too small, those of its upper and lower half."""
    from PIL import Image

    with Image.open(file) as image:
        size = image.size
        small = max(scale(size, room) for room in rooms(words)) < SMALLEST
        cut = (
            (CUTS.get(f"{file.parents[1].name}/{file.name}") or middle(image))
            if small and file.suffix == ".png"
            else None
        )
        if cut is None:
            return [(base64.b64encode(file.read_bytes()).decode(), size)]
        found, end = [], size[1]
        for rows in (((0, cut.at), (end - cut.foot, end)), ((0, cut.head), (cut.at, end))):
            half = stacked([image.crop((0, top, size[0], bottom)) for top, bottom in rows if bottom > top])
            half.save(stored := io.BytesIO(), "PNG", optimize=True)
            found.append((base64.b64encode(stored.getvalue()).decode(), half.size))
        return found


def stacked(strips: list):
    """Strips of one picture as a picture, one below the other."""
    strips = [strip.convert("RGB") for strip in strips]
    from PIL import Image

    whole, top = Image.new("RGB", (strips[0].width, sum(strip.height for strip in strips))), 0
    for strip in strips:
        whole.paste(strip, (0, top))
        top += strip.height
    return whole.quantize(256, dither=Image.Dither.NONE)


def middle(image) -> Cut | None:
    """Where a picture can be cut: at the end of the highest empty stripe near its middle."""
    empty = (numpy.asarray(image.convert("L")) > 250).all(axis=1)
    best, run = (0.0, None), 0
    for row in range(int(MIDDLE[0] * len(empty)), int(MIDDLE[1] * len(empty))):
        run = run + 1 if empty[row] else 0
        if run >= GAP[0]:
            best = max(best, (min(run, GAP[1]) - abs(row / len(empty) - 0.5) * FAR, row), key=lambda each: each[0])
    return Cut(best[1]) if best[1] else None
