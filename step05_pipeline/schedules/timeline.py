"""What each rank does when, simulated or measured, as a picture, as text and in numbers."""

from pathlib import Path

from common.experiments.figures import COLOURS, new_figure, write_png
from step05_pipeline.schedules.simulator import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "input's gradient", "W": "weights' gradient"}
LIGHTEST = 0.55  # share of white in the colour of a rank's last chunk
WIDTH, ROW = 9.2, 0.29  # inches: of the picture, of a rank
LARGEST, SMALLEST = 9.5, 4.5  # points: of the text in a box
COLUMNS = 400  # of text, at most

# ---- a picture -------------------------------------------------------------------------------------------------------


def draw(timelines: dict[str, Timeline], path: str | Path, unit: str = "time of a forward") -> Path:
    """Draw timelines above each other on one axis of time, each from its own start on. Returns the path.

    Args:
        timelines: by title. Boxes show the micro-batch if it fits; a rank's later chunks have lighter colours.
        unit: the unit of their times, for the axis.

    Raises UsageError if `path` cannot be written.
    """
    from matplotlib.patches import Patch

    ranks = [len(each.spans) for each in timelines.values()]
    longest = max(each.makespan for each in timelines.values())
    height = ROW * sum(ranks) + 0.35 * len(ranks) + 0.75
    shape = {"sharex": True, "squeeze": False, "height_ratios": ranks}
    figure, axes = new_figure(len(ranks), width=WIDTH, height=height, **shape)
    axes = axes[:, 0]
    for axis, (title, timeline) in zip(axes, timelines.items()):
        draw_rows(axis, timeline, longest, inches=0.92 * WIDTH / longest)
        axis.set_title(title, loc="left", fontsize=10.5)
    axes[-1].tick_params(axis="x", length=3)
    axes[-1].set_xlabel(unit, fontsize=9.5)
    used = {action.kind for each in timelines.values() for row in each.spans for action, _, _ in row}
    looks = [NAMES[kind] for kind in "FBIW" if kind in used] + ["idle"]
    handles = [Patch(facecolor=COLOURS[name], label=name) for name in looks]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9.5, frameon=False)
    return write_png(figure, path)


def draw_rows(axis, timeline: Timeline, longest: float, inches: float, names: bool = False) -> None:
    """Draw a row for each rank on an axis of time that ends at `longest`.

    Args:
        inches: of one unit of time in the picture, by which the size of the text is chosen.
        names: write `F0` into a box instead of `0`.
    """
    from matplotlib.colors import to_rgb

    spans = [span for row in timeline.spans for span in row]
    chunks = 1 + max(action.chunk for action, _, _ in spans)
    line = min(0.6, 10 * inches * min(end - begin for _, begin, end in spans))  # a seventh of the smallest box
    for rank, row in enumerate(timeline.spans):
        axis.broken_barh([(0, timeline.makespan)], (rank - 0.45, 0.9), facecolors=COLOURS["idle"])
        boxes = [(begin - timeline.start, end - begin) for _, begin, end in row]
        colours = []
        for action, _, _ in row:
            white = LIGHTEST * action.chunk / max(1, chunks - 1)
            colours.append([part + (1 - part) * white for part in to_rgb(COLOURS[NAMES[action.kind]])])
        axis.broken_barh(boxes, (rank - 0.45, 0.9), facecolors=colours, edgecolors="white", linewidth=line)
        for (left, width), (action, _, _) in zip(boxes, row):
            text = str(action) if names else str(action.micro_batch)
            size = min(LARGEST, width * inches * 72 / (0.62 * len(text) + 0.35))
            if size >= SMALLEST:
                dark = action.chunk < max(1, chunks / 2) and action.kind in "FB"
                colour = "white" if dark else "black"
                axis.text(left + width / 2, rank + 0.03, text, ha="center", va="center", fontsize=size, color=colour)
    axis.set(xlim=(0, longest), ylim=(len(timeline.spans) - 0.5, -0.5))
    axis.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))], fontsize=9.5)
    axis.tick_params(length=0, labelsize=9.5)
    axis.spines[:].set_visible(False)
    axis.grid(False)


# ---- text ------------------------------------------------------------------------------------------------------------


def text(timeline: Timeline) -> str:
    """The timeline as one line per rank: `F0 F1 . . B0---`.

    The shortest action is as wide as the longest name, or narrower, so that a line has at most about COLUMNS
    characters. A name that does not fit is cut to its kind.
    """
    spans = [span for row in timeline.spans for span in row]
    shortest, longest_name = min(end - start for _, start, end in spans), max(len(str(each)) for each, _, _ in spans)
    columns = min(longest_name + 1, max(1, int(COLUMNS * shortest / timeline.makespan)))  # of the shortest action
    lines = []
    for rank, row in enumerate(timeline.spans):
        line = ""
        for action, *times in row:
            # halves are always rounded up
            left, right = (int((time - timeline.start) * columns / shortest + 0.5 + 1e-9) for time in times)
            line += "." * (left - len(line))
            place = right - len(line)
            name = str(action) if len(str(action)) < place else action.kind
            line += (name.ljust(place - 1, "-") + " ")[:place] if place > 1 else name[:place]
        lines.append(f"rank {rank}  {line.rstrip()}")
    return "\n".join(lines)


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
