"""What `grade` writes: the table, Gradescope's files and the marker's page."""

import csv
import sys
from pathlib import Path

from common.labs.checkout import Checked
from common.labs.found import write_json
from common.labs.marker import write_page
from common.labs.rows import EMPTY, NOTHING, STOPPED, Row
from common.labs.submit import printable


def write_all(rows: list[Row], labs: list[str], out: Path) -> None:
    """Write the table, Gradescope's files and the marker's page."""
    (out / "results").mkdir(parents=True, exist_ok=True)
    with (out / "grades.csv").open("w", encoding="utf-8-sig", newline="") as file:  # spreadsheets want the mark
        table = csv.writer(file)
        table.writerow(["number", "name", "file", "submitted", "deadline", "late_hours", *labs, "total", "hints"]
                       + ["given_up", "notes"])  # fmt: skip
        table.writerows([harmless(cell) for cell in cells(row, labs)] for row in rows)
    for row in rows:
        if row.submission and STOPPED not in row.notes:
            write_json(out / "results" / f"{row.who.number}.json", gradescope(row, labs))
    page = write_page(rows, labs, out / "marker.html")
    networks = {result.network for row in rows for result in row.results.values()} - {""}
    for each in sorted(networks):
        print(each)
    print(f"Wrote {out / 'grades.csv'}, {page}, and {out / 'results'} for Gradescope.")
    if odd := [row for row in rows if row.notes not in ([], [NOTHING])]:
        print(f"{len(odd)} of {len(rows)} rows have notes; look at these.", file=sys.stderr)


def cells(row: Row, labs: list[str]) -> list:
    """A line of the table. A lab that was not handed in has an empty cell, and counts as 0."""
    about = row.submission.about["labs"] if row.submission else {}
    times = [each.strftime("%Y-%m-%d %H:%M") if each else "" for each in (row.submitted, row.deadline)]
    scores = [f"{row.results[id].score:.3f}" if id in row.results else "" for id in labs]
    hints = sum(about[id]["hints"] for id in labs if id in about)
    gave_up = " ".join(id for id in labs if id in about and about[id]["gave_up"])
    head = [row.who.number if row.who else "", row.name, row.file, *times, f"{row.late:.1f}"]
    return [*head, *scores, "" if STOPPED in row.notes else f"{row.total:.3f}", hints, gave_up, "; ".join(row.notes)]


def harmless(cell):
    """Text that no spreadsheet takes for a formula, and no terminal for a command."""
    cell = printable(cell) if isinstance(cell, str) else cell
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def gradescope(row: Row, labs: list[str]) -> dict:
    """What Gradescope reads of one submission (gradescope-autograders.readthedocs.io, "Output format")."""
    tests = []
    for id in labs:
        result = row.results.get(id) or Checked(id, feedback=["not handed in"])
        status = "passed" if result.score == 1 else "failed"
        output = "\n".join([*result.feedback, *([result.fault] if result.fault else [])])
        tests.append({"name": id, "score": round(result.score, 3), "max_score": 1, "status": status, "output": output})
    said = [f"{row.late:.1f} hours late"] if row.late else []
    said += [EMPTY] if EMPTY in row.notes else []
    return {"score": round(row.total, 3), "output": "; ".join(said), "visibility": "visible", "tests": tests}


def of_one(rows: list[Row], labs: list[str]) -> dict:
    """The same where one student has uploaded something, which may be no submission: then 0, and why."""
    found = [row for row in rows if row.submission]
    if len(found) == 1 and STOPPED not in found[0].notes:
        return gradescope(found[0], labs)
    why = [f"{row.file}: {'; '.join(row.notes)}" for row in rows if row.file and not row.submission]
    if found:
        why = [f"{len(found)} submissions: hand in one" if found[1:] else STOPPED]
    why = why or ["there is no file that `submit` has made"]
    return {"score": 0, "output": "\n".join(why[:10]), "visibility": "visible", "tests": []}
