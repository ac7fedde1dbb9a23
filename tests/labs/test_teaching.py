"""What teaching.md tells teachers to run can be run; the slides hold every figure of their lesson."""

import re
from pathlib import Path

import pytest

from common.config import TrainConfig
from common.labs import __main__ as command
from common.labs import find, slides
from common.launching.command_line import parse
from step05_pipeline.schedules.__main__ import main as draw_schedule
from step08_5d.planning.__main__ import main as plan
from tests.house.test_readme import commands

PAGE = find.ROOT / "common" / "labs" / "teaching.md"
LESSONS = sorted(find.ROOT.glob("step*/README.md"))


def configured(script: str, flags: list[str], ranks: int) -> TrainConfig:
    config = parse(int(script[4:6]), flags)
    config.resolve_and_check(ranks)
    return config


@pytest.mark.parametrize("line", commands(PAGE))
def test_its_commands_can_be_run(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = line.replace("runs/", f"{tmp_path}/").split()
    if words[0] == "torchrun":
        assert words[1] == "--nproc_per_node" and (find.ROOT / words[3]).exists()
        configured(words[3], words[4:], int(words[2]))
    elif words[1] != "-m":
        assert (find.ROOT / words[1]).exists()
        assert "train.py" not in words[1] or configured(words[1], words[2:], 1)
    elif words[2] == "common.labs":
        monkeypatch.setattr(
            command, "write_slides", lambda folder, out: slides.write_slides(folder, tmp_path / out.name)
        )
        assert command.main([*words[3:], "--home", str(tmp_path / "labs")]) == 0
    elif words[2] in ("common.compare", "common.tracer"):  # after the runs above them
        runs = [word for word in words[3:] if word.startswith(str(tmp_path)) and not word.endswith(".png")]
        assert runs and all(f"--run-dir runs/{Path(run).relative_to(tmp_path)}" in PAGE.read_text() for run in runs)
    else:
        assert {"step05_pipeline.schedules": draw_schedule, "step08_5d.planning": plan}[words[2]](words[3:]) == 0


def test_its_labs_exist():
    named = set(re.findall(r"`((?:write|hunt|predict|schedule|design)-\d\d-\w)`", PAGE.read_text()))
    assert len(named) > 20 and named <= find.all_labs().keys()


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.parent.name)
def test_slides(lesson, tmp_path):
    page = slides.write_slides(lesson.parent, tmp_path / "folder" / "slides.html").read_text()
    text = lesson.read_text()
    before, _, after = text.partition("\n## Exercises")
    figures = re.findall(r"^!\[", before + after.partition("\n## ")[2], flags=re.MULTILINE)
    assert page.count("data:image/") >= len(figures) > 0 and page.count("<section>") == page.count("</section>") > 8
    assert "http" not in re.sub(r"data:image/\S+", "", page), "a slide needs the network"
    assert "## Answers" not in page and "<h2>Exercises" not in page
    assert not re.search(r"<figcaption>[^<]*\*", page)
