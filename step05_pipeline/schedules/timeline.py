"""Pictures of what each rank does when, simulated or measured, one row a rank.

    python -m step05_pipeline.schedules --schedule 1f1b --pp 4 --micro-batches 8 --out 1f1b.png

prints the picture as text, how long the schedule takes, what it wastes and what it keeps. Costs are those of 1/p of the
model, however many stages a rank has, so that schedules can be compared.
"""

import argparse
import sys
from pathlib import Path

from common.command_line import OneLineParser
from common.errors import UsageError
from step05_pipeline.schedules.messages import check
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.schedules.standard import SCHEDULES, Schedule, build, read

# The field's usual colours: forward blue, backward green; of its parts the input's gradient cyan
COLOURS = {"F": "#3B75C4", "B": "#4FA05A", "I": "#4DBCC4", "W": "#EDB047"}
NAMES = {"F": "forward", "B": "backward", "I": "input's gradient", "W": "weights' gradient"}
IDLE = "#EEEEEE"
LIGHTEST = 0.55  # share of white in the colour of a rank's last chunk
WIDTH, ROW = 12.0, 0.3  # inches: of the picture, of a rank
COLUMNS = 400  # of text, at most

# ---- a picture -------------------------------------------------------------------------------------------------------


def draw(timelines: dict[str, Timeline], path: str | Path, unit: str = "time of a forward") -> Path:
    """Draw timelines above each other on one axis of time, each from its own start on. Returns the path.

    Args:
        timelines: by title. Boxes show the micro-batch where it fits, and later chunks of a rank in lighter colours.
        unit: of their times, for the axis.

    Raises UsageError where `path` cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = [len(each.spans) for each in timelines.values()]
    longest = max(each.makespan for each in timelines.values())
    height = ROW * sum(ranks) + 0.35 * len(ranks) + 0.75
    figure = Figure(figsize=(WIDTH, height), dpi=120, layout="constrained")
    axes = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
    for axis, (title, timeline) in zip(axes, timelines.items()):
        _draw(axis, timeline, longest)
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].tick_params(axis="x", length=3)
    axes[-1].set_xlabel(unit, fontsize=9)
    used = {action.kind for each in timelines.values() for row in each.spans for action, _, _ in row}
    looks = [(COLOURS[kind], NAMES[kind]) for kind in "FBIW" if kind in used] + [(IDLE, "idle")]
    handles = [Patch(facecolor=colour, label=name) for colour, name in looks]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder, or a format that matplotlib does not know
        raise UsageError(f"cannot draw {path}: {error}") from None
    return Path(path)


def _draw(axis, timeline: Timeline, longest: float) -> None:
    start, makespan = _start(timeline), timeline.makespan
    chunks = 1 + max(action.chunk for row in timeline.spans for action, _, _ in row)
    inches = 0.94 * WIDTH / longest  # of one unit of time
    shortest = min(end - begin for row in timeline.spans for _, begin, end in row)
    line = min(0.6, 10 * shortest * inches)  # points between boxes: a seventh of the smallest
    for rank, row in enumerate(timeline.spans):
        axis.broken_barh([(0, makespan)], (rank - 0.45, 0.9), facecolors=IDLE)
        boxes = [(begin - start, end - begin) for _, begin, end in row]
        colours = [_shade(action.kind, action.chunk, chunks) for action, _, _ in row]
        axis.broken_barh(boxes, (rank - 0.45, 0.9), facecolors=colours, edgecolors="white", linewidth=line)
        for (left, width), (action, _, _) in zip(boxes, row):
            size = min(8.0, width * inches * 72 / (0.62 * len(str(action.micro_batch)) + 0.35))  # points
            if size >= 4.5:
                dark = action.chunk < max(1, chunks / 2) and action.kind in "FB"
                colour = "white" if dark else "black"
                place = left + width / 2, rank + 0.03
                axis.text(*place, action.micro_batch, ha="center", va="center", fontsize=size, color=colour)
    axis.set(xlim=(0, longest), ylim=(len(timeline.spans) - 0.5, -0.5))
    axis.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))], fontsize=8)
    axis.tick_params(length=0, labelsize=8)
    axis.spines[:].set_visible(False)


def _shade(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    white = LIGHTEST * chunk / max(1, chunks - 1)
    parts = [int(COLOURS[kind][place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(part + (1 - part) * white for part in parts)


def _start(timeline: Timeline) -> float:
    return min(row[0][1] for row in timeline.spans if row)


# ---- text ------------------------------------------------------------------------------------------------------------


def text(timeline: Timeline) -> str:
    """One line a rank: `F0 F1 . . B0---`. Its scale is such that the shortest action has place for its name, or as many
    columns as COLUMNS allows; then what has no place shows its kind only.
    """
    spans = [span for row in timeline.spans for span in row]
    shortest, longest_name = min(end - start for _, start, end in spans), max(len(str(each)) for each, _, _ in spans)
    columns = min(longest_name + 1, max(1, int(COLUMNS * shortest / timeline.makespan)))  # of the shortest action
    scale = columns / shortest
    lines, zero = [], _start(timeline)
    for rank, row in enumerate(timeline.spans):
        line = ""
        for action, start, end in row:
            left, right = (int((time - zero) * scale + 0.5 + 1e-9) for time in (start, end))  # halves always up
            line += "." * (left - len(line))
            place = right - len(line)
            name = str(action) if len(str(action)) < place else action.kind
            line += (name.ljust(place - 1, "-") + " ")[:place] if place > 1 else name[:place]
        lines.append(f"rank {rank}  {line.rstrip()}")
    return "\n".join(lines)


def summary(timeline: Timeline) -> str:
    """What the timeline costs, in numbers."""
    lines = [
        f"makespan    {timeline.makespan:.4g} = work of a rank {timeline.ideal:.4g} + bubble {timeline.bubble:.4g}",
        f"bubble      {timeline.bubble_ratio:.1%} of the work: efficiency {timeline.efficiency:.1%}",
        f"in flight   {_by_rank(timeline.in_flight)}   pairs (micro-batch, stage) between F and B or I",
    ]
    if timeline.makespan - timeline.span > 1e-9 * timeline.makespan:
        lost = timeline.span - timeline.ideal
        lines.insert(
            2, f"staggered   {timeline.span:.4g} within each rank, bubble {lost:.4g}, if none waits for the others"
        )
    if any(timeline.stores):
        lines.append(f"stores      {_by_rank(timeline.stores)}   between I and W")
        lines.append(f"unfinished  {_by_rank(timeline.unfinished)}   between F and B or W")
    return "\n".join(lines)


def _by_rank(numbers: list[int]) -> str:
    return "/".join(map(str, numbers))


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Draw one schedule. Returns the exit status."""
    parser = OneLineParser(
        prog="python -m step05_pipeline.schedules", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--schedule", default="1f1b", help=", ".join(SCHEDULES))
    add("--schedule-file", metavar="FILE", help="a schedule of your own, CSV or Python")
    add("--pp", type=int, default=4, metavar="N", help="ranks")
    add("--micro-batches", type=int, default=8, metavar="N", help="of a step")
    add("--virtual-stages", type=int, metavar="N", help="stages on each rank")
    add("--consecutive", type=int, metavar="N", help="of --schedule llama3: micro-batches, one after the other")
    add("--costs", default="F=1,I=1,W=1", help="of 1/pp of the model; also B, FB; and communication, of a message")
    add("--out", metavar="PNG", help="draw it there")
    options = parser.parse_or_exit(argv)
    try:
        sizes = options.pp, options.micro_batches, options.virtual_stages
        extra = {"consecutive": options.consecutive} if options.consecutive else {}
        if options.schedule_file:
            schedule = read(options.schedule_file, *sizes)
        else:
            schedule = build(options.schedule, *sizes, **extra)
        check(schedule)
        timeline = simulate(schedule, parse_costs(options.costs, schedule))
        print(f"{text(timeline)}\n\n{summary(timeline)}")
        if options.out:
            title = f"{schedule.name}: {timeline.makespan:.4g}, of which bubble {timeline.bubble:.4g}"
            print(f"drawn in {draw({title: timeline}, options.out, 'time, in the unit of --costs')}")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_costs(given: str, schedule: Schedule) -> Costs:
    """`F=1,I=1,W=1`, of 1/p of the model, as Costs of the schedule's stages. F, I and W are 1 if not given.

    Raises UsageError.
    """
    numbers = {"F": 1.0, "I": 1.0, "W": 1.0}
    for part in given.split(","):
        name, _, value = part.partition("=")
        try:
            numbers[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--costs {given}: {part!r} is not NAME=NUMBER") from None
    if unknown := numbers.keys() - {"F", "I", "W", "B", "FB", "communication"}:
        raise UsageError(f"--costs {given}: {min(unknown)!r} is none of F, I, W, B, FB, communication")
    share = schedule.ranks / schedule.stages  # of these costs in one stage; a message has the same size everywhere
    return Costs(**{name: cost * (1 if name == "communication" else share) for name, cost in numbers.items()})


if __name__ == "__main__":
    sys.exit(main())
