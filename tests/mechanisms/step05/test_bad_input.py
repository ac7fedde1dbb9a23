"""Pipelines that cannot run: one line that names the flag, status 2 on all ranks, before the process group starts."""

import re
import sys

import pytest

from common import launch
from common.errors import UsageError
from step05_pipeline.stages import schedule_of
from tests.harness.ranks import torchrun

SCRIPT = "step05_pipeline/train.py"
SMALL = "--layers 4 --hidden 32 --heads 4 --ffn 48 --vocab 256 --seq-len 32 --data synthetic --device cpu --steps 1"
SMALL = [*SMALL.split(), "--global-batch", "4", "--micro-batch", "1"]

DEADLOCK = "F0,F1,B0,B1,F2,F3,B2,B3\nF0,B0,F1,F2,B2,B1,F3,B3\n"  # rank 1 wants F2 before it gives B1 back

BAD = [  # ranks, flags, what the line says
    (2, "--pp 2 --schedule nonsense", "--schedule nonsense is unknown; there are 1f1b, afab"),
    (2, "--pp 2 --schedule-file FOLDER/deadlock.csv", "schedule deadlock: deadlock: rank 0"),
    (2, "--pp 3", "--pp 3 x --dp 1 does not equal the world size 2"),
    (4, "--pp 2 --dp 2 --schedule dualpipe --zero 2", "--zero 2: --schedule dualpipe keeps two copies"),
    (3, "--pp 3 --schedule dualpipe", "--schedule dualpipe needs an even --pp, not 3"),
    (3, "--pp 3 --schedule interleaved --layers 6", "4 micro-batches are not a multiple of --pp 3"),
    (2, "--pp 2 --schedule zbv --layers 3", "has 4 stages, more than --layers 3"),
    (2, "--pp 2 --schedule interleaved --virtual-stages 3", "--pp 2 with 6 stages in all needs as many --layers"),
    (2, "--pp 2 --schedule 1f1b --virtual-stages 2", "--virtual-stages 2: --schedule 1f1b has 1 stage on each rank"),
    (2, "--pp 2 --schedule zbv --virtual-stages 1", "--virtual-stages 1: --schedule zbv has 2 stages on each rank"),
    (2, "--pp 2 --schedule llama3 --consecutive 1", "1 consecutive micro-batches are fewer than --pp 2"),
    (2, "--pp 2 --schedule 1f1b --consecutive 4", "--consecutive 4 needs --schedule llama3, not 1f1b"),
    (2, "--pp 2 --schedule afab --schedule-file FOLDER/deadlock.csv", "--schedule-file replaces --schedule"),
    (2, "--pp 0", "--pp 0 must be at least 1"),
    (2, "--pp 2 --schedule-file FOLDER/none.csv", "none.csv does not exist"),
    (2, "--pp 2 --schedule-file FOLDER", "must end with .csv"),
    (4, "--pp 4 --schedule-file FOLDER/deadlock.csv", "deadlock.csv is for --pp 2, not 4"),
    (2, "--pp 2 --global-batch 8 --schedule-file FOLDER/deadlock.csv", "is for a number of micro-batches of 4, not 8"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "deadlock.csv").write_text(DEADLOCK)
    return folder


@pytest.mark.parametrize("world, flags, expected", BAD)
def test_refused_before_the_process_group_starts(world, flags, expected, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(sys, "argv", [SCRIPT, *SMALL, *flags.replace("FOLDER", str(folder)).split()])
    monkeypatch.setattr(launch, "init_distributed", lambda *_: pytest.fail("the process group starts"))
    monkeypatch.setattr(launch, "end_cleanly", lambda job: job())
    with pytest.raises(UsageError) as refused:
        launch.run(5, None, schedule_of)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [0, 1])  # a name, and a file
def test_under_torchrun(number, folder):
    world, flags, expected = BAD[number]
    done = torchrun(world, SCRIPT, *SMALL, *flags.replace("FOLDER", str(folder)).split())
    assert done.stderr.count("error: ") == 1 and f"error: {expected}" in done.stderr, done.stderr
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"2"}, done.stderr
    assert not re.search(r"rank \d failed:|step05_pipeline/\w+.py\", line", done.stderr), done.stderr
