"""A class: who hands in, by when, and how late somebody was."""

import csv
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from common.labs.state import checked_number

COLUMNS = "number, name, and if you like deadline and submitted (such as 2026-03-01 18:00)"


class Student(NamedTuple):
    """A line of the roster."""

    number: int
    name: str
    deadline: datetime | None = None  # that holds for this student alone
    submitted: datetime | None = None  # as whoever took the file says


def read_roster(path: Path) -> dict[int, Student]:
    """The students of a CSV file, by number. Raises UsageError, with the line, for what cannot be understood.

    It may come from a spreadsheet: with a byte order mark, with semicolons, with columns that mean nothing here.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8: save it as `CSV UTF-8`") from None
    head = text.partition("\n")[0]
    rows = csv.reader(text.splitlines(), delimiter=max(",;\t", key=head.count))
    names = [name.strip().lower() for name in next(rows, [])]
    if not {"number", "name"} <= set(names):
        raise UsageError(f"{path}: its first line must name the columns {COLUMNS}")
    found = {}
    for line, row in enumerate(rows, 2):
        cells = dict(zip(names, (cell.strip() for cell in row)))
        if not any(cells.values()):
            continue
        try:
            number = checked_number(cells["number"])
            if number in found:
                raise UsageError(f"number {number} is {found[number].name}'s already")
            times = [moment(cells[name]) if cells.get(name) else None for name in ("deadline", "submitted")]
            found[number] = Student(number, cells.get("name", ""), *times)
        except UsageError as error:
            raise UsageError(f"{path}, line {line}: {error}") from None
    return found


def moment(text: str) -> datetime:
    """A time from text, of this machine's time zone unless it names one. Raises UsageError if it is none."""
    try:
        found = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
        return found.astimezone()
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"{text!r:.40} is no time; write it as 2026-03-01 18:00") from None


def hours_late(submitted: datetime | None, deadline: datetime | None) -> float:
    """Hours, rounded up to a tenth so that a minute shows; 0 if it was in time, or if nobody knows."""
    if submitted is None or deadline is None or submitted <= deadline:
        return 0.0
    return -(-(submitted - deadline).total_seconds() // 360) / 10
