"""Pipelines that cannot run are refused by one line that names the flag or the file."""

import pytest

from common.errors import UsageError
from tests.harness.ranks import run_script
from tests.mechanisms.step05.observe import BASE, prepare

DEADLOCK = "F0,F1,B0,B1,F2,F3,B2,B3\nF0,B0,F1,F2,B2,B1,F3,B3\n"  # rank 1 wants F2 before it gives B1 back
BAD = [  # flags, for as many ranks as --pp times --dp; what the line says
    ("--pp 2 --schedule-file FOLDER/own.csv", "schedule own: deadlock: rank 0"),
    ("--pp 2 --schedule nonsense", "--schedule nonsense is unknown; there are 1f1b, afab"),
    ("--pp 2 --dp 2 --schedule dualpipe --zero 2", "--zero 2: --schedule dualpipe keeps two copies"),
    ("--pp 3 --schedule dualpipe", "--schedule dualpipe needs an even --pp, not 3"),
    ("--pp 3 --schedule interleaved", "4 micro-batches are not a multiple of --pp 3"),
    ("--pp 4 --schedule zbv --layers 7", "has 8 stages, more than --layers 7"),
    ("--pp 2 --schedule 1f1b --virtual-stages 2", "--virtual-stages 2: --schedule 1f1b has 1 stage on each rank"),
    ("--pp 2 --schedule zbv --virtual-stages 1", "--virtual-stages 1: --schedule zbv has 2 stages on each rank"),
    ("--pp 2 --schedule llama3 --consecutive 1", "1 consecutive micro-batches are fewer than --pp 2"),
    ("--pp 2 --schedule 1f1b --consecutive 4", "--consecutive 4 needs --schedule llama3, not 1f1b"),
    ("--pp 2 --schedule afab --schedule-file FOLDER/own.csv", "--schedule-file replaces --schedule"),
    ("--pp 2 --schedule-file FOLDER/none.csv", "none.csv does not exist"),
    ("--pp 2 --schedule-file FOLDER", "must end with .csv"),
    ("--pp 4 --schedule-file FOLDER/own.csv", "own.csv is for --pp 2, not 4"),
    ("--pp 2 --global-batch 8 --schedule-file FOLDER/own.csv", "is for a number of micro-batches of 4, not 8"),
]


@pytest.mark.parametrize(("flags", "expected"), BAD)
def test_pipelines_that_cannot_run(flags, expected, tmp_path):
    (tmp_path / "own.csv").write_text(DEADLOCK)
    words = ("--global-batch 4 " + flags.replace("FOLDER", str(tmp_path))).split()
    world = int(words[words.index("--pp") + 1]) * (2 if "--dp" in words else 1)
    with pytest.raises(UsageError) as refused:
        prepare(" ".join(words), world)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_status_2_before_the_process_group_starts(tmp_path):
    (tmp_path / "own.csv").write_text(DEADLOCK)
    flags = f"{BASE} --global-batch 4 {BAD[0][0]}".replace("FOLDER", str(tmp_path)).split()
    done = run_script("step05_pipeline/train.py", *flags, ranks=2)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {BAD[0][1]}"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
