"""The outputs on the planner's page of measurements are those that its commands print today."""

import os
import re
import shlex

import pytest

from step08_5d.planning.__main__ import main
from tests.harness.ranks import ROOT

ALL = bool(os.environ.get("TEST_ALL"))
PAGE = ROOT / "step08_5d" / "planning" / "measurements.md"
COMMAND = r"^    python -m step08_5d\.planning ((?:%s) [^\n]*)\n\n```\n(.*?)\n```$"
SHOWN = dict(re.findall(COMMAND % "plan|compare|overlap|memory", PAGE.read_text(), re.M | re.S))
QUICK = [each for each in SHOWN if not each.startswith("plan ")]  # a plan takes seconds


def test_the_page_shows_many_outputs():
    assert len(SHOWN) > 12 and len(QUICK) > 5


@pytest.mark.parametrize("command", SHOWN if ALL else QUICK)
def test_what_the_page_shows(command, capsys):
    main(shlex.split(command))
    assert capsys.readouterr().out.strip() == SHOWN[command].strip(), "write it again, and read what is said about it"
