"""What `grade` has found of each submission, on the disk as soon as it is known."""

import hashlib
import json
import threading
from dataclasses import asdict
from pathlib import Path

from common.labs.checkout import Checked
from common.labs.submit import commit


class Kept:
    """Rows of `grade`, each in a file: a run that is ended loses no more than what it was at.

    What these files hold is remembered from the start, before a submission runs that could change them.
    """

    def __init__(self, out: Path, resume: bool):
        self.folder, self.resume, self.lock = out / "rows", resume, threading.Lock()
        self.texts = {path: path.read_bytes() for path in self.folder.glob("*.json") if path.is_file()}

    def put(self, row, labs: list[str], notes: list[str]) -> None:
        found = {id: asdict(result) for id, result in row.results.items()}
        text = json.dumps({"notes": notes, "results": found}, indent=2) + "\n"
        with self.lock:
            self.texts[self._path(row, labs)] = text.encode()
            self._restore()

    def take(self, row, labs: list[str]) -> bool:
        """Whether it is known already, and so need not be checked."""
        try:
            found = json.loads(self.texts[self._path(row, labs)]) if self.resume else None
        except (KeyError, ValueError):
            return False
        if found:
            row.notes += found["notes"]
            row.results = {id: Checked(**each) for id, each in found["results"].items()}
        return bool(found)

    def changed(self) -> bool:
        """Whether these files are not what they were; then they become that again."""
        with self.lock:
            return self._restore()

    def _restore(self) -> bool:
        there = {path: path.read_bytes() for path in self.folder.glob("*.json") if path.is_file()}
        for path in there.keys() - self.texts.keys():
            path.unlink()
        wrong = [path for path, text in self.texts.items() if there.get(path) != text]
        for path in wrong:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.texts[path])
        return bool(wrong or there.keys() - self.texts.keys())

    def _path(self, row, labs: list[str]) -> Path:
        """By all that a check depends on: another file or another commit is another path."""
        _, about, files, _ = row.submission
        what = repr((commit(), labs, row.who.number, sorted(about.items()), sorted(files.items())))
        return self.folder / f"{row.who.number}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
