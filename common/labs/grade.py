"""`python -m common.labs grade FOLDER --roster class.csv`: check the submissions of a class again.

What a submission says of its scores counts for nothing. Each is checked in a copy of a clean checkout, by a process of
its own, without network and within limits. One that hangs, crashes or cheats does not keep the others from their
grades. It writes grades.csv, marker.html with what people have to read, and for each student a results.json as
Gradescope reads them.
"""

import os
import queue
import re
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import UsageError
from common.labs import find
from common.labs.apart import keep_to_itself
from common.labs.checkout import OURS, Checked, Checkout, Limits, Stopped, check_in_copy, clean_checkout, try_out
from common.labs.closed import is_refusal
from common.labs.find import ROOT
from common.labs.found import Kept, write_json
from common.labs.grades import of_one, write_all
from common.labs.marker import written_by
from common.labs.roster import moment, read_roster
from common.labs.rows import STOPPED, Row, collect
from common.labs.submit import commit, printable
from common.launching.command_line import OneLineParser, summary
from common.launching.system import FORK, require

NOTED = 300  # characters of a line that a check has said
SHARED = 0  # the number under which a class works together: its variants are accepted from everybody


def main(argv: list[str]) -> int:
    """Grade a folder. Raises UsageError for what cannot be understood; a bad submission is a row with a note."""
    parser = OneLineParser(prog="python -m common.labs grade", description=summary(__doc__))
    parser.add_argument("folder", type=Path, help="of files that `submit` has made, or of unpacked ones")
    parser.add_argument("--roster", type=Path, metavar="CSV", help="columns number and name; also deadline, submitted")
    parser.add_argument("--labs", type="text", metavar="ID,ID", help="what was to be done; by default, all labs there")
    parser.add_argument("--deadline", type="text", metavar="TIME", help="such as '2026-03-01 18:00', for a column")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "graded", metavar="DIR", help="for the results")
    parser.add_argument(
        "--gradescope", type=Path, metavar="FILE", help="the result of one student, whatever was handed in"
    )
    parser.add_argument("--resume", action="store_true", help="take what an earlier run has found of the same files")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="submissions at once; seconds need one")
    parser.add_argument("--seconds", type=float, default=180.0, metavar="X", help="that a lab's check may take")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GB", help="that each of its processes may have")
    options = parser.parse_args(argv)
    require("grade", FORK)
    if not options.folder.is_dir():
        raise UsageError(f"{options.folder} is no folder")
    for name in ("jobs", "seconds", "memory"):
        if not 0 < getattr(options, name) < 1e6:
            raise UsageError(f"--{name} {getattr(options, name)} must be more than 0")
    labs = [find.lab(id).id for id in options.labs.split(",")] if options.labs else []
    deadline = moment(options.deadline) if options.deadline else None
    roster = read_roster(options.roster) if options.roster else {}
    rows = collect(options.folder, roster, deadline)
    options.out.mkdir(parents=True, exist_ok=True)  # now, as what is not there cannot be hidden
    hidden = ROOT, options.folder, options.out, Path(tempfile.gettempdir())  # in the last, copies for other submissions
    limits = Limits(options.seconds, options.memory, hidden)
    check_all(rows, labs, limits, options.jobs, Kept(options.out, options.resume))
    labs = labs or [id for id in find.all_labs() if any(id in row.results for row in rows)]
    note_same_code(rows)
    write_all(rows, labs, options.out)
    if options.gradescope:
        write_json(options.gradescope, of_one(rows, labs))
    if OURS.stopped.is_set():
        print("error: ended by a signal; `--resume` goes on with those that were not checked", file=sys.stderr)
        return 143
    return 0


def check_all(rows: list[Row], labs: list[str], limits: Limits, jobs: int, kept: Kept) -> None:
    """Check all submissions, some at once. Each has a copy of a clean checkout, which nobody else uses."""
    waiting = queue.Queue()
    pristine = clean_checkout()
    commit()  # now, as what a thread starts later would be taken for an orphan
    keep_to_itself()
    OURS.begin()
    OURS.stopped.clear()
    try_out(pristine, limits)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: OURS.stop())
    for row in rows:
        if row.submission:
            waiting.put(row)
    with ThreadPoolExecutor(jobs) as pool:
        done = [pool.submit(_check_rows, waiting, labs, limits, pristine, kept) for _ in range(jobs)]
        for each in done:
            each.result()


def _check_rows(waiting: queue.Queue, labs: list[str], limits: Limits, pristine: Checkout, kept: Kept) -> None:
    while True:
        try:
            row = waiting.get_nowait()
        except queue.Empty:
            return
        before = list(row.notes)
        if not kept.take(row, labs):
            try:
                _check_row(row, labs, limits, pristine)
                if kept.changed():
                    row.notes.append("what `grade` had found of others was CHANGED while it ran, and is restored")
                if not any(result.unsure for result in row.results.values()):  # or else `--resume` asks again
                    kept.put(row, labs, row.notes[len(before) :])
            except Stopped:
                row.notes, row.results = [*before, STOPPED], {}
        total = "not checked" if STOPPED in row.notes else f"{row.total:5.2f}"
        print(f"{row.who.number:>6}  {printable(row.name)[:30]:30}  {total}  {row.file}", flush=True)


def _check_row(row: Row, labs: list[str], limits: Limits, pristine: Checkout) -> None:
    submission, asked = row.submission, []
    about, here = submission.about["labs"], commit().rstrip("+")
    if submission.about["commit"] != here:
        row.notes.append(f"made with commit {submission.about['commit'][:20] or 'unknown'}, checked with {here}")
    for id in labs or find.all_labs():
        if id not in submission.files:
            if (said := about.get(id, {}).get("score", 0.0)) > 0:
                row.notes.append(f"{id}: its record says {said:.0%}, but it has no file")
            continue
        said = about.get(id, {"student": row.who.number, "score": 0.0, "gave_up": False})
        if said["student"] not in (row.who.number, SHARED):
            row.results[id] = Checked(id, fault=f"it is the variant of number {said['student']}")
        else:
            asked.append({"id": id, "student": said["student"], "files": submission.files[id]})
    results, changed = check_in_copy(pristine, asked, limits)
    if changed:
        files = ", ".join(changed[:3])
        row.notes.append(f"its copy of the checks was CHANGED while it ran, so nothing counts: {files}")
    for result in results:
        said = about.get(result.id, {})
        if changed:
            result.score = 0.0
        if said.get("score", 0.0) > result.score + 0.005:
            row.notes.append(f"{result.id}: its record says {said['score']:.0%}, the check {result.score:.0%}")
        if said.get("gave_up"):
            result.feedback.append(f"The solution was read before it was passed: {result.score:.0%} counts as 0.")
            result.score = 0.0
        if result.fault:
            row.notes.append(f"{result.id}: {result.fault}")
        if result.unsure:
            row.notes.append(f"{result.id}: this machine was too busy to tell; `--resume` checks it once more")
        first = result.feedback[0] if result.feedback else ""
        if is_refusal(first):
            row.notes.append(f"{result.id}: REFUSED: {first}")
        elif result.unjudged and first and not result.unsure:
            row.notes.append(f"{result.id}: {first[:NOTED]}")
        row.notes += [f"{result.id}: REFUSED: {line}" for line in looks_for(result, limits.hidden)]
        row.results[result.id] = result
    for result in row.results.values():
        if result.fault.startswith("it is the variant"):
            row.notes.append(f"{result.id}: {result.fault}, so it counts as 0")


def looks_for(result: Checked, hidden: tuple[Path, ...]) -> list[str]:
    """What to say of a check that ended with an error about a file in a folder that is empty for it: nothing, mostly.

    Its own files lie among those that are temporary, and Python's perhaps among the project's.
    """
    folders = {str(way) for each in hidden for way in (each, each.resolve())} - {tempfile.gettempdir()}
    own = [Path(each) for each in (sys.prefix, sys.base_prefix, os.path.realpath(tempfile.gettempdir()))]
    for line in [*result.feedback, result.fault]:
        for folder in sorted(folders):
            for path in re.findall(rf"{re.escape(folder)}/[^\s'\"<>:,;)]+", line):
                if not any(Path(path).is_relative_to(each) for each in own if not Path(folder).is_relative_to(each)):
                    return [f"your file looks for {path}, which is not there for it."]
    return []


def note_same_code(rows: list[Row]) -> None:
    """Note who has handed in the same code of a write lab, whatever its comments and spaces."""
    seen: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for id in row.results:
            if id.startswith("write") and (code := written_by(row.submission.files[id])):
                seen.setdefault((id, code), []).append(row)
    for (id, _), group in seen.items():
        for row in group if len(group) > 1 else ():
            others = ", ".join(str(each.who.number) for each in group if each is not row)
            row.notes.append(f"{id}: the same code as number {others}")
