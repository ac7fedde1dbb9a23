"""The tracer: what it records on two ranks, its trace file, report and pictures."""

import itertools
import json
import random
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from common import collectives
from common.collectives import all_reduce, exchange, receive, send
from common.config import TrainConfig
from common.link import Link
from common.process_groups import Degrees, build_mesh
from common.tracing.chrome_trace import Event, chrome_events, read_trace, time_by_state
from common.tracing.report import main, mean, report
from common.tracing.timelines import draw_timelines
from common.tracing.tracer import Tracer
from step01_single_gpu.recording.profilers import Profilers
from tests.harness.ranks import run_ranks

LINK = Link(alpha=0.005, bandwidth=1e8)
ELEMENTS = 500_000  # float32 on two ranks: 2 MB sent, 30 ms on the link
STEPS = [1, 2, 3]
MODES = ("naive", "overlap")


def test_time_by_state_agrees_with_a_grid():
    generator = random.Random(0)
    for _ in range(1000):
        starts = [[generator.randrange(40) for _ in range(generator.randrange(7))] for _ in range(3)]
        sets = [[(start, start + generator.randrange(9)) for start in each] for each in starts]
        cells = [{cell for start, end in intervals for cell in range(start, end)} for intervals in sets]
        expected = Counter(tuple(cell in each for each in cells) for cell in set().union(*cells))
        assert {state: time for state, time in time_by_state(*sets).items() if time and any(state)} == expected, sets


def busy(seconds: float) -> None:
    a, end = torch.ones(64, 64), time.perf_counter() + seconds
    while time.perf_counter() < end:
        a @ a


def two_runs(folder: str) -> dict:
    """Steps 1 to 3 of 5 are traced: compute, then all-reduce ("naive"); both at once ("overlap")."""
    mesh = build_mesh(Degrees(dp=2), torch.device("cpu"))
    linked, other, counted = mesh.with_link(LINK), 1 - mesh.dp.rank, {}
    for mode in MODES:
        tracer, gradient = Tracer((STEPS[0], STEPS[-1]), mesh, f"{folder}/{mode}"), torch.ones(ELEMENTS)
        collectives.barrier(mesh.world)
        for step in range(5):
            collectives.sent_bytes.clear()
            with tracer.step(step):
                with tracer.phase("forward", micro_batch=0):
                    busy(0.005)
                with tracer.phase("backward", micro_batch=0):
                    busy(0.1 if mode == "naive" else 0)
                    collectives.barrier(mesh.world)  # or the slower rank's delay would count as communication
                    work = all_reduce(gradient, linked.dp, async_op=True)
                    busy(0.1 if mode == "overlap" else 0)
                    work.wait()
                if step == STEPS[-1]:
                    with tracer.phase("optimizer"):  # a message from rank 0 to rank 1, then one each way in a batch
                        (send if other else receive)(torch.ones(6), other, mesh.dp)
                        exchange([(torch.ones(12), other)], [(torch.empty(12), other)], mesh.dp)
                busy(0.002)  # idle: in no phase
            counted[mode, step] = collectives.sent_bytes["dp"]
        tracer.close()
    return counted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    counted = run_ranks(2, two_runs, str(folder), timeout=60)
    return SimpleNamespace(folder=folder, counted=counted, traces={mode: read_trace(folder / mode) for mode in MODES})


def test_parts_of_a_step_and_overlap(runs):
    quiet = {}
    for mode, trace in runs.traces.items():
        rows = report(trace)
        assert [(row.step, row.rank) for row in rows] == [(step, rank) for step in STEPS for rank in (0, 1)]
        for row in rows:
            parts = row.compute_s + row.exposed_s + row.waiting_s + row.idle_s
            assert parts == pytest.approx(row.step_time_s, abs=1e-9)
            assert row.overlapped_s + row.exposed_s <= row.communication_s + 1e-9
            assert row.compute_s >= 0.105 and row.idle_s >= 0.002 and row.communication_s >= 0.025
            expected = runs.counted[row.rank][mode, row.step], 4 if row.step == STEPS[-1] else 1
            assert (row.sent_bytes, row.collectives) == expected
        quiet[mode] = min((mean(report(trace, step)) for step in STEPS), key=lambda row: row.step_time_s)
    assert quiet["naive"].overlap_share < 0.3 and quiet["overlap"].overlap_share > 0.5
    assert quiet["overlap"].exposed_s < quiet["naive"].exposed_s


def test_trace_file(runs):
    for mode in MODES:
        events = json.loads((runs.folder / mode / "trace.json").read_text())["traceEvents"]
        check_format(events)
        ends = defaultdict(list)
        for rank in (0, 1):
            for call in (call for call in runs.traces[mode].calls(rank) if "peer" in call):
                ends[call["id"]].append((call["op"], rank))
        assert sorted(map(sorted, ends.values())) == [[("receive", to), ("send", 1 - to)] for to in (0, 1, 1)]
        names = {(event["name"], event["args"].get("name")) for event in events if event["ph"] == "M"}
        assert {("process_name", "rank 1, dp 1"), ("thread_name", "dp"), ("thread_name", "dp receive")} < names


def check_format(events: list[dict]) -> None:
    """Check that spans nest."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        for (start, end), (after, later) in itertools.combinations(sorted(spans), 2):
            assert after > end - 1e-6 or later < end + 1e-6 or start > after - 1e-6, "spans of one lane cross"


def test_the_command(runs, tmp_path, capsys):
    picture = runs.folder / "overlap" / "timeline.png"
    for arguments, means in (([], 3), (["--step", "2"], 1)):
        assert main([str(picture.parent), *arguments]) == 0
        printed = capsys.readouterr().out
        assert "2 ranks (dp 2)" in printed and printed.count(" mean ") == means
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    draw_timelines(list(runs.traces.items()), tmp_path / "both.png").unlink()
    (tmp_path / "trace.json").write_text("[]")  # not a trace
    assert [path.name for path in (runs.folder / "naive").iterdir()] == ["trace.json"], "the ranks' parts are joined"
    for arguments in ([runs.folder], [tmp_path], [picture.parent, "--step", "7"], [picture.parent, "--out", "/proc/x"]):
        assert main(list(map(str, arguments))) == 2
        assert capsys.readouterr().err.count("\n") == 1, "one line"


def test_without_a_traced_step_or_after_an_error_it_only_names_the_phase(tmp_path, capsys):
    for steps in (None, (5, 6), (0, 0)):
        tracer = Tracer(steps, build_mesh(Degrees(), torch.device("cpu")), tmp_path)
        with pytest.raises(ZeroDivisionError), tracer.step(0), tracer.phase("forward"):
            raise ZeroDivisionError
        with tracer.step(1), tracer.phase("backward", micro_batch=3):
            assert collectives.phase == "backward"
        assert collectives.phase == "setup"
        assert (tracer.close() is None) == (steps is None)
    assert main([str(tmp_path)]) == 2 and "no steps" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(("steps", "traced"), [([0, 1, 2, 3, 4], 2), ([1, 2], 1), ([3, 4], 1)])
def test_profilers_cover_the_traced_steps(tmp_path, monkeypatch, steps, traced):
    """Also if the run ends early or starts late."""
    log = []
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **options: log.append((step, options)))
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: log.append((step, path)))
    mesh = build_mesh(Degrees(), torch.device("cpu"))
    config = TrainConfig(trace="2:3", run_dir=str(tmp_path), profile=True, memory_snapshot=True)
    tracer, profilers = Tracer((2, 3), mesh, tmp_path), Profilers(config, rank=0)
    for step in steps:
        with profilers.step(step), tracer.step(step), tracer.phase("forward"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profilers.close()
    tracer.close()
    events = json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    names = Counter(event.get("name") for event in events if event.get("ph") == "X")
    assert names["aten::matmul"] == names["forward"] == traced
    rows = report(read_trace(tmp_path))
    assert len(rows) == traced and rows[0].overlap_share == 0
    seen = [step for step in steps if step in (2, 3)]
    assert [when for when, _ in log] == [seen[0], seen[-1], seen[-1]], "recorded, written, switched off"
    assert log[1][1] == str(tmp_path / "memory-rank-0.pickle") and log[2][1] == {"enabled": None}


STEP = Event(0, "step 0", "step", "compute", 0, 100_000, {})


def communication(op: str, start: int, end: int, number: int, **more) -> Event:
    arguments = {"group": "pp", "op": op, "id": number, "link_us": 0} | more
    return Event(0, op, "communication", op, 1000 * start, 1000 * end, arguments)


def joined(*ranks: list[Event]) -> list[dict]:
    """Chrome's events of ranks that recorded these `Event`s, and a step around them."""
    return chrome_events({rank: (f"rank {rank}", [STEP, *events]) for rank, events in enumerate(ranks)})


def spans_of(events: list[dict], rank: int) -> tuple[list, list, list]:
    """Of each call of a rank: from issue to completion, from start to completion, and what is drawn."""
    spans = [event for event in events if event.get("cat") == "communication" and event["pid"] == rank]
    times = [
        [(span["args"][start], span["args"]["completion_us"]) for span in spans] for start in ("issue_us", "start_us")
    ]
    return *times, [(span["ts"], span["ts"] + span["dur"]) for span in spans]


def test_collectives_of_a_lane_are_drawn_one_after_the_other():
    times = [(0, 10), (2, 8), (5, 20), (30, 35)]
    events = joined([communication("all_reduce", *time, number) for number, time in enumerate(times)])
    assert spans_of(events, 0) == (times, times, [(0, 10), (10, 10), (10, 20), (30, 35)])


def test_in_flight_is_what_all_ranks_have_issued():
    """Calls 1 and 2 are as fast as the machine; 3 takes 10 us on a simulated link, from each rank's issue."""
    early = [(0, 52, 1), (60, 75, 2), (80, 90, 3)]
    late = [(50, 52, 1), (65, 66, 2), (84, 94, 3)]
    ranks = [
        [communication("all_reduce", *call, link_us=10 * (call[2] == 3)) for call in rank] for rank in (early, late)
    ]
    assert spans_of(joined(*ranks), 0)[1] == [(50, 52), (65, 75), (80, 90)]
    assert spans_of(joined(*ranks), 1)[1] == [(50, 52), (65, 66), (84, 94)]
