"""What a step's train.py enters while it takes a step: run it, and note every function of this project that begins."""

import contextlib
import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple
from unittest import mock

from common.launching.command_line import STEP_NAMES, parse
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import ROOT, run_ranks


class Function(NamedTuple):
    """A function, or a lambda or comprehension, at lines `first` to `last` of a file of this project."""

    file: str
    first: int
    last: int


def default_command(step: int) -> tuple[int, str]:
    """The ranks and flags with which `make` starts a step."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    set_to = dict(re.findall(r"^(\w+_step\d\d) := (.*)$", text, re.MULTILINE))
    return int(set_to.get(f"ranks_step{step:02}", 1)), set_to.get(f"flags_step{step:02}", "")


def enter(step: int, flags: str) -> set[Function]:
    """On a rank: take one step of the step's `train`, and return what its `train_step` enters."""
    config = configure(step, flags)
    module, entered = importlib.import_module(f"{STEP_NAMES[step - 1]}.train"), set()

    def note(frame: FrameType, event: str, _) -> None:
        if event == "call":
            entered.add(frame.f_code)

    def watched(*arguments, **options):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return real(*arguments, **options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    real = module.train_step
    with mock.patch.object(module, "train_step", watched):
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            module.train(config, mesh_of(config))
    return {found for code in entered if (found := in_project(code))}


def in_project(code: CodeType) -> Function | None:
    """Where the function is that this code belongs to. None: in a library, or the body of a module or class."""
    path = Path(code.co_filename)
    if not code.co_flags & inspect.CO_OPTIMIZED or ROOT not in path.parents or ".venv" in path.parts:
        return None
    lines, first = inspect.getsourcelines(code)
    return Function(str(path.relative_to(ROOT)), first, first + len(lines) - 1)


def on_ranks(step: int, ranks: int, flags: str) -> set[Function]:
    """What the ranks enter together."""
    flags += f" --steps 1 --device cpu --data synthetic --micro-batch 1 --global-batch {copies(step, ranks, flags)}"
    return set().union(*run_ranks(ranks, enter, step, flags))


def copies(step: int, ranks: int, flags: str) -> int:
    """How many data-parallel ranks the flags leave."""
    config = parse(step, [*flags.split(), "--global-batch", str(ranks), "--micro-batch", "1"])
    return ranks // (config.tp * config.cp * config.pp)


def table(functions: Iterable[Function]) -> list[list[int | str]]:
    """A row for each file: its lines, the functions entered, the lines of these. What is nested counts once."""
    rows = []
    for file in sorted({each.file for each in functions}):
        some = [each for each in functions if each.file == file]
        outer = [a for a in some if not any(b != a and b.first <= a.first and a.last <= b.last for b in some)]
        covered = {line for each in outer for line in range(each.first, each.last + 1)}
        lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
        rows.append([file, lines, len(outer), len(covered)])
    return rows


def totals(rows: list[list]) -> list[int]:
    """How many files they are, and the sums of the columns."""
    return [len(rows), *(sum(column) for column in list(zip(*rows))[1:])]
