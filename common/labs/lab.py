"""What a lab is. Each step brings its own, in stepNN_name/labs, and `python -m common.labs` finds and runs them."""

import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    """What a check has found."""

    score: float  # from 0 to 1, for partial credit; 1 has passed
    feedback: tuple[str, ...]  # lines for the student: what differs first and where, and what it probably comes from
    unsure: bool = False  # the check was cut off by a busy machine, so another one may find more
    unjudged: bool = False  # nothing came to its end, or is there yet; the first line says what

    @property
    def passed(self) -> bool:
        return self.score == 1


@dataclass(frozen=True)
class Lab(ABC):
    """A task for a student, who is a number: labs with variants choose theirs by it. Kinds of labs derive from this."""

    id: str  # kind, step, letter: "write-04-a"
    title: str
    minutes: int  # that a student takes
    task: str  # Markdown: what is asked, how it is checked, what to read before
    hints: tuple[str, str, str]  # from a direction to almost all; never the code

    @property
    def kind(self) -> str:
        return self.id.split("-")[0]

    @property
    def step(self) -> int:
        return int(self.id.split("-")[1])

    @abstractmethod
    def start(self, folder: Path, student: int) -> None:
        """Put the files that the student works on into `folder`, which is empty."""

    @abstractmethod
    def check(self, folder: Path, student: int) -> Verdict:
        """Grade what is in `folder`, within a minute on two cores. Raises UsageError where a file is missing."""

    @abstractmethod
    def solution(self, student: int) -> str:
        """Return a reference solution to read, with what there is to learn from it."""


def wrapped(text: str, indent: str = "", width: int = 118) -> str:
    """A paragraph in lines that a terminal shows whole."""
    words = " ".join(text.split())
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
