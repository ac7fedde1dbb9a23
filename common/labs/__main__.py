"""`python -m common.labs`: tasks in which you write, repair, predict and plan what the lessons explain.

python -m common.labs                    the list: what is done, and what comes next
python -m common.labs start write-03-a   make its files in runs/labs/write-03-a, and show the task
python -m common.labs check              grade the lab that was started last, or `check ID`
python -m common.labs watch              check whenever a file of it is saved
python -m common.labs hint ID            the next of three hints; they are counted
python -m common.labs reset ID           its files anew; the old ones go to ID.old
python -m common.labs solution ID        once it is passed, or with --give-up, which is recorded
python -m common.labs report             scores of all labs, as a table and in runs/labs/report.json
python -m common.labs submit             one file with what you have done, for whoever teaches
python -m common.labs grade FOLDER       check the submissions of a class again (teaching.md)
python -m common.labs board [FOLDER]     the room's score board of the design labs
python -m common.labs slides [STEP]      the lessons' figures as slides, in runs/slides
"""

import common.entry  # noqa: F401
import common.labs.ctrl_c  # noqa: F401 (before what takes long: it puts off Ctrl-C until all is loaded)

# isort: split
import argparse
import difflib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from common.errors import UsageError
from common.labs import find
from common.labs.answers import PLACES, PREDICTIONS, kept
from common.labs.board import draw_board, publish
from common.labs.ctrl_c import loaded
from common.labs.lab import Lab, Verdict
from common.labs.slides import write_slides
from common.labs.state import HOME, Progress, State, checked_number
from common.labs.submit import fingerprint, submit
from common.labs.watch import watch as watch_folder
from common.labs.whole_files import folder_beside, put_folder, replace
from common.launching.command_line import OneLineParser, one_line_errors

COMMAND = "python -m common.labs"


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Do one command. Returns 1 if a check was not passed."""
    format = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog=COMMAND, description=__doc__, formatter_class=format, allow_abbrev=False)
    parser.add_argument("command", nargs="?", default="list", metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("id", nargs="?", metavar="ID", help="of a lab, such as write-03-a; for slides, a step")
    parser.add_argument("--give-up", action="store_true", help="read a solution before the lab is passed")
    parser.add_argument("--student", type="text", metavar="N", help="your number, which chooses variants; it is kept")
    parser.add_argument("--name", type="text", help="yours, for submit and the score board; it is kept")
    parser.add_argument("--board", type=Path, metavar="DIR", help="a folder for the room's score board; it is kept")
    parser.add_argument("--home", type=Path, default=HOME, metavar="DIR", help="where files and results are kept")
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["grade"]:  # it has flags of its own
            from common.labs.grade import main as grade_class

            loaded()
            return grade_class(argv[1:])
        options = parser.parse_args(argv)
        state = State.load(options.home)
        if options.command not in ("slides", "board"):
            find.all_labs()  # which loads PyTorch
        loaded()
        return carry_out(options, state)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"{error.filename or 'a file of the labs'}: {error.strerror or error}") from None
    except KeyboardInterrupt:
        print("\nended by Ctrl-C", file=sys.stderr)
        return 130


def carry_out(options: argparse.Namespace, state: State) -> int:
    """Do the command of the command line. Returns 1 if a check was not passed."""
    told = {} if options.student is None else {"student": checked_number(options.student)}
    told |= {} if options.name is None else {"name": " ".join(options.name.split())[:80]}
    told |= {} if options.board is None else {"board": str(options.board.absolute())}
    if options.command not in ("list", *COMMANDS):
        like = difflib.get_close_matches(options.command, COMMANDS)
        what = f"did you mean {' or '.join(like)}?" if like else f"there are {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {options.command}; {what}")
    if told:
        state.update(lambda state: vars(state).update(told))
    if options.give_up and options.command != "solution":
        raise UsageError("--give-up belongs to `solution`")
    if options.command == "list":
        return show_list(state, options.student is not None)
    if options.command == "report":
        return report(state)
    if options.command == "slides":
        return slides(options.id)
    if options.command == "submit":
        path, changed = submit(state, options.id)
        print(f"Hand in {shown(path)}.")
        if changed:
            print(f"Changed since the last check, or never checked: {', '.join(changed)}.")
        return 0
    if options.command == "board":
        return draw_board(Path(options.id) if options.id else Path(state.board or state.home))
    id = options.id or (state.current if options.command in ("check", "watch") else None)
    if id is None:
        raise UsageError(f"{options.command} needs the id of a lab, such as {next_lab(state).id}")
    lab = find.lab(id)
    if options.command != "start" and id not in state.labs:
        raise UsageError(f"{id} has not been started: {COMMAND} start {id}")
    if options.command == "solution":
        return solution(state, lab, options.give_up)
    return COMMANDS[options.command](state, lab) or 0


def next_lab(state: State) -> Lab:
    """The one that was started last, or else the first, that is neither passed nor given up; any if all are."""
    labs = sorted(find.all_labs().values(), key=lambda lab: lab.id != state.current)
    return next((lab for lab in labs if state.word(lab) not in ("done", "given up")), labs[0])


def show_list(state: State, told: bool = False) -> int:
    """The list of labs; `told`: the student's number was given just now."""
    for lab in find.all_labs().values():
        here = "  <- current" if lab.id == state.current else ""
        print(f"{state.word(lab):>15}  {lab.id:13}  {lab.title}  ({lab.minutes} min){here}")
    done = sum(progress.passed for progress in state.labs.values())
    lab = next_lab(state)
    command = "check" if lab.id in state.labs else "start"
    if told:
        print(f"\nYou are student {state.student}: labs that you start from now on have the variants of this number.")
    print(f"\n{done} of {len(find.all_labs())} are done. Next: {COMMAND} {command} {lab.id}")
    return 0


def start(state: State, lab: Lab) -> None:
    folder = state.folder(lab)

    def started(state: State) -> None:
        state.current = lab.id
        state.progress(lab)

    if not folder.exists():  # a lab whose folder was deleted keeps its variant
        put_folder(made(state, lab, state.labs.get(lab.id, Progress(student=state.student)).student), folder)
    state.update(started)
    if (number := state.labs[lab.id].student) != state.student:
        change = f"`{COMMAND} reset {lab.id}` makes the files of number {state.student}"
        print(f"{lab.id} was started as student {number}, and stays what it was; {change}.\n")
    print(f"# {lab.id}: {lab.title}\n\n{lab.task}\n\nYour files are in {shown(folder)}. Then: {COMMAND} check")


def made(state: State, lab: Lab, student: int, keep: Iterable[Path] = ()) -> Path:
    """Make a lab's folder for this student's number, with the files `keep`, all of it or nothing, beside its place."""

    def fill(part: Path) -> None:
        lab.start(part, student)
        (part / "TASK.md").write_text(f"# {lab.id}: {lab.title}\n\n{lab.task}\n", encoding="utf-8")
        for path in keep:
            shutil.copy(path, part)

    return folder_beside(state.folder(lab), fill)


def check(state: State, lab: Lab) -> int:
    return 0 if grade(state, lab).passed else 1


def grade(state: State, lab: Lab) -> Verdict:
    """Check, remember the score, and print what was found."""
    progress, begun = state.labs[lab.id], time.monotonic()
    if sys.stderr.isatty():
        usual = f"last time it took {progress.seconds:.0f} s" if progress.seconds else "this may take up to a minute"
        print(f"Checking {lab.id}: {usual}.", file=sys.stderr)
    files = fingerprint(state.folder(lab))
    verdict = lab.check(state.folder(lab), progress.student)
    seconds = time.monotonic() - begun
    first = next(iter(kept(state.folder(lab) / PREDICTIONS)), {})
    state.try_to_update(lambda state: state.progress(lab).note(verdict, seconds, first, files))
    if state.board and lab.kind == "design":
        publish(state)
    print(f"{lab.id}: {'passed' if verdict.passed else f'{verdict.score:.0%}'}")  # last: `head` may close the pipe
    for line in verdict.feedback:
        print(f"  {line}")
    progress = state.labs[lab.id]
    if verdict.passed:
        print(f"  To compare with ours: {COMMAND} solution {lab.id}")
    elif progress.hints < len(lab.hints):
        print(f"  If you are stuck: {COMMAND} hint {lab.id}")
    return verdict


def watch(state: State, lab: Lab) -> None:
    """Check on every save until Ctrl-C."""
    folder = state.folder(lab)

    def look() -> None:
        state.look_again(lab)
        grade(state, lab)

    try:
        watch_folder(shown(folder), look, lambda: hint(state, lab))
    except KeyboardInterrupt:
        print()


def hint(state: State, lab: Lab) -> None:
    def read_on(state: State) -> None:
        progress = state.progress(lab)
        progress.hints = min(progress.hints + 1, len(lab.hints))

    state.update(read_on)
    progress = state.labs[lab.id]
    for number, text in enumerate(lab.hints[: progress.hints], start=1):
        print(f"hint {number} of {len(lab.hints)}: {text}")
    if progress.hints == len(lab.hints):
        print(f"There are no more hints. Ours, once you have passed, or with --give-up: {COMMAND} solution {lab.id}")


def reset(state: State, lab: Lab) -> None:
    folder, student = state.folder(lab), state.student
    said = [folder / name for name in (PREDICTIONS, PLACES)]  # of this variant: what was said of it remains said
    same = state.progress(lab).student == student
    part = made(state, lab, student, [path for path in said if same and path.is_file()])
    if folder.exists():
        names = (f"{lab.id}.old{number or ''}" for number in itertools.count())
        old = next(path for name in names if not (path := state.home / name).exists())
        folder.rename(old)
        print(f"What you had is in {shown(old)}.")
    put_folder(part, folder)

    def anew(fresh: State) -> None:
        progress = fresh.progress(lab)
        progress.first = progress.first if progress.student == student else {}
        progress.student = student

    state.update(anew)
    print(f"{shown(folder)} is as it was at the start.")


def solution(state: State, lab: Lab, give_up: bool) -> int:
    progress = state.labs[lab.id]
    if not (progress.passed or progress.gave_up or give_up):
        raise UsageError(f"{lab.id} is not passed yet; --give-up shows the solution, and is recorded")
    if give_up and not progress.passed:
        state.update(lambda state: setattr(state.progress(lab), "gave_up", True))
    print(lab.solution(progress.student))
    return 0


def report(state: State) -> int:
    rows = []
    for lab in find.all_labs().values():
        progress = state.labs.get(lab.id, Progress())
        row = {"id": lab.id, "score": 0.0 if progress.gave_up else progress.score}
        rows.append(row | {"checks": progress.checks, "hints": progress.hints, "gave_up": progress.gave_up})
    print(f"{'lab':13} {'score':>6} {'checks':>7} {'hints':>6}")
    for row in rows:
        note = "  given up" if row["gave_up"] else ""
        print(f"{row['id']:13} {row['score']:6.0%} {row['checks']:7} {row['hints']:6}{note}")
    path, text = state.home / "report.json", json.dumps({"student": state.student, "labs": rows}, indent=2) + "\n"
    try:
        state.home.mkdir(parents=True, exist_ok=True)
        replace(path, lambda part: part.write_text(text, encoding="utf-8"))
        where = f"written to {shown(path)}"
    except OSError as error:
        where = f"not written to {shown(path)}: {error.strerror}"
    print(f"student {state.student}: {sum(row['score'] for row in rows):.2f} of {len(rows)}; {where}")
    return 0


def slides(step: str | None) -> int:
    """Write the slides of one step, or of all."""
    folders = sorted(find.ROOT.glob(f"step{int(step):02}_*" if (step or "").isdecimal() else "step0*"))
    if not folders or step and not step.isdecimal():
        raise UsageError(f"slides {step}: there is no such step; give its number, or nothing for all")
    for folder in folders:
        print(shown(write_slides(folder, find.ROOT / "runs" / "slides" / f"{folder.name}.html")))
    return 0


def shown(path: Path) -> Path:
    """A path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


COMMANDS = {"start": start, "check": check, "watch": watch, "hint": hint, "reset": reset, "solution": solution}
COMMANDS |= {"report": report, "slides": slides, "submit": submit, "grade": grade, "board": draw_board}


if __name__ == "__main__":
    sys.exit(main())
