"""What `grade` has found of each submission, on the disk as soon as it is known."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from common.labs.checkout import Checked
from common.labs.submit import commit


class Kept:
    """Rows of `grade`, each in a file: a run that is ended loses no more than what it was at."""

    def __init__(self, out: Path, resume: bool):
        self.folder, self.resume = out / "rows", resume

    def put(self, row, labs: list[str], notes: list[str]) -> None:
        found = {id: asdict(result) for id, result in row.results.items()}
        write_json(self._path(row, labs), {"notes": notes, "results": found})

    def take(self, row, labs: list[str]) -> bool:
        """Whether it is known already, and so need not be checked."""
        try:
            found = json.loads(self._path(row, labs).read_text(encoding="utf-8")) if self.resume else None
        except (OSError, ValueError):
            return False
        if found:
            row.notes += found["notes"]
            row.results = {id: Checked(**each) for id, each in found["results"].items()}
        return bool(found)

    def _path(self, row, labs: list[str]) -> Path:
        """By all that a check depends on: another file or another commit is another path."""
        _, about, files, _ = row.submission
        what = repr((commit(), labs, row.who.number, sorted(about.items()), sorted(files.items())))
        return self.folder / f"{row.who.number}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
