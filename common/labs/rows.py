"""Who of a class has handed in what: a row for each student, and for each file that is nobody's."""

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from common.errors import UsageError
from common.labs.checkout import Checked
from common.labs.roster import Student, hours_late, moment
from common.labs.submit import Submission, Unreadable, printable, read_submission

NOTHING, STOPPED = "nothing was handed in", "not checked: grading was ended"
EMPTY = "it is empty: no file of a lab was changed"


@dataclass
class Row:
    """What is known of one student, or of one file that is nobody's."""

    who: Student | None
    file: str = ""
    submission: Submission | None = None
    submitted: datetime | None = None
    deadline: datetime | None = None
    results: dict[str, Checked] = field(default_factory=dict)  # by lab
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.who.name if self.who else ""

    @property
    def late(self) -> float:
        return hours_late(self.submitted, self.deadline)

    @property
    def total(self) -> float:
        return sum(result.score for result in self.results.values())


def collect(folder: Path, roster: dict[int, Student], deadline: datetime | None) -> list[Row]:
    """A row for everybody on the roster, and then one for each file that is nobody's, or has no one's number."""
    mine: dict[int, list[Row]] = {}
    others = []
    hidden = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    paths = [folder] if (folder / "submission.json").exists() else list(hidden)  # Gradescope unpacks them
    for path in paths:
        row = Row(None, printable(path.name))
        try:
            row.submission = read_submission(path)
        except Unreadable as error:
            row.notes.append(str(error))
            said = re.search(r"submission-(\d{1,9})\b", path.name)  # as `submit` names it
            row.who = roster.get(int(said[1])) if said else None
            mine.setdefault(row.who.number, []).append(row) if row.who else others.append(row)
            continue
        about = row.submission.about
        try:
            row.submitted = moment(about["made"])
        except UsageError:
            row.notes.append("it does not say when it was made")
        row.notes += [f"left out: {each}" for each in row.submission.left_out]
        if not row.submission.files:
            row.notes.append(EMPTY)
        row.who = roster.get(about["student"])
        if roster and row.who is None:
            row.notes.append(f"number {about['student']} ({about['name'] or 'no name'}) is not on the roster")
        row.who = row.who or Student(about["student"], about["name"])
        if about["name"] and roster and about["name"].casefold() != row.who.name.casefold():
            row.notes.append(f"the file says {about['name']!r}, the roster {row.who.name!r}")
        mine.setdefault(row.who.number, []).append(row)
    rows = []
    for number, student in (roster | {number: each[0].who for number, each in mine.items()}).items():
        found = sorted(mine.get(number, []), key=_order)
        row = found[-1] if found else Row(student, notes=[NOTHING])
        if found[1:]:
            row.notes.append(f"{len(found)} files; the last one counts, not {', '.join(x.file for x in found[:-1])}")
        row.submitted = student.submitted or row.submitted
        row.deadline = student.deadline or deadline
        rows.append(row)
    return sorted(rows, key=lambda row: row.who.number) + others


def _order(row: Row) -> tuple:
    """Of several files of a student the last in this order counts: one that can be read, and the latest of these."""
    return row.submission is not None, row.submitted is not None, row.submitted or 0, row.file
