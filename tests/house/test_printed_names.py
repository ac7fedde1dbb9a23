"""Names in prose of what the programs print (columns, groups, numbers of a step, schedules) are the printed ones."""

import re
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace

import pytest

from common import tracer
from common.parameter import ParameterSpec
from common.process_groups import AXES, GROUP_NAMES
from common.tracer import StepRow
from step05_pipeline.schedules.__main__ import main as schedules
from tests.harness.ranks import ROOT, steps_of
from tests.house.answers.exercises import QUICK
from tests.house.test_lessons import CODE
from tests.parity.runs import train_here

PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("common/**/*.md"), *ROOT.glob("step*/**/*.md"), *ROOT.glob("tests/*.md")}
)
NAME = r"[*`]([A-Za-z_]+(?: [a-z_]+)*)[*`]"  # in italics or as code
OF_TRACER = re.compile(rf"tracer's (?:table, (?:column )?|table |columns? )?{NAME}")
COLUMN = re.compile(rf"\b[Cc]olumns? {NAME}|{NAME} columns?\b")
GROUP = re.compile(r"\bgroups? `([a-z_]+)`|`([a-z_]+)` groups?\b|\b[Oo]ver `([a-z_]+)`|`comm_bytes` of `([a-z_]+)`")
OF_STEP = re.compile(r"[^.;:]*`metrics\.jsonl`[^.;:]*|`comm_bytes` of `[a-z_]+`")
OF_SCHEDULE = re.compile(r"read (?:the \w+ \()?`([a-z ]+)`|`(in flight)`")
SHARE = re.compile(r"[^.;]*[*`][Ss]hare[*`][^.;]*(?:tracer|%|communication)[^.;]*")  # what `hidden` was called


def found(pattern: re.Pattern) -> Iterator[tuple[str, str]]:
    """What a pattern captures in the prose of all pages, and the page."""
    for page in PAGES:
        text = " ".join(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split())
        for match in pattern.finditer(text):
            for name in [each for each in match.groups() if each] or [match[0]]:
                yield name, str(page.relative_to(ROOT))


def unknown(pattern: re.Pattern, known: set[str], least: int) -> list[tuple[str, str]]:
    """Raises AssertionError if the pages have so few such names that the pattern may be at fault."""
    names = list(found(pattern))
    assert len(names) >= least, f"only {names}"
    return [each for each in names if each[0] not in known]


def cells(text: str) -> set[str]:
    """What stands between two spaces or at the beginning of a line."""
    return {cell.strip() for line in text.splitlines() for cell in re.split(r"  +", line)}


@pytest.fixture
def columns(monkeypatch, capsys) -> set[str]:
    """Of the tracer's table."""
    row = StepRow(*(1 for _ in fields(StepRow)))
    monkeypatch.setattr(tracer, "report", lambda *_: [row])
    tracer.print_report(SimpleNamespace(degrees={}, ranks=[0]))
    return cells(capsys.readouterr().out)


def test_columns(columns):
    assert not unknown(OF_TRACER, columns, 1)
    quoted = {name for name, _ in found(COLUMN) if any(f'"{name}"' in source for source in CODE.values())}
    others = {"GB sent for dp"}  # which the planner puts together
    assert not unknown(COLUMN, columns | quoted - {"share"} | others, 3)


def test_the_share_is_called_hidden(columns):
    assert "hidden" in columns and "share" not in columns
    assert not list(found(SHARE))


def test_groups_and_numbers_of_a_step(tmp_path):
    groups = {*GROUP_NAMES, *AXES}
    assert not unknown(GROUP, groups | {each.name for each in fields(ParameterSpec)}, 20)
    flags = f"--experts 2 --layers 1 --seq-len 8 --steps 1 --measure-memory --device cpu {QUICK}"
    train_here(7, f"{flags} --run-dir {tmp_path}")
    (line,) = steps_of(tmp_path)
    names = [(name, page) for text, page in found(OF_STEP) for name in re.findall(r"`([a-z_]+)`", text)]
    assert len(names) >= 4 and not [each for each in names if each[0] not in {*line, *groups}]


def test_rows_of_schedules(capsys):
    schedules(["--schedule", "zb-h1"])
    names, lines = [name for name, page in found(OF_SCHEDULE) if page.startswith("step05")], capsys.readouterr().out
    assert len(names) >= 3 and {*names} <= cells(lines), names
