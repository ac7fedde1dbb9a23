"""Every schedule is what its name says: complete, in order, free of deadlocks, within its memory and its time."""

import itertools
import random
import re

import pytest

from common.errors import UsageError
from step05_pipeline.cost import BUBBLES, dualpipe_bubble
from step05_pipeline.schedules.__main__ import main
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.further.csv_files import read_csv, read_schedule, write_csv
from step05_pipeline.schedules.further.torch_files import write_torch_csv
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.schedules.validator import check_schedule
from step05_pipeline.schedules.whole_backward import forwards_ahead


def llama3_in_flight(p: int, m: int, v: int, rank: int, consecutive: int | None = None) -> int:
    """The (micro-batch, chunk) pairs that a rank of `llama3` holds at its peak, right after its first steady F."""
    n = max(p, min(m, consecutive or p))
    groups, rest = divmod(forwards_ahead(p, v, n, rank) + 1, v * n)
    last = min(n, max(0, m - groups * n))  # micro-batches that exist in the group that has been begun
    return v * min(m, groups * n) + rest // n * last + min(rest % n, last)


def dualpipe_in_flight(p: int, m: int, v: int, rank: int) -> int:
    """The micro-batches of both copies that a rank of `dualpipe` holds at its peak: p + 1, if there are enough."""
    near, far = (m + 1) // 2, m // 2  # micro-batches that enter at this rank's end of the pipeline, at the other end
    if rank >= p // 2:
        rank, near, far = p - 1 - rank, far, near
    return min(near, p - rank) + min(far, rank + 1)


# (ranks, micro-batches, chunks, rank) -> how many (micro-batch, chunk) pairs the rank holds between F and B (or I)
IN_FLIGHT = {
    "naive": lambda p, m, v, rank: 1,
    "afab": lambda p, m, v, rank: m,
    "1f1b": lambda p, m, v, rank: min(m, p - rank),
    "breadth-first": lambda p, m, v, rank: m * v,
    "llama3": llama3_in_flight,
    "interleaved": llama3_in_flight,
    "zb-h1": lambda p, m, v, rank: min(m, p - rank),
    "zb-h2": lambda p, m, v, rank: min(m, 2 * (p - rank) - 1),
    "zbv": lambda p, m, v, rank: min(m, 2 * p - 1 - rank) + min(m, rank + 1),  # on the way down, on the way up
    "dualpipe": dualpipe_in_flight,
    "dualpipev": lambda p, m, v, rank: min(m, 2 * p - rank) + min(m, rank + 1),
}


def random_case(name: str, draw: random.Random) -> tuple[Schedule, dict]:
    """A schedule of that name and what it was built with."""
    ranks = draw.choice((2, 4, 6, 8)) if name == "dualpipe" else draw.randint(1, 8)
    case = {"ranks": ranks, "micro_batches": draw.randint(1, 20)}
    case["chunks"] = SCHEDULES[name].chunks or draw.randint(1, 4)
    if name == "interleaved":
        case["micro_batches"] = ranks * draw.randint(1, 4)
    if name == "llama3":
        case["consecutive"] = ranks + draw.randint(0, 6)
    return build_schedule(name, **case), case


@pytest.mark.parametrize("name", SCHEDULES)
def test_properties_hold_for_random_sizes(name, tmp_path):
    draw = random.Random(name)
    for _ in range(25):
        schedule, case = random_case(name, draw)
        p, m, v = case["ranks"], case["micro_batches"], case["chunks"]
        check_schedule(schedule)
        options = {"consecutive": case["consecutive"]} if "consecutive" in case else {}
        timeline = simulate(schedule)
        # a claim that is too high fails as well: all of them are reached
        assert timeline.in_flight == [IN_FLIGHT[name](p, m, v, rank, **options) for rank in range(p)], case
        weights = {"zb-h1": p, "zb-h2": 2 * p - 1, "zbv": 2 * p}.get(name)
        if weights:  # with those that wait for W
            assert max(timeline.unfinished) <= min(m * v, weights), case
        # with any costs, and so with any delays, the same actions end
        costs = Costs(*(draw.uniform(0.5, 2) for _ in range(3)), communication=draw.uniform(0, 3))
        assert [len(row) for row in simulate(schedule, costs).spans] == [len(row) for row in schedule.actions]
    write_csv(schedule, tmp_path / f"{name}.csv")
    assert read_schedule(tmp_path / f"{name}.csv", p, m) == read_csv(tmp_path / f"{name}.csv") == schedule


SPELT_OUT = {  # ranks, micro-batches, chunks
    ("1f1b", 3, 4, 1): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("breadth-first", 2, 2, 2): ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] * 2,
    ("interleaved", 2, 4, 2): [  # Megatron-LM's order, by hand: rank 0 begins with 2 + 2 forwards, rank 1 with 2
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ],
    ("zb-h1", 3, 4, 1): [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
    ("zb-h2", 2, 4, 1): ["F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"],
}


@pytest.mark.parametrize("arguments", SPELT_OUT)
def test_schedules_spelt_out(arguments):
    rows = [" ".join(map(str, row)) for row in build_schedule(*arguments).actions]
    assert rows == SPELT_OUT[arguments]


def test_llama3_lies_between_depth_and_breadth_first():
    assert build_schedule("llama3", 4, 8, 2).actions == build_schedule("interleaved", 4, 8, 2).actions
    assert build_schedule("llama3", 4, 6, 1).actions == build_schedule("1f1b", 4, 6).actions
    for n in (4, 5, 8, 10):  # figure 6 of the paper: 4 ranks, N = 5 consecutive micro-batches of 10
        forwards = [each for each in build_schedule("llama3", 4, 10, 2, consecutive=n).actions[0] if each.kind == "F"]
        first = [each.micro_batch for each in forwards[:n]], [each.chunk for each in forwards[: 2 * n]]
        assert first == (list(range(n)), [0] * n + [1] * n)


# ---- in time, with the numbers and formulas of the playbook and of the schedules' papers -----------------------------

HALF = Costs(F=0.5, I=0.5, W=0.5)  # of a stage, with two on each rank


def run(name: str, ranks: int, micro_batches: int, costs: Costs | None = None, chunks: int | None = None, **options):
    return simulate(build_schedule(name, ranks, micro_batches, chunks, **options), costs)


def test_charts_of_the_playbook():
    """p = 4, m = 8, t_b = 2 t_f: 24 units of work. In Zero Bubble, also what is in flight or waits for W."""
    makespans = {name: run(name, 4, 8).makespan for name in ("naive", "afab", "1f1b", "zb-h1")}
    assert makespans == {"naive": 96, "afab": 33, "1f1b": 33, "zb-h1": 27}
    interleaved = run("interleaved", 4, 8, HALF, chunks=2)
    assert (interleaved.makespan, interleaved.ideal, interleaved.bubble) == (28.5, 24, 4.5)
    assert (interleaved.bubble_ratio, interleaved.efficiency) == (4.5 / 24, 24 / 28.5)
    assert run("breadth-first", 4, 8, HALF, chunks=2).makespan == 28.5
    assert run("llama3", 4, 10, HALF, chunks=2, consecutive=5).makespan == 34.5  # figure 6: 8 stages
    assert run("1f1b", 2, 8, Costs(stages=(1, 1.5))).makespan == 1 + 8 * 4.5 + 2  # the slow rank never pauses
    measured = Timeline(tuple(tuple((a, start + 8, end + 8) for a, start, end in row) for row in interleaved.spans))
    assert (measured.makespan, measured.span, measured.bubble) == (28.5, interleaved.span, 4.5)  # it may begin anywhere
    crossed = run("1f1b", 2, 1, Costs(communication=0.5)), run("zbv", 1, 1, Costs(communication=0.5))
    assert [each.makespan for each in crossed] == [7, 6], "a message to another rank takes its time, each way"
    h1, h2, v = run("zb-h1", 4, 8), run("zb-h2", 4, 8), run("zbv", 4, 8)
    assert (h1.in_flight, h1.stores, h1.unfinished) == ([4, 3, 2, 1], [1, 2, 3, 4], [4] * 4)
    assert (h2.in_flight, h2.stores, h2.unfinished) == ([7, 5, 3, 1], [1, 3, 5, 7], [7] * 4)
    assert (v.span, v.makespan) == (48, 51)  # no bubble within a rank, but the last one can start at p - 1 only
    assert (v.in_flight, v.stores, v.unfinished) == ([8] * 4, [1, 3, 5, 7], [8] * 4)  # halves of a rank's layers


@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles_are_those_of_the_formulas(name):
    """Whole backwards: with any costs, for any number of micro-batches. Zero Bubble: with little less W than F and I.

    For zb-h2 the bubble is that within a rank. The last rank can start at p - 1 only, so with a common end one stays.
    """
    draw, share = random.Random(name), 0.5 if name in ("interleaved", "dualpipev") else 1  # of a rank's layers
    for _ in range(40):
        p = 2 * draw.randint(1, 4) if name == "dualpipe" else draw.randint(1, 8)
        m, costs = draw.randint(1, 20), [draw.uniform(0.3, 2) for _ in range(3)]
        if name == "interleaved":
            m *= p
        elif "dualpipe" in name:
            m, costs = 2 * draw.randint(p, 2 * p), [costs[0], costs[0], costs[0] * draw.uniform(0.3, 1)]
        elif "zb" in name:
            m = draw.randint(2 * p, 4 * p)
            costs = [draw.uniform(1, 1.02), draw.uniform(1, 1.02), draw.uniform(0.94, 0.97)]
        timeline, (f, i, w) = run(name, p, m, Costs(*(share * each for each in costs))), costs
        bubble = (timeline.span if name == "zb-h2" else timeline.makespan) - timeline.ideal
        assert bubble == pytest.approx(BUBBLES[name](p, f, i + w, w), abs=1e-9), (p, m, costs)


def test_bubble_of_dualpipe_whose_f_and_b_run_as_one():
    """(PP/2 - 1)(F&B + B - 3W), in the middle of the pipeline; a V of half as many ranks has the same."""

    def longest_idle(timeline: Timeline) -> float:
        return timeline.makespan - min(sum(end - start for _, start, end in row) for row in timeline.spans)

    for (p, m), (f, i, w) in itertools.product(((2, 4), (4, 8), (8, 20)), ((1, 1, 1), (1, 1, 0.5), (1, 1.5, 0.5))):
        for overlap in (1, 0.9):
            together = overlap * (f + i + w)
            whole = longest_idle(run("dualpipe", p, m, Costs(f, i, w, FB=together)))
            if overlap == 1 or f == i:
                assert whole == pytest.approx(dualpipe_bubble(p, together, i + w, w))
            cut = run("dualpipev", p // 2, m // 2, Costs(f, i, w, FB=together))  # of as many stages
            assert longest_idle(cut) == pytest.approx(whole)


# ---- a reader's own schedule from a CSV file, and the command --------------------------------------------------------

# As a spreadsheet saves it: time in columns, empty cells, lines filled up with commas
OWN = "# a comment,,,,,,\n# placement: v,,,,,,,\nF0,,F0.1,I0.1,I0,W0.1,W0\n,F0,F0.1,B0.1,B0,,,\n"
TABLES = [  # micro-batches, table, placement
    (1, OWN, ((0, 1, 1, 0),)),
    (2, "F0,F1,B0,B1\nF0,B0,F1,B1\n", ((0, 1),)),
    (1, "# placement: 0 0 1\nF0,F0.1,B0.1,B0\nF0,B0\n", ((0, 0, 1),)),
    (2, "# placement: bidirectional\n# overlapped: yes,,\nF0,F1.1,B1.1,B0\nF1.1,F0,B0,B1.1\n", ((0, 1), (1, 0))),
]
BAD_TABLES = {
    "F0,F1,B0,B1\nF0,B0,F1,b1\n": "line 2: 'b1'",
    "# nothing\n": "no action for any rank",
    "F0,F1,B0,B1\n,,,\n": "no action for one of its ranks",
    "# placement: w\nF0,B0\nF0,B0\n": "placement 'w'",
    "# placement: 0 2\nF0,B0\nF0,B0\n": "0 to 1",
    "# overlapped: true\nF0,B0\nF0,B0\n": "overlapped 'true' is neither yes nor no",
    "\ud800": "UTF-8",
    "0F0,0B0,B1\n1F0,1B0\n": "line 1: 'B1' is no action of a file of torch.distributed.pipelining; ",
    "0F0,(0F1;0I0)OVERLAP_F_B\n1F0,1B0\n": "line 1: '(0F1;0I0)OVERLAP_F_B' is no action of",
    "F0,B0\n1F0,1B0\n": "line 2: '1F0' is no action; F0, B3, ",
    "0F0,0B0\n1RECV_F0,1F0,1B0\n": "line 2: 1RECV_F0 is communication, which this executor places by itself; ",
    "0F0,0B0\n0F1,0B1\n": "stage 0 is on ranks 0 and 1; files of PyTorch have one copy of the model",
    "0F0,0B0\n2F0,2B0\n": "has actions for stage 2, but none for stage 1",
    "# placement: v\n0F0,0B0\n1F0,1B0\n": "the cells of a file of PyTorch say what '# placement' ",
}
# PyTorch's format: micro-batches, table, the same as a table of ours
OF_TORCH = [
    (2, "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n", "F0,F1,B0,B1\nF0,B0,F1,B1\n"),
    (1, "0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1I0,1W0\n", "# placement: v\nF0,F0.1,I0.1,W0.1,B0\nF0,F0.1,B0.1,I0,W0\n"),
    (1, "0F0,1F0,1B0,0B0\n2F0,2B0\n", "# placement: 0 0 1\nF0,F0.1,B0.1,B0\nF0,B0\n"),
    (2, "0F0,0F1,0B0,0W0,0B1,0W1\n1F0,1BW0,1F1,1B1,1W1\n", "F0,F1,I0,W0,I1,W1\nF0,B0,F1,I1,W1\n"),  # PyTorch 2.5
    (
        2,
        "0F0,0F1,3F0,(3F1;3B0)OVERLAP_F_B,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n",
        "# placement: v\n# overlapped: yes\nF0,F1,F0.1,F1.1,B0.1,B0,B1.1,B1\nF0,F0.1,F1,F1.1,B0.1,B0,B1.1,B1\n",
    ),
]


def test_own_tables(tmp_path):
    path = tmp_path / "own.csv"
    for micro_batches, table, placement in TABLES:
        path.write_text(table)
        schedule = read_schedule(path, 2, micro_batches)
        check_schedule(schedule)
        assert (schedule.name, schedule.placement, schedule.micro_batches) == ("own", placement, micro_batches)
        assert schedule.overlapped == ("yes" in table)
    for table, message in BAD_TABLES.items():
        path.write_text(table, errors="surrogatepass")
        with pytest.raises(UsageError, match=re.escape(message)):
            read_schedule(path, 2, 2)


def test_files_of_torch(tmp_path):
    """Read as what they say, and written so that reading them gives the schedule back."""
    path, own = tmp_path / "torch.csv", tmp_path / "own" / "torch.csv"
    own.parent.mkdir()
    for micro_batches, table, same in OF_TORCH:
        path.write_bytes(table.encode())
        own.write_text(same)
        schedule = read_schedule(path, 2, micro_batches)
        check_schedule(schedule)
        assert schedule == read_csv(own), table
    for name, p, m in itertools.product(SCHEDULES.keys() - {"dualpipe"}, (1, 3, 4), (1, 4, 12)):
        if name != "interleaved" or m % p == 0:
            schedule = build_schedule(name, p, m)
            write_torch_csv(schedule, path)
            found = read_schedule(path, p, m)
            assert (found.actions, found.placement) == (schedule.actions, schedule.placement), (name, p, m)
            assert found.overlapped == ("OVERLAP" in path.read_text()) <= schedule.overlapped
    write_torch_csv(build_schedule("dualpipev", 2, 4), path)
    assert path.read_text().splitlines()[1].startswith("1F0,2F0,1F1,2F1,(1F2;2B0)OVERLAP_F_B,(2F2;1B0)OVERLAP_F_B,")
    path.write_text("F1,F0,B1,B0\nF1,F0,B1,B0\n")
    with pytest.raises(UsageError, match="has micro-batches 1, 0 in its last stage; PyTorch's runtime needs"):
        write_torch_csv(read_csv(path), path)


def test_command(tmp_path, capsys):
    """Costs are those of a rank, however many stages it has."""
    picture = tmp_path / "own.png"
    assert main(["--schedule", "interleaved", "--out", str(picture)]) == 0
    assert "28.5 = work of a rank 24 + bubble 4.5" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["--schedule", "zbv", "--export-torch", str(tmp_path / "zbv.csv")]) == 0
    assert read_csv(tmp_path / "zbv.csv") == build_schedule("zbv", 4, 8)
    for flags, words in (("--schedule dualpipe", "2 copies of the model; "), ("", "Is a directory")):
        assert main([*flags.split(), "--export-torch", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err
    bad = "--schedule gpipe", "--pp 0", "--costs X=1", "--costs F", "--costs F=inf", "--costs communication=1e9"
    for flags in bad:
        assert main(flags.split()) == 2
        assert capsys.readouterr().err.startswith(f"error: {flags}")
