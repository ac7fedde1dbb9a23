"""Labs of the kind *schedule*: a table of a pipeline's actions that keeps a limit on memory, and is fast enough."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from common.labs.lab import Lab, Verdict, wrapped
from step05_pipeline.labs.complete import incomplete
from step05_pipeline.schedules.actions import Action, Output, Schedule, looped
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.further.csv_files import read_csv, write_csv
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.schedules.timeline import draw, scale_of, text
from step05_pipeline.schedules.validator import check_schedule

VALID = 0.2  # of the score, for a table that runs at all; the rest is for time and memory
SLOW = 0.5  # of the rest, at most, for a table that takes longer than asked
UNKEPT = 0.5  # of the rest, for a table that holds more than it may
ROUNDING = 1e-9
PICTURE = "schedule.png"
STARTED = (Action("F", 0),)  # what `start` writes for each rank


class Case(NamedTuple):
    """What a student's table is for."""

    pp: int
    micro_batches: int
    costs: Costs
    unfinished: int  # micro-batches that a rank may hold at once, from F until its gradients are complete (B or W)


@dataclass(frozen=True)
class Tables(Lab):
    """`cases` are those of the student numbers 0, 1, ...; the target is the fastest schedule that we know for it."""

    cases: tuple[Case, ...]
    split: bool = True  # whether backwards are to be split

    def case(self, student: int) -> Case:
        return self.cases[student % len(self.cases)]

    def best(self, case: Case) -> tuple[Schedule, Timeline]:
        """The fastest schedule of the catalogue with one stage per rank that keeps the limit, and when it does what."""
        found = []
        for name, entry in SCHEDULES.items():
            if entry.chunks != 1 or entry.placement is not looped:
                continue
            schedule = build_schedule(name, case.pp, case.micro_batches)
            if self.split or not schedule.splits_backward:
                timeline = simulate(schedule, case.costs)
                if max(timeline.unfinished) <= case.unfinished:
                    found.append((schedule, timeline))
        if case.unfinished < case.pp:
            schedule = held_back(case)
            found.append((schedule, simulate(schedule, case.costs)))
        return min(found, key=lambda each: each[1].makespan)

    @property
    def cells(self) -> str:
        """What may be written."""
        return "F0, B0, or in place of a B its halves I0 and W0" if self.split else "F0 and B0"

    def start(self, folder: Path, student: int) -> None:
        case = self.case(student)
        _, timeline = self.best(case)
        costs = ", ".join(f"{kind} {case.costs.of(kind):g}" for kind in ("FBIW" if self.split else "FB"))
        lines = [
            f"# {case.pp} ranks, {case.micro_batches} micro-batches. Costs: {costs}; messages take no time.",
            f"# Time: at most {timeline.makespan:g}.",
            f"# Memory: at most {case.unfinished} unfinished micro-batches on a rank.",
        ]
        how = f"A line for each rank, in order. Cells are {self.cells}, in the order in which the rank does "
        how += "them, with commas between. You write no pauses: a rank waits by itself until what it needs has arrived."
        lines += [f"# {line}" for line in wrapped(how).splitlines()]
        rows = [f"{STARTED[0]},"] * case.pp
        (folder / "schedule.csv").write_text("\n".join([*lines, *rows]) + "\n", encoding="utf-8")

    def check(self, folder: Path, student: int) -> Verdict:
        case, path = self.case(student), folder / "schedule.csv"
        if not path.is_file():
            raise UsageError(f"{path} is missing: `reset` brings it back")
        best, fastest = self.best(case)
        try:
            schedule = read_csv(path)
            if schedule.actions == (STARTED,) * case.pp:
                empty = "The table is still to be filled in: a line for each rank, and F0 begins each."
                return Verdict(0.0, (empty,), unjudged=True)
            if wrong := incomplete(schedule.actions, case.pp, case.micro_batches):
                raise UsageError(wrong)
            if not self.split and schedule.splits_backward:
                raise UsageError("backwards are to be whole here: write B0 in the place of I0 and W0")
            check_schedule(schedule)
        except UsageError as error:
            deadlock = "deadlock" in str(error)
            what = str(error).removeprefix(f"schedule {path.stem}: ").replace(str(path), path.name)
            if "is no action" in what:  # other tables may hold more
                what = f"{what.partition(';')[0]}; cells are such as {self.cells}"
            with contextlib.suppress(OSError):
                (folder / PICTURE).unlink(missing_ok=True)  # of another table
            return Verdict(0.0, (*explain(schedule),) if deadlock else (f"It cannot run: {what}",))
        timeline = simulate(schedule, case.costs)
        slowest = simulate(build_schedule("naive", case.pp, case.micro_batches), case.costs).makespan
        saved = (slowest - timeline.makespan) / (slowest - fastest.makespan)
        fast = timeline.makespan <= fastest.makespan * (1 + ROUNDING)
        held = max(timeline.unfinished)
        kept = held <= case.unfinished
        quick, score = points(fast, saved, kept)
        limits = f"{timeline.makespan:g} of at most {fastest.makespan:g}, memory {held} of at most {case.unfinished}"
        panels = {f"yours: time {limits}": timeline}
        if fast and kept:  # before that, it would be a solution to copy
            panels[f"best known, {best.name}: {fastest.makespan:g}"] = fastest
        try:
            drawn = f"{'beside the best known' if len(panels) > 1 else 'as a picture'}: "
            drawn += str(draw(panels, folder / PICTURE, "time"))
        except UsageError as error:  # a full disk, a read-only folder
            drawn = f"not drawn: {error}"
        verdict = "reached" if fast else "not yet"
        lines = [
            f"time    {timeline.makespan:g} of at most {fastest.makespan:g}: {verdict}",
        ]
        if not kept:
            lines.append(_over(timeline, case.unfinished))
        else:
            lines.append(f"memory  {held} of at most {case.unfinished}: kept")
        if not fast:
            lines.append(
                _ready(schedule, timeline) or _held_up(schedule, timeline, self.split) or _longest_wait(timeline)
            )
        lines += [*text(timeline).splitlines(), f"({scale_of(timeline):g} characters are one unit of time)"]
        lines.append(_said(quick, score, fast, kept))
        return Verdict(score, (*lines, drawn))

    def solution(self, student: int) -> str:
        schedule, timeline = self.best(self.case(student))
        rows = "\n".join(",".join(map(str, row)) for row in schedule.actions)
        return f"{schedule.name}, in {timeline.makespan:g}:\n\n{text(timeline)}\n\nAs a table:\n\n{rows}\n"

    def write_best(self, folder: Path, student: int) -> None:
        """Write what `solution` shows as a student's table."""
        write_csv(self.best(self.case(student))[0], folder / "schedule.csv")


def points(fast: bool, saved: float, kept: bool) -> tuple[float, float]:
    """Of a table that runs and saves this share of the time: the share of the points for time, and the score."""
    quick = 1.0 if fast else SLOW * max(0.0, saved) ** 2  # squared, as the first half of it is easily found
    return quick, VALID + (1 - VALID) * quick * (1.0 if kept else UNKEPT)


def _said(quick: float, score: float, fast: bool, kept: bool) -> str:
    """How the score comes about, in points of 100."""
    time, most = 100 * (1 - VALID) * quick, 100 * (1 - VALID)
    text = f"points  {100 * VALID:g} for running; {time:.3g} of {most:g} for time"
    text += "" if fast else f" (too slow: {most * SLOW:g} at most)"
    return f"{text}, and {100 * (1 if kept else UNKEPT):g}% of these for memory: {100 * score:.3g} of 100"


def _over(timeline: Timeline, most: int) -> str:
    """Which ranks hold more unfinished micro-batches than they may."""
    over = [f"rank {rank} holds {held}" for rank, held in enumerate(timeline.unfinished) if held > most]
    return f"memory  {', '.join(over)} unfinished micro-batches, and {'each' * (len(over) > 1) or 'it'} may hold {most}"


def held_back(case: Case) -> Schedule:
    """Whole backwards within the limit on memory: each rank does a B as soon as it can, and else an F if it may."""
    rows, done, free = [[] for _ in range(case.pp)], {}, [0.0] * case.pp
    while any(len(row) < 2 * case.micro_batches for row in rows):
        ready = []  # the next F and the next B of each rank: when it can begin
        for rank, row in enumerate(rows):
            forwards = sum(action.kind == "F" for action in row)
            backwards = len(row) - forwards
            before = done.get(("F", forwards, rank - 1)) if rank else 0.0
            if before is not None and forwards < case.micro_batches and forwards - backwards < case.unfinished:
                ready.append((max(before, free[rank]), 1, rank, Action("F", forwards)))
            behind = done.get(("B", backwards, rank + 1) if rank + 1 < case.pp else ("F", backwards, rank))
            if behind is not None and backwards < forwards:
                ready.append((max(behind, free[rank]), 0, rank, Action("B", backwards)))
        start, _, rank, action = min(ready)
        rows[rank].append(action)
        free[rank] = done[action.kind, action.micro_batch, rank] = start + case.costs.of(action.kind)
    name = f"backwards first, {case.unfinished} at once"
    return Schedule(name, looped(case.pp, 1), case.micro_batches, tuple(map(tuple, rows)))


def _ready(schedule: Schedule, timeline: Timeline) -> str:
    """Where a rank waits longest for something although a backward, or a part of one, could run; "" if nowhere."""
    made = {schedule.output_of(rank, action): end for rank, row in enumerate(timeline.spans) for action, _, end in row}
    found = [(ROUNDING, "")]
    for rank, row in enumerate(timeline.spans):
        for number, ((_, _, free), (action, start, _)) in enumerate(zip(row, row[1:]), 1):
            begun = {each.micro_batch for each, _, _ in row[:number]}  # with an F, or I, in front of what ends it
            halves = {each.micro_batch for each, _, _ in row[:number] if each.kind == "I"}
            for later, _, _ in row[number + 1 :]:
                if later.kind == "F" or later.micro_batch not in (halves if later.kind == "W" else begun):
                    continue
                needed = schedule.input_of(rank, later)
                ready = max(free, made[needed] if needed else free)
                text = (
                    f"waits   rank {rank} waits for {action} until {start:g}, and {later} could run from {ready:g} on"
                )
                found.append((start - ready, text))
    return max(found, key=lambda each: each[0])[1]


def _held_up(schedule: Schedule, timeline: Timeline, split: bool) -> str:
    """The longest wait for which some rank does first what could come later: a W, or that half of a B. "" if none is.

    It is found by going back in time, from what waits to what ended when it began: what it takes, or, on the same
    rank, the action before it.
    """
    made, waits = {}, []
    for rank, row in enumerate(timeline.spans):
        made |= {schedule.output_of(rank, action): (rank, number) for number, (action, _, _) in enumerate(row)}
        gaps = enumerate(zip(row, row[1:]), 1)
        waits += [
            (start - end, rank, number) for number, ((_, _, end), (_, start, _)) in gaps if start - end > ROUNDING
        ]
    for wait, waiting, place in sorted(waits, key=lambda each: -each[0]):
        rank, number = waiting, place
        text = f"waits   rank {waiting} waits {wait:g} before {timeline.spans[waiting][place][0]}, because rank"
        while rank is not None:
            action, start, _ = timeline.spans[rank][number]
            needed = schedule.input_of(rank, action)
            source = made[needed] if needed else None
            if source and timeline.spans[source[0]][source[1]][2] >= start - ROUNDING:
                rank, number = source
                made_it = timeline.spans[rank][number][0]
                if split and made_it.kind == "B":
                    return f"{text} {rank} does all of {made_it}, and others wait only for its I"
            elif number:
                number -= 1
                before = timeline.spans[rank][number][0]
                if before.kind == "W":
                    return f"{text} {rank} does {before} before {action}, and nobody waits for {before}"
            else:
                rank = None
    return ""


def _longest_wait(timeline: Timeline) -> str:
    """Where a rank waits longest between two of its actions."""
    waits = []
    for rank, row in enumerate(timeline.spans):
        for (_, _, end), (action, start, _) in zip(row, row[1:]):
            waits.append((start - end, rank, action))
    longest, rank, action = max(waits, key=lambda each: each[0])
    if longest <= ROUNDING:
        return "waits   no rank waits between its actions: begin earlier, or end earlier"
    return f"waits   longest: rank {rank} waits {longest:g} before {action}"


# ---- who waits for whom ----------------------------------------------------------------------------------------------


def explain(schedule: Schedule) -> list[str]:
    """Of a schedule that deadlocks: a line for each rank of a circle in which each waits for the next."""
    position = _play(schedule)
    stuck = [rank for rank, actions in enumerate(schedule.actions) if position[rank] < len(actions)]
    rank, chain = stuck[0], []
    while rank not in [each for each, _ in chain]:
        action = schedule.actions[rank][position[rank]]
        needed = schedule.input_of(rank, action)
        other = schedule.placement[needed.copy][needed.stage]
        rest = schedule.actions[other][position[other] :]
        makes = next(each for each in rest if schedule.output_of(other, each) == needed)
        what = "activations" if needed.direction == "forward" else "gradient"
        line = (
            f"rank {rank} waits at {action} for the {what} of micro-batch {needed.micro_batch}: rank {other}'s {makes}"
        )
        if rest[0] != makes:
            line += f", which comes after {rest[0]}"
        chain.append((rank, line))
        rank = other
    circle = [line for each, line in chain[[each for each, _ in chain].index(rank) :]]
    return [
        "Deadlock. Nobody in this circle can go on:",
        *circle,
        "Let one of them do first what the next one waits for.",
    ]


def _play(schedule: Schedule) -> list[int]:
    """How many of its actions each rank can do."""
    position, moved = [0] * schedule.ranks, True
    done: set[Output | None] = set()
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if (needed := schedule.input_of(rank, action)) and needed not in done:
                    break
                done.add(schedule.output_of(rank, action))
                position[rank], moved = position[rank] + 1, True
    return position
