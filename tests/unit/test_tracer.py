"""The tracer on two ranks and on a GPU's streams, its trace file and report; the table of kernels."""

import contextlib
import itertools
import json
import random
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from common import collectives
from common.collectives import Call, all_reduce, exchange, receive, send
from common.config import TrainConfig
from common.group import Group
from common.link import Link
from common.process_groups import GROUP_NAMES, Degrees, Mesh, build_mesh
from common.tracer import TIMES, main, report
from common.tracing.chrome_trace import Event, chrome_events, read_trace, time_by_state
from common.tracing.clocks import CudaClock
from common.tracing.tracer import Tracer
from step01_single_gpu.running.gpu_kernels import classify_kernels, longest_kernels
from step01_single_gpu.running.profilers import Profilers
from tests.harness.ranks import run_ranks

ELEMENTS, LINK = 500_000, Link(alpha=0.005, bandwidth=1e8)  # float32 on two ranks: 2 MB sent, 30 ms on the link


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


def overlapped_run(folder: str) -> dict:
    """Steps 1 and 2 are traced: an all-reduce behind compute, then messages. Returns bytes sent by step."""
    mesh = build_mesh(Degrees(dp=2), torch.device("cpu"))
    linked, other, counted = mesh.with_link(LINK), 1 - mesh.dp.rank, {}
    tracer, gradient = Tracer((1, 2), mesh, folder), torch.ones(ELEMENTS)
    for step in range(4):
        collectives.sent_bytes.clear()
        with tracer.step(step):
            with tracer.phase("backward", micro_batch=0):
                collectives.barrier(mesh.world)  # or the slower rank's delay would count as communication
                work = all_reduce(gradient, linked.dp, async_op=True)
                busy(0.1)
                work.wait()
            with tracer.phase("optimizer"):  # a message from rank 0 to rank 1, then one each way in a batch
                (send if other else receive)(torch.ones(6), other, mesh.dp)
                exchange([(torch.ones(12), other)], [(torch.empty(12), other)], mesh.dp)
            busy(0.002)  # idle: in no phase
        counted[step] = collectives.sent_bytes["dp"]
    tracer.close()
    return counted


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(2, overlapped_run, str(folder), timeout=60)


def test_parts_of_a_step_and_overlap(run):
    folder, counted = run
    rows = report(read_trace(folder))
    assert [(row.step, row.rank) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in rows:
        parts = row.compute_s + row.exposed_s + row.waiting_s + row.idle_s
        assert parts == pytest.approx(row.step_time_s, abs=1e-9)
        assert row.overlapped_s + row.exposed_s <= row.communication_s + 1e-9
        assert row.compute_s >= 0.1 and row.idle_s >= 0.002 and row.communication_s >= 0.025
        assert (row.sent_bytes, row.collectives) == (counted[row.rank][row.step], 4)
        assert row.ratio == row.compute_s / row.communication_s
    assert max(row.overlap_share for row in rows) > 0.5
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    check_format(events)
    ends = defaultdict(list)
    for rank in (0, 1):
        for call in (call for call in read_trace(folder).calls(rank) if "peer" in call):
            ends[call["id"]].append((call["op"], rank))
    assert sorted(map(sorted, ends.values())) == [[("receive", to), ("send", 1 - to)] for to in (0, 0, 1, 1, 1, 1)]


def test_a_call_has_one_name_on_all_its_ranks_and_no_other_has_it():
    """Of tp (0, 1) and (2, 3), all call an all-reduce twice, and the first of each pair sends the second a message."""
    names = defaultdict(set)
    for rank in range(4):
        first = rank // 2 * 2
        mesh = SimpleNamespace(rank=rank, device=torch.device("cpu"), tp=Group("tp", (first, first + 1), rank - first))
        tracer = Tracer(None, mesh, None)
        ops = [("all_reduce", None)] * 2 + [("receive", first) if rank % 2 else ("send", first + 1)]
        for index, (op, peer) in enumerate(ops):
            names[tracer._identity(0, Call(op, "tp", 2, "float32", 1, 4, "forward", peer))].add((first, index))
    assert len(names) == 2 * 3 and all(len(calls) == 1 for calls in names.values())


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


def test_the_command(run, tmp_path, capsys):
    folder, _ = run
    assert [path.name for path in folder.iterdir()] == ["trace.json"], "the ranks' parts are joined"
    for arguments, means in (([], 2), (["--step", "2"], 1)):
        assert main([str(folder), *arguments]) == 0
        shown = capsys.readouterr().out
        assert shown.count(" mean ") == means and "  compute / communication  " in shown
        (folder / "timeline.png").unlink()
    (tmp_path / "trace.json").write_text("[]")  # not a trace
    for arguments in ([folder.parent], [tmp_path], [folder, "--step", "7"], [folder, "--out", "/proc/x"]):
        assert main(list(map(str, arguments))) == 2 and capsys.readouterr().err.count("\n") == 1, arguments


def test_an_error_or_a_step_that_is_not_traced_leaves_no_phase(tmp_path, capsys):
    for steps in (None, (0, 0)):
        tracer = Tracer(steps, build_mesh(Degrees(), torch.device("cpu")), tmp_path)
        with pytest.raises(ZeroDivisionError), tracer.step(0), tracer.phase("forward"):
            raise ZeroDivisionError
        with tracer.step(1), tracer.phase("backward", micro_batch=3):
            assert collectives.phase == "backward"
        assert collectives.phase == "setup"
        assert tracer.close() is None and not (tmp_path / "trace.json").exists(), "there is nothing to write"
    assert main([str(tmp_path)]) == 2 and "--trace FIRST:LAST with --run-dir writes it" in capsys.readouterr().err
    empty = {"traceEvents": [], "metadata": {"ranks": [0], "steps": [], "degrees": {}}}
    (tmp_path / "trace.json").write_text(json.dumps(empty))
    assert main([str(tmp_path)]) == 2 and "no steps" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(("steps", "seen"), [([0, 1, 2, 3, 4], [2, 3]), ([1, 2], [2]), ([3, 4], [3])])
def test_profilers_cover_the_traced_steps(tmp_path, monkeypatch, steps, seen):
    """Also if the run ends early or starts late. Step 1, before them, is for the warm-up."""
    log, running = [], []
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **options: log.append((step, options)))
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: log.append((step, path)))
    config = TrainConfig(trace="2:3", run_dir=str(tmp_path), profile=True, memory_snapshot=True)
    profilers = Profilers(config, rank=0)
    for step in steps:
        with profilers.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
            running += [step] * (profilers.profiler is not None)
    profilers.close()
    assert running == [step for step in steps if step == 1 or step in seen]
    events = json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("ph") == "X"].count("aten::matmul") == len(seen)
    assert [when for when, _ in log] == [seen[0], seen[-1], seen[-1]], "recorded, written, switched off"
    assert log[1][1] == str(tmp_path / "memory-rank-0.pickle") and log[2][1] == {"enabled": None}


STEP = Event(0, "step 0", "step", "compute", 0, 100_000, {})


def communication(op: str, start: int, end: int, number: int, **more) -> Event:
    arguments = {"group": "pp", "op": op, "id": number, "link_us": 0} | more
    return Event(0, op, "communication", op, 1000 * start, 1000 * end, arguments)


def joined(*ranks: list[Event]) -> list[dict]:
    """Chrome's events of ranks that recorded these `Event`s, and a step around them."""
    return chrome_events({rank: (f"rank {rank}", [STEP, *events]) for rank, events in enumerate(ranks)})


def times_of(events: list[dict], rank: int) -> list[tuple]:
    """From start to completion of each call of a rank."""
    calls = [event["args"] for event in events if event.get("cat") == "communication" and event["pid"] == rank]
    return [(call["start_us"], call["completion_us"]) for call in calls]


def test_in_flight_is_what_all_ranks_have_issued():
    """Calls 1 and 2 are as fast as the machine; 3 takes 10 us on a simulated link, from each rank's issue."""
    early = [(0, 52, 1), (60, 75, 2), (80, 90, 3)]
    late = [(50, 52, 1), (65, 66, 2), (84, 94, 3)]
    ranks = [
        [communication("all_reduce", *call, link_us=10 * (call[2] == 3)) for call in rank] for rank in (early, late)
    ]
    events = joined(*ranks)
    assert times_of(events, 0) == [(50, 52), (65, 75), (80, 90)]
    assert times_of(events, 1) == [(50, 52), (65, 66), (84, 94)]
    drawn = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "communication"]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(drawn[:3])), "one after the other"


class FakeCuda:
    """Streams as clocks, in milliseconds: all work is queued at once and runs in the order of its stream."""

    def __init__(self):
        self.main = self.current = SimpleNamespace(time=0.0)
        self.streams = [self.main, SimpleNamespace(time=0.0)]  # the second one is NCCL's

    def Event(self, enable_timing):
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "time", self.current.time)
        event.elapsed_time = lambda later: later.time - event.time
        return event

    def Stream(self):
        self.streams.append(SimpleNamespace(time=0.0))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self):
        for stream in self.streams:
            stream.time = max(each.time for each in self.streams)

    def collective(self, milliseconds):
        """Starts when the current stream comes to it, as on NCCL; `wait` blocks the then current stream."""
        self.streams[1].time = end = max(self.streams[1].time, self.current.time) + milliseconds
        return SimpleNamespace(wait=lambda: setattr(self.current, "time", max(self.current.time, end)))


def test_cuda_events_on_their_streams(tmp_path, monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr("common.tracing.clocks.time", SimpleNamespace(time_ns=lambda: round(cuda.main.time * 1e6)))
    groups = {name: Group(name, (0,), 0, None, "nccl") for name in GROUP_NAMES}
    groups["dp"] = Group("dp", (0, 1), 0, None, "nccl")
    mesh = Mesh(degrees=Degrees(), device=torch.device("cpu"), **groups)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, *_, **__: cuda.collective(8))
    monkeypatch.setattr("common.gloo.serves", lambda *_: False)
    tracer = Tracer((1, 2), mesh, tmp_path, clock=CudaClock(mesh, cuda))
    for step in range(3):
        with tracer.step(step):
            with tracer.phase("backward"):
                cuda.main.time += 10
                work = all_reduce(torch.ones(4), mesh.dp, async_op=True)
                cuda.main.time += 5
                work.wait()
            if step == 1:
                carried = all_reduce(torch.ones(4), mesh.dp, async_op=True)
                cuda.main.time += 1
            elif step == 2:
                with tracer.phase("optimizer"):
                    carried.wait()
                    cuda.main.time += 2
    assert len(cuda.streams) == 3, "one side stream per group, and none outside the traced steps"
    first, second = report(read_trace(tracer.close().parent))
    # 5 ms of kernels cover the all-reduce of 8 ms; of the second one, 1 ms is in the step, outside its phases
    assert [1e3 * getattr(first, name) for name in TIMES] == pytest.approx([19, 15, 3, 0, 1, 9, 5], abs=1e-3)
    found = [1e3 * second.step_time_s, 1e3 * second.exposed_s, first.collectives, second.collectives]
    assert found == pytest.approx([20, 3, 2, 1], abs=1e-3)


def test_kernels_of_a_kineto_trace():
    names = ("cat", "name", "ts", "dur", "args")
    rows = [
        ("cuda_runtime", "cudaLaunchKernel", 0, 2, {"correlation": 1}),
        ("cuda_driver", "cuLaunchKernelEx", 3, 1, {"correlation": 2}),
        ("cuda_runtime", "cudaLaunchKernel", 60, 2, {"correlation": 3}),
        ("cuda_runtime", "cudaMemcpyAsync", 70, 4, {"correlation": 4}),
        ("kernel", "ampere_sgemm_128x64_nn", 10, 20, {"correlation": 1}),  # 10-30
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 30, {"correlation": 2}),  # 20-50
        ("kernel", "vectorized_layer_norm_kernel", 65, 10, {"correlation": 3}),  # 65-75
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 80, 20, {"correlation": 4}),  # 80-100
    ]
    events = [{"ph": "X"} | dict(zip(names, row)) for row in rows]
    microseconds = {name: round(1e6 * seconds, 3) for name, seconds in classify_kernels(events).items()}
    parts = {"span": 90, "compute": 30, "exposed": 20, "copies": 20, "idle": 20}  # idle 50-65 and 75-80
    assert microseconds == parts | {"communication": 30, "overlapped": 10, "starved": 12}  # starved 50-62
    assert classify_kernels(events[:4]) == {}, "no GPU"
    events.append(events[6] | {"ts": 200, "dur": 15})  # the norm again
    longest = [(name.split("_")[0], calls, round(1e6 * seconds)) for name, calls, seconds in longest_kernels(events, 4)]
    assert longest[:2] == [("ncclDevKernel", 1, 30), ("vectorized", 2, 25)]
    assert longest[2:] == [("ampere", 1, 20), ("Memcpy DtoH (Device -> Pageable)", 1, 20)]
