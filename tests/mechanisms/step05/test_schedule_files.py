"""A reader's own schedule from a file; its picture and numbers."""

import random

import pytest

from common.errors import UsageError
from step05_pipeline.schedules import timeline as pictures
from step05_pipeline.schedules.actions import SCHEDULES, Action, Schedule
from step05_pipeline.schedules.files import read, read_csv, write_csv
from step05_pipeline.schedules.messages import check
from step05_pipeline.schedules.simulator import Costs, simulate
from step05_pipeline.schedules.standard import build

OWN_FUNCTION = '''
from step05_pipeline.schedules import schedule, unroll

@schedule("two-by-two")
def two_by_two(p, m, v):
    """Two forwards, two backwards."""
    return [unroll((m, "F F B B"), micro_batches=m) for rank in range(p)]
'''

# As a spreadsheet saves it: time in columns, empty cells, lines filled up with commas
OWN_TABLE = """# a comment,,,,,,
# placement: v,,,,,,,
F0,,F0.1,B0.1,,,B0,
,F0,F0.1,B0.1,B0,,,
"""


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name, tmp_path):
    draw = random.Random(name)
    schedule = build(name, 4, 4 * draw.randint(1, 3))
    path = tmp_path / f"{name}.csv"
    write_csv(schedule, path)
    assert read_csv(path) == schedule
    assert read(path, 4, schedule.micro_batches) == schedule


def test_own_table(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(OWN_TABLE.replace("F0,F0.1,B0.1,B0", "F0,F0.1,I0.1,I0,W0.1,W0"))
    schedule = read(path, 2, 1)
    assert (schedule.name, schedule.placement, schedule.micro_batches) == ("own", ((0, 1, 1, 0),), 1)
    check(schedule)
    path.write_text("F0,F1,B0,B1\nF0,B0,F1,B1\n")
    assert read(path, 2, 2).placement == ((0, 1),)
    path.write_text("# placement: 0 0 1\nF0,F0.1,B0.1,B0\nF0,B0\n")
    assert read(path, 2, 1).placement == ((0, 0, 1),)
    check(read(path, 2, 1))
    path.write_text("# placement: bidirectional\nF0,F1.1,B1.1,B0\nF1.1,F0,B0,B1.1\n")
    assert read(path, 2, 2).placement == ((0, 1), (1, 0))


def test_own_function(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_FUNCTION)
    for _ in range(2):  # every rank of a test's process reads it
        schedule = read(path, 3, 5)
        check(schedule)
        assert " ".join(map(str, schedule.actions[1])) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4"
        assert "two-by-two" not in SCHEDULES


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.txt", "", "must end with .csv or .py"),
        ("absent.csv", None, "does not exist"),
        ("own.csv", "F0,B0\n", "is for --pp 1, not 2"),
        ("own.csv", "F0,B0\nF0,B0\n", "is for a number of micro-batches of 1, not 2"),
        ("own.csv", "F0,F1,B0,B1\nF0,B0,F1,b1\n", "line 2: 'b1' is no action; F0, B3, I2 or W2.1"),
        ("own.csv", "# nothing\n", "has no action for any rank"),
        ("own.csv", "F0,F1,B0,B1\n,,,\n", "has no action for one of its ranks"),
        (
            "own.csv",
            "# placement: w\nF0,F1,B0,B1\nF0,B0,F1,B1\n",
            "placement 'w' is none of looped, v, bidirectional, nor",
        ),
        ("own.csv", "# placement: 0 2\nF0,F1,B0,B1\nF0,B0,F1,B1\n", "a list of the rank of each stage (0 to 1)"),
        ("own.py", "x = 1\n", "registers 0 schedules; it needs one function with @schedule"),
        ("own.py", OWN_FUNCTION.replace("two-by-two", "1f1b"), "--schedule 1f1b is registered twice"),
        ("own.py", OWN_FUNCTION.replace("range(p)", "range(3)"), "has actions for 3 ranks, not for --pp 2"),
    ],
)
def test_bad_files(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as raised:
        read(tmp_path / name, 2, 2)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return None", "TypeError: "),
        ("return [[('F', 0)]] * p", "rank 0: ('F', 0) is no Action"),
        ("return [unroll((m, 'F back'), micro_batches=m)] * p", "ValueError: "),
    ],
)
def test_functions_that_fail(body, message, tmp_path):
    path = tmp_path / "own.py"
    start = OWN_FUNCTION.partition("    return")[0]
    path.write_text(f"{start}    {body}\n")
    with pytest.raises(UsageError) as raised:
        read(path, 2, 4)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("((0, 5),)", "does not name the rank of each stage, from 0 to 1"),
        ("((0, 0),)", "does not name the rank of each stage"),  # rank 1 has none
        ("((0, 1), (0,))", "does not name the rank of each stage"),
        ("(0, 1)", "TypeError"),
    ],
)
def test_placements_that_fail(placement, message, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_FUNCTION.replace('("two-by-two")', f'("own", placement=lambda p, v: {placement})'))
    with pytest.raises(UsageError) as raised:
        read(path, 2, 4)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_copies_have_to_share_whole_ranks():
    """Otherwise no group of ranks holds all that it would have to sum: one stage's gradients would reach another."""
    whole = build("1f1b", 3, 2)
    both = [(*row, *(Action(each.kind, each.micro_batch + 2, 1) for each in row)) for row in whole.actions]
    with pytest.raises(UsageError, match="hold copies of some of each other's stages"):
        check(Schedule("own", ((0, 1, 2), (1, 2, 0)), 4, tuple(both)))
    check(build("dualpipe", 4, 3))  # ranks 0 and 3 hold the same two stages


def test_text():
    assert pictures.text(simulate(build("1f1b", 2, 2))).splitlines() == [
        "rank 0  F0 F1 ......B0--- ...B1---",
        "rank 1  ...F0 B0--- F1 B1---",
    ]
    halves = pictures.text(simulate(build("1f1b", 4, 8), Costs(communication=0.5)))
    last = "rank 3  ..............F0 B0--- F1 B1--- ...F2 B2---"  # every box has its name
    assert halves.splitlines()[3].startswith(last)
    crowded = pictures.text(simulate(build("interleaved", 4, 128, 4))).splitlines()
    assert len(crowded) == 4 and max(map(len, crowded)) > 100


def test_command(tmp_path, capsys):
    table, picture = tmp_path / "own.csv", tmp_path / "own.png"
    write_csv(build("zb-h2", 4, 8), table)
    assert pictures.main(["--schedule-file", str(table), "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "makespan    27 = work of a rank 24 + bubble 3" in printed
    assert "24 within each rank, bubble 0" in printed and "in flight   7/5/3/1" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert pictures.main(["--schedule", "llama3", "--micro-batches", "10", "--consecutive", "5", "--costs", "B=2"]) == 0
    assert "makespan    34.5" in capsys.readouterr().out
    assert pictures.main(["--schedule", "interleaved"]) == 0  # a stage is half of what the costs are of
    assert "makespan    28.5 = work of a rank 24 + bubble 4.5" in capsys.readouterr().out
    for flags, message in (
        (["--schedule", "gpipe"], "--schedule gpipe is unknown"),
        (["--costs", "X=1"], "'X' is none of F, I, W, B, FB, communication"),
        (["--costs", "F"], "'F' is not NAME=NUMBER"),
        (["--out", str(tmp_path / "no" / "picture.png")], "cannot draw"),
    ):
        assert pictures.main(flags) == 2
        assert message in capsys.readouterr().err


def test_stacked_pictures(tmp_path):
    """Simulated above measured, with chunks, and boxes too small for a number."""
    simulated = simulate(build("interleaved", 4, 64, 2))
    path = pictures.draw({"simulated": simulated, "again": simulated}, tmp_path / "both.png", "ms")
    assert path.stat().st_size > 10_000
