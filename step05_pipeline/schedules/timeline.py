"""What each rank does when, simulated or measured, as a picture, as text and in numbers."""

import math
from pathlib import Path

from common.drawing.figures import COLOURS, write_png
from common.drawing.lanes import Lane, Span, panels_of_lanes
from step05_pipeline.schedules.simulator import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "input's gradient", "W": "weights' gradient"}
LIGHTEST = 0.55  # how much white is in the colour of a rank's last chunk
COLUMNS = 400  # of text, at most

# ---- a picture -------------------------------------------------------------------------------------------------------


def draw(timelines: dict[str, Timeline], path: str | Path, unit: str = "time of a forward", end: float = 0) -> Path:
    """Draw timelines above each other on one axis of time, each from its own start on. Returns the path.

    Args:
        timelines: by title. Boxes show the micro-batch if it fits; a rank's later chunks have lighter colours.
        unit: the unit of their times, for the axis.
        end: of the axis, if that is later than the end of the longest.

    Raises UsageError if `path` cannot be written.
    """
    names = {name: name for name in (*NAMES.values(), "idle")}
    panels = [(title, lanes_of(each)) for title, each in timelines.items()]
    return write_png(panels_of_lanes(panels, unit, names, row=0.29, end=end), path)


def lanes_of(timeline: Timeline, names: bool = False) -> list[Lane]:
    """A lane for each rank; with `names`, boxes show `F0` instead of `0`."""
    from matplotlib.colors import to_rgb

    chunks, result = 1 + max(action.chunk for row in timeline.spans for action, _, _ in row), []
    for rank, row in enumerate(timeline.spans):
        spans = [Span(0, timeline.makespan, "idle")]
        for action, begin, end in row:
            look, white = NAMES[action.kind], LIGHTEST * action.chunk / max(1, chunks - 1)
            if white:
                look = tuple(part + (1 - part) * white for part in to_rgb(COLOURS[look]))
            words = str(action) if names else str(action.micro_batch)
            spans.append(Span(begin - timeline.start, end - begin, look, words))
        result.append(Lane(f"rank {rank}", spans))
    return result


# ---- text ------------------------------------------------------------------------------------------------------------


def text(timeline: Timeline) -> str:
    """The timeline as one line per rank. A box ends in a blank, and dots are idle time:

        rank 0  F0 F1 ......B0--- ...B1---
        rank 1  ...F0 B0--- F1 B1---

    The shortest action is as wide as the longest name, or narrower, so that a line has at most about COLUMNS
    characters. A name that does not fit is cut to its kind.
    """
    scale = scale_of(timeline)
    lines = []
    for rank, row in enumerate(timeline.spans):
        line = ""
        for action, *times in row:
            # halves are always rounded up
            left, right = (int((time - timeline.start) * scale + 0.5 + 1e-9) for time in times)
            line += "." * (left - len(line))
            place = right - len(line)
            name = str(action) if len(str(action)) < place else action.kind
            line += (name.ljust(place - 1, "-") + " ")[:place] if place > 1 else name[:place]
        lines.append(f"rank {rank}  {line.rstrip()}")
    return "\n".join(lines)


def scale_of(timeline: Timeline) -> float:
    """How many characters a unit of time has in `text`; a whole number if all times are whole numbers."""
    spans = [span for row in timeline.spans for span in row]
    shortest, longest_name = min(end - start for _, start, end in spans), max(len(str(each)) for each, _, _ in spans)
    columns = min(longest_name + 1, max(1, int(COLUMNS * shortest / timeline.makespan)))  # of the shortest action
    scale = columns / shortest
    whole = all(float(time - timeline.start).is_integer() for _, *times in spans for time in times)
    return math.ceil(scale) if whole and math.ceil(scale) * timeline.makespan <= COLUMNS else scale


def summary(timeline: Timeline) -> str:
    """What the timeline costs, in numbers."""

    def by_rank(numbers: list[int]) -> str:
        return "/".join(map(str, numbers))

    lines = [
        f"makespan    {timeline.makespan:.4g} = work of a rank {timeline.ideal:.4g} + bubble {timeline.bubble:.4g}",
        f"bubble      {timeline.bubble_ratio:.1%} of the work: efficiency {timeline.efficiency:.1%}",
        f"in flight   {by_rank(timeline.in_flight)}   pairs (micro-batch, stage) between F and B or I",
    ]
    if timeline.makespan - timeline.span > 1e-9 * timeline.makespan:
        within = f"{timeline.span:.4g} within each rank, bubble {timeline.span - timeline.ideal:.4g}"
        lines.insert(2, f"staggered   {within}, if no rank waits for the others")
    if any(timeline.stores):
        lines.append(f"stores      {by_rank(timeline.stores)}   between I and W")
        lines.append(f"unfinished  {by_rank(timeline.unfinished)}   between F and B or W")
    return "\n".join(lines)
