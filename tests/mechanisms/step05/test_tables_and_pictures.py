"""A reader's own schedule from a CSV file; the command that draws schedules."""

import random
import re

import pytest

from common.errors import UsageError
from step05_pipeline.schedules.__main__ import main
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.further.csv_files import read_csv, read_schedule, write_csv
from step05_pipeline.schedules.simulator import simulate
from step05_pipeline.schedules.timeline import draw
from step05_pipeline.schedules.validator import check_schedule

# As a spreadsheet saves it: time in columns, empty cells, lines filled up with commas
OWN = """# a comment,,,,,,
# placement: v,,,,,,,
F0,,F0.1,I0.1,I0,W0.1,W0
,F0,F0.1,B0.1,B0,,,
"""


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name, tmp_path):
    draw = random.Random(name)
    schedule = build_schedule(name, 4, 4 * draw.randint(1, 3))
    path = tmp_path / f"{name}.csv"
    write_csv(schedule, path)
    assert read_schedule(path, 4, schedule.micro_batches) == read_csv(path) == schedule


def test_own_table(tmp_path):
    for micro_batches, table, placement in (
        (1, OWN, ((0, 1, 1, 0),)),
        (2, "F0,F1,B0,B1\nF0,B0,F1,B1\n", ((0, 1),)),
        (1, "# placement: 0 0 1\nF0,F0.1,B0.1,B0\nF0,B0\n", ((0, 0, 1),)),
        (2, "# placement: bidirectional\nF0,F1.1,B1.1,B0\nF1.1,F0,B0,B1.1\n", ((0, 1), (1, 0))),
    ):
        (tmp_path / "own.csv").write_text(table)
        schedule = read_schedule(tmp_path / "own.csv", 2, micro_batches)
        check_schedule(schedule)
        assert (schedule.name, schedule.placement, schedule.micro_batches) == ("own", placement, micro_batches)


BAD_TABLES = [
    ("F0,F1,B0,B1\nF0,B0,F1,b1\n", "line 2: 'b1' is no action; F0, B3, I2 or W2.1"),
    ("# nothing\n", "has no action for any rank"),
    ("F0,F1,B0,B1\n,,,\n", "has no action for one of its ranks"),
    ("# placement: w\nF0,B0\nF0,B0\n", "placement 'w' is none of looped, v, bidirectional, nor"),
    ("# placement: 0 2\nF0,B0\nF0,B0\n", "a list of the rank of each stage (0 to 1)"),
    ("\ud800", "cannot be read as UTF-8 text"),
]


@pytest.mark.parametrize(("table", "expected"), BAD_TABLES)
def test_tables_that_cannot_be_read(table, expected, tmp_path):
    (tmp_path / "own.csv").write_text(table, errors="surrogatepass")
    with pytest.raises(UsageError, match=re.escape(expected)):
        read_schedule(tmp_path / "own.csv", 2, 2)


def test_command(tmp_path, capsys):
    table, picture = tmp_path / "own.csv", tmp_path / "own.png"
    write_csv(build_schedule("zb-h2", 4, 8), table)
    zb_h2 = ["27 = work of a rank 24 + bubble 3", "24 within each rank, bubble 0", "in flight   7/5/3/1"]
    halves = ["rank 3  ..............F0 B0--- F1 B1--- ...F2 B2---"]  # every box has its name
    for flags, lines in (
        ("--costs F=1,I=1,W=1,communication=0.5", halves),
        (f"--schedule-file {table} --out {picture}", zb_h2),
        ("--schedule llama3 --micro-batches 10 --consecutive 5 --costs B=2", ["makespan    34.5"]),
        ("--schedule interleaved", ["28.5 = work of a rank 24 + bubble 4.5"]),  # costs are those of two stages
    ):
        assert main(flags.split()) == 0
        printed = capsys.readouterr().out
        assert all(line in printed for line in lines), printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = simulate(build_schedule("interleaved", 4, 64))  # boxes too small for a number
    assert draw({"simulated": again, "again": again}, picture, "ms").stat().st_size > 10_000
    for flags, message in (
        ("--schedule gpipe", "--schedule gpipe is unknown"),
        ("--costs X=1", "'X' is none of F, I, W, B, FB, communication"),
        ("--costs F", "'F' is not NAME=NUMBER"),
        ("--costs F=inf", "a cost may be at most 1,000 times"),
        ("--costs communication=1e9", "a cost may be at most 1,000 times"),
        (f"--out {tmp_path}/no/picture.png", "cannot draw"),
    ):
        assert main(flags.split()) == 2
        assert message in capsys.readouterr().err
