"""What a student has done, in a file of the folder `runs/labs`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import UsageError
from common.labs.find import ROOT
from common.labs.lab import Lab

HOME = ROOT / "runs" / "labs"


@dataclass
class Progress:
    """In one lab."""

    hints: int = 0  # that were read
    checks: int = 0
    score: float = 0.0  # the best one
    gave_up: bool = False  # the solution was read before the lab was passed
    seconds: float = 0.0  # that the last check took
    student: int = 1  # whose variant was started

    @property
    def passed(self) -> bool:
        return self.score == 1 and not self.gave_up


@dataclass
class State:
    """Of one student, who is a number, in one folder."""

    home: Path = HOME
    student: int = 1
    current: str | None = None  # the lab that was started last
    labs: dict[str, Progress] = field(default_factory=dict)  # those that were started

    @classmethod
    def load(cls, home: Path = HOME) -> "State":
        """A new one if the folder has none yet. Raises UsageError if it cannot be read."""
        path = home / "state.json"
        if not path.exists():
            return cls(home)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            labs = {id: Progress(**{"student": found["student"]} | progress) for id, progress in found["labs"].items()}
            return cls(home, found["student"], found["current"], labs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path} is damaged ({error}); without it, all labs count as not started") from None

    def save(self) -> None:
        """Write the file, in one piece."""
        self.home.mkdir(parents=True, exist_ok=True)
        labs = {id: asdict(progress) for id, progress in self.labs.items()}
        text = json.dumps({"student": self.student, "current": self.current, "labs": labs}, indent=2)
        (self.home / "state.json.new").write_text(text + "\n", encoding="utf-8")
        (self.home / "state.json.new").replace(self.home / "state.json")

    def folder(self, lab: Lab) -> Path:
        return self.home / lab.id

    def word(self, lab: Lab) -> str:
        """What became of a lab so far."""
        progress = self.labs.get(lab.id)
        if progress is None:
            return ""
        if progress.gave_up:
            return "given up"
        if progress.passed:
            return "done"
        if not progress.checks:
            return "started"
        return f"{progress.score:.0%}, {progress.checks} check{'s' if progress.checks > 1 else ''}"
