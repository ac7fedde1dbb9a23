"""Labs of the kind *hunt*: a copy of the steps with one planted bug. The student finds it, and repairs it.

Both are graded: the place, in answer.toml, and the fix, by a training that the student has not seen, which must have
the losses and gradient norms that the project's own code has on one process.
"""

import ast
import difflib
import re
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError
from common.labs.answers import PLACES, keep, kept, read_answers, unknown
from common.labs.copies import Edit, copy_project, edited, files, read, shown
from common.labs.find import ROOT
from common.labs.lab import Lab, Verdict
from common.labs.training import SMALL, Launch, first_difference, sends_less, train
from common.launching.system import FORK, require

NEAR = 2  # lines around the bug that count as its place
TOLERANCE = 1e-9  # relative, of losses and gradient norms in float64
WORDS = 4  # that an explanation has at least
GUESSES = 5  # wrong places, after which a place is judged only with a repair that works: to try all is no hunt
UNSEEN = f"{SMALL} --seed 7"  # other weights and other data than the student's
OUTSIDE = "what is outside of functions"
FIRST = "What is the first number that differs, and who computes it?"

DIGITS = """\
{ set +x; } 2>/dev/null
for run in right wrong; do
    grep -oE '"(step|loss|grad_norm)": [^,}]*' runs/$run/metrics.jsonl | paste -d " " - - - | sed "s/^/$run  /"
done | sort -k 3,3n -k 1,1
set -x
"""

NOBODY = "we know of no public report."

ANSWER = """\
# Where is the bug? Lines are those of the file as you got it; its path begins in this folder.
file = ""  # such as "common/model.py"
line = 0
why = ""  # what the code does wrong, in one sentence of at least four words; in a course, your teacher reads it
"""


def handout(story: str, before: str, note: str = "") -> str:
    """The task of a hunt: what should be equal and is not, what to read before, and perhaps one thing to know."""
    parts = (
        story,
        "    bash run.sh",
        "trains both, prints all digits of their losses and gradient norms, and lays one run on top of the other. "
        "Without the bug, ten digits and more are the same.",
        f"Find the line, or where one is missing, write it into `answer.toml`, and repair it in this folder. {note}",
        "Do not compare this folder with the project's own files or with another hunt's, as `diff -r` does, and copy "
        "none of them here: that names the line at once, and spoils the hunt.",
        f"*Before:* {before}. *Graded:* half for the place, half for the fix, on a training that you have not seen. "
        "Every check says how near your place is; after five wrong ones, only if your repair works.",
    )
    return "\n\n".join(textwrap.fill(part, 120, break_on_hyphens=False) for part in parts) + "\n"


@dataclass(frozen=True)
class Bug:
    """One variant. What is seen must agree: first a training that is right, then one that the bug changes.

    A copy with the bug has as many lines as without it, and what stands beside it does not say what is right: see
    tests/labs/test_giveaways.py.
    """

    edits: tuple[Edit, ...]
    seen: tuple[Launch, Launch]  # what the lab tells the student to run
    unseen: Launch  # what grades the fix
    ask: str  # a question that leads from the file to the line
    why: str  # what goes wrong, and why no one noticed
    source: str  # who shipped it, with the address, or NOBODY
    beside: tuple[Edit, ...] = ()  # what else is changed, such as docstrings, so that nothing gives the place away
    anywhere: bool = False  # what is missing can be added in several places, and all of them are right

    @property
    def texts(self) -> dict[str, str]:
        """By path, the text of each file in the student's copy that differs from ours."""
        return edited(self.beside + self.edits)


@dataclass(frozen=True)
class Hunt(Lab):
    """A lab with a bug for each student number, in a copy of all steps up to this one."""

    bugs: tuple[Bug, ...]
    extra: tuple[str, ...] = ()  # files that only this lab needs

    def bug(self, student: int) -> Bug:
        return self.bugs[student % len(self.bugs)]

    def start(self, folder: Path, student: int) -> None:
        bug = self.bug(student)
        copy_project(folder, self.step, bug.beside + bug.edits, self.extra)
        (folder / "answer.toml").write_text(ANSWER, encoding="utf-8")
        (folder / "run.sh").write_text(self.script(bug), encoding="utf-8")

    def script(self, bug: Bug) -> str:
        """What the student runs: two trainings that must agree, all digits of both, and the largest differences."""
        commands = [each.command(f"runs/{name}", "$FLAGS") for each, name in zip(bug.seen, ("right", "wrong"))]
        lines = ["#!/usr/bin/env bash", "# Two trainings that must agree. Change their flags, add --trace 1:1, ..."]
        lines += ['cd "$(dirname "$0")" && export PYTHONPATH=$PWD OMP_NUM_THREADS=1', f'FLAGS="{SMALL}"', "set -ex"]
        lines += commands
        return "\n".join(
            [*lines, f"{DIGITS}python -m common.compare runs/right runs/wrong --tolerance {TOLERANCE:g}", ""]
        )

    # ---- grades ------------------------------------------------------------------------------------------------------

    def check(self, folder: Path, student: int) -> Verdict:
        bug = self.bug(student)
        place, said, looked = self._grade_place(folder, bug)
        worth, told, changed = place, said, self._changed(folder, bug)
        named = self._wrong_places(folder, place) if looked else []
        if len(named) > GUESSES:
            worth, told = 0.0, f"place: you have named {GUESSES} wrong ones. Now it is judged with a repair that works."
            told += f" Measure: {FIRST[0].lower()}{FIRST[1:]}"
        elif looked and place < 0.5:
            times = sum(row["file"] == named[-1]["file"] for row in named)
            ask = f" {bug.ask}" if place and times > 1 else ""  # the second time, so that `line = 1` is no way to ask
            told = f"{said}{ask} (Wrong place {len(named)} of {GUESSES}.)"
        if not changed:
            return Verdict(worth, (told, "fix: all files are as you got them; repair the one with the bug."))
        wrong = self._wrong_after_fix(folder, bug)
        if wrong:
            return Verdict(worth, (told, f"fix: not yet. On a training that you have not seen, {wrong}."))
        if looked and place < 0.5:
            place, said = self._grade_repair(folder, bug, place, said)
        right = (said, "fix: right. A training that you have not seen agrees with that of the right code.")
        ours = (f"Compare your `why`, which no program can check, with ours: {bug.why}",)
        return Verdict(place + 0.5, right + ours if place == 0.5 else right)

    def _grade_repair(self, folder: Path, bug: Bug, place: float, said: str) -> tuple[float, str]:
        """What a place is worth that is not ours, and a sentence about it, as the repair works.

        A line that is missing can be missed in several places, so wherever the repair adds it is right, too.
        """
        answers, ours = read_answers(folder), self.places(bug)
        file, line = self._as_seen_here(answers["file"]), int(answers["line"])
        repaired = {path.as_posix(): self._repaired(folder, bug, path) for path in files(self.step, self.extra)}
        if bug.anywhere:
            if _near(line, repaired.get(file, [])):
                cut = f"We planted it in {next(iter(ours))}; yours will do as well."
                return 0.5, f"place: right, as your repair works there. {cut}"
            where = ", ".join(each for each, changes in repaired.items() if changes)
            return place, f"place: your repair works, and it is in {where}: name the line where you made it."
        if file in ours:
            return place, said
        if any(repaired[each] for each in ours):
            return place, f"place: your repair works, and is not in {file}. Which line of which file does it change?"
        return place, f"place: your repair works, but it corrects in {file} what goes wrong before. {FIRST}"

    def _wrong_places(self, folder: Path, place: float) -> list[dict]:
        """The different places that the student has named by now, wrong ones and this one, which is worth `place`."""
        answers = read_answers(folder)
        row = {"file": self._as_seen_here(answers["file"]), "line": int(answers["line"])}
        wrong = kept(folder / PLACES)
        if place < 0.5 and row not in wrong:
            keep(folder / PLACES, row)
        return [*(each for each in wrong if each != row), row]

    def _repaired(self, folder: Path, bug: Bug, file: Path) -> list[tuple[int, int]]:
        """First and last line of each of the student's changes, in the file as they got it."""
        changes = _changes(shown(file, bug.beside + bug.edits), read(folder / file))
        return [(first + 1, max(first + 1, behind)) for tag, first, behind, *_ in changes if tag != "equal"]

    def _as_seen_here(self, file: str) -> str:
        """A path that a student has written, from the top of the lab's folder."""
        return file.replace("\\", "/").rpartition(f"{self.id}/")[2].removeprefix("./")

    def _changed(self, folder: Path, bug: Bug) -> bool:
        """Whether any file differs from what `start` has made. Raises UsageError if one is missing."""
        found = False
        for file in files(self.step, self.extra):
            if not (folder / file).is_file():
                raise UsageError(f"{folder / file} is missing: `reset` brings it back")
            found |= read(folder / file) != shown(file, bug.beside + bug.edits)
        return found

    def _grade_place(self, folder: Path, bug: Bug) -> tuple[float, str, bool]:
        """What the place is worth, a sentence about it, and whether it was looked at: the answer is complete."""
        answers = read_answers(folder)
        file, line, why = (answers.get(name, "") for name in ("file", "line", "why"))
        if not file or not line.isdecimal() or line == "0":
            more = unknown(answers, ("file", "line", "why"))
            return 0.0, f"place: answer.toml names no file and line yet. {more}".rstrip(), False
        file = self._as_seen_here(file)
        if not (folder / file).is_file():
            called = [each.as_posix() for each in files(self.step, self.extra) if each.name == Path(file).name]
            meant = f"did you mean {' or '.join(called)}?" if called else "where paths begin: such as common/model.py."
            return 0.0, f"place: there is no {file} in this folder, {meant}", False
        if (words := len(re.findall(r"\w+", why))) < WORDS:
            ask = "place: say in answer.toml, in a sentence, what the code does wrong there"
            return 0.0, f"{ask} (why): in at least {WORDS} words, it has {words}.", False
        ranges = self.places(bug)
        if file not in ranges:
            return 0.0, f"place: the bug is not in {file}. {FIRST}", True
        if int(line) > (last := len(bug.texts[file].splitlines())):
            return 0.25, f"place: {file} is right, but it has only {last} lines.", True
        if not _near(int(line), ranges[file]):
            parts = _parts(bug.texts[file])
            here, there = parts(int(line)), {parts(each) for low, high in ranges[file] for each in (low, high)}
            inside = there - {OUTSIDE} or there  # a line that is missing at a function's end is missing in it
            near = f"and so is {here}, but not line {line}" if here in inside else f"but line {line} is in another part"
            return 0.25, f"place: {file} is right, {near}.", True
        exact = any(low <= int(line) <= high for low, high in ranges[file])
        which = f"line {line}" if exact else f"near line {line}: it is line {ranges[file][0][0]}"
        return 0.5, f"place: right, {file}, {which}.", True

    def places(self, bug: Bug) -> dict[str, list[tuple[int, int]]]:
        """By file, the first and last line of each change in the file with the bug; of a missing one, its neighbors."""
        found, ours = {}, edited(bug.beside)
        for file in dict.fromkeys(edit.file for edit in bug.edits):
            changes = [
                each for each in _changes(ours.get(file) or read(ROOT / file), bug.texts[file]) if each[0] != "equal"
            ]
            found[file] = [
                (first + 1, behind) if behind > first else (max(first, 1), first + 1)
                for _, _, _, first, behind in changes
            ]
        return found

    def _wrong_after_fix(self, folder: Path, bug: Bug) -> str | None:
        """What still differs with the student's code; None if nothing does."""
        require("a hunt", FORK)  # here, as what `train` refuses counts as a mistake of the student
        records = []
        for root in (ROOT, folder):  # the same training; when the second one runs, what ours has written is gone
            with tempfile.TemporaryDirectory(prefix="hunt-", ignore_cleanup_errors=True) as runs:
                try:
                    records += train([(bug.unseen, root)], Path(runs), UNSEEN, theirs=root != ROOT)
                except UsageError as error:
                    return str(error)
        return first_difference(*records, TOLERANCE) or sends_less(*records)

    # ---- afterwards --------------------------------------------------------------------------------------------------

    def solution(self, student: int) -> str:
        bug = self.bug(student)
        lines = []
        for file, text in bug.texts.items():
            pair = text.splitlines(keepends=True), read(ROOT / file).splitlines(keepends=True)
            lines += difflib.unified_diff(*pair, f"{file}, as you got it", f"{file}, right", n=2)
        return f"{''.join(lines)}\n{bug.why}\n\nWho shipped it: {bug.source}\n"


def _changes(before: str, after: str) -> list[tuple[str, int, int, int, int]]:
    """What becomes of which lines: opcodes of difflib."""
    if before == after:
        return []
    return difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()


def _near(line: int, ranges: list[tuple[int, int]]) -> bool:
    return any(low - NEAR <= line <= high + NEAR for low, high in ranges)


def _parts(text: str) -> Callable[[int], str]:
    """What names the part of a file that holds a line: the function, or the class, or neither."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]

    def part(line: int) -> str:
        around = [node for node in nodes if node.lineno <= line <= node.end_lineno]
        return f"`{max(around, key=lambda node: node.lineno).name}`" if around else OUTSIDE

    return part
