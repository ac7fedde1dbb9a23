"""The tracer: what it records on two ranks, its trace file, report and pictures; CUDA's clock and kernels."""

import dataclasses
import json
import random
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from common import collectives
from common.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exchange,
    receive,
    reduce_scatter,
    send,
)
from common.errors import UsageError
from common.link import Link
from common.process_groups import GROUP_NAMES, Degrees, Group, Mesh, build_mesh
from common.tracing import report as trace_report
from common.tracing.chrome_trace import merge, read_trace
from common.tracing.clocks import CudaClock
from common.tracing.report import classify_kernels, mean, print_report, report
from common.tracing.timeline_picture import draw_timeline, draw_timelines
from common.tracing.tracer import Tracer, main
from tests.harness.ranks import run_ranks

# ---- intervals ---------------------------------------------------------------------------------------------


def test_interval_arithmetic_agrees_with_a_grid():
    generator = random.Random(0)

    def some():
        starts = [generator.randrange(40) for _ in range(generator.randrange(7))]
        return [(start, start + generator.randrange(9)) for start in starts]

    def cells(intervals):
        return {cell for start, end in intervals for cell in range(start, end)}

    for _ in range(2000):
        a, b = some(), some()
        results = {
            "union": (trace_report.union(a + b), cells(a) | cells(b)),
            "intersection": (trace_report.intersection(a, b), cells(a) & cells(b)),
            "difference": (trace_report.difference(a, b), cells(a) - cells(b)),
        }
        for name, (intervals, expected) in results.items():
            assert cells(intervals) == expected, (name, a, b)
            assert trace_report.length(intervals) == len(expected), (name, a, b)
            edges = [edge for interval in intervals for edge in interval]
            assert edges == sorted(edges), (name, a, b)
            assert all(start < end for start, end in intervals), (name, a, b)


# ---- two ranks ---------------------------------------------------------------------------------------------

LINK = Link(alpha=0.005, bandwidth=1e8)
ELEMENTS = 500_000  # float32 on two ranks: 2 MB sent, 30 ms on the link
STEPS = [1, 2, 3]


def busy(seconds: float) -> None:
    a, end = torch.ones(64, 64), time.perf_counter() + seconds
    while time.perf_counter() < end:
        a @ a


def every_collective(mesh: Mesh) -> None:
    """Each once, synchronously; 9 calls on a rank, two of them messages and two batched messages."""
    group, me = mesh.dp, mesh.dp.rank
    small, large = torch.ones(6), torch.ones(12)
    all_reduce(small, group)
    reduce_scatter(torch.empty(6), large, group)
    all_gather(torch.empty(12), small, group)
    all_to_all(torch.empty(12), large, group)
    broadcast(small, 0, group)
    if me == 0:
        send(small, 1, group)
        receive(torch.empty(6), 1, group)
    else:
        receive(torch.empty(6), 0, group)
        send(small, 0, group)
    exchange([(large, 1 - me)], [(torch.empty(12), 1 - me)], group)


# op -> bytes that one rank of two sends in every_collective (float32)
SENT = {"all_reduce": 24, "reduce_scatter": 24, "all_gather": 24, "all_to_all": 24, "broadcast": 24}
SENT |= {"send": 24 + 48, "receive": 0}


def two_runs(folder: str) -> dict:
    """Steps 1 to 3 of 5 are traced: compute, then all-reduce ("naive"); both at once ("overlap")."""
    mesh = build_mesh(Degrees(dp=2), torch.device("cpu"))
    counted = {}
    for mode in ("naive", "overlap"):
        tracer = Tracer((STEPS[0], STEPS[-1]), mesh, f"{folder}/{mode}")
        gradient = torch.ones(ELEMENTS)
        collectives.barrier(mesh.world)
        for step in range(5):
            collectives.link = LINK
            collectives.reset_bytes()
            with tracer.step(step):
                assert (collectives.recorder is tracer) == (step in STEPS), f"recorder in step {step}"
                with tracer.phase("forward", micro_batch=0):
                    busy(0.005)
                with tracer.phase("backward", micro_batch=0):
                    if mode == "overlap":
                        work = all_reduce(gradient, mesh.dp, async_op=True)
                        busy(0.06)
                        work.wait()
                    else:
                        busy(0.06)
                        all_reduce(gradient, mesh.dp)
                collectives.link = None
                if step == STEPS[-1]:
                    with tracer.phase("optimizer"):
                        every_collective(mesh)
                with tracer.span("log", lane="notes"):
                    busy(0.002)
            assert collectives.recorder is None and collectives.phase == "setup", "the tracer cleans up"
            counted[mode, step] = dict(collectives.sent_bytes)
        path = tracer.close()
        assert path.name == "trace.json"
        collectives.barrier(mesh.world)
    return counted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    counted = run_ranks(2, two_runs, str(folder), timeout=60)
    return SimpleNamespace(folder=folder, counted=counted, naive=folder / "naive", overlap=folder / "overlap")


def test_overlap_is_what_compute_covers(runs):
    naive = mean(report(read_trace(runs.naive)))
    overlap = mean(report(read_trace(runs.overlap)))
    assert naive.overlap_share < 0.1
    assert overlap.overlap_share > 0.5
    assert overlap.exposed_s < naive.exposed_s
    for row in (naive, overlap):
        assert row.step is None and row.rank is None
        assert row.communication_s >= 0.025


def test_parts_of_a_step_add_up(runs):
    for folder in (runs.naive, runs.overlap):
        rows = report(read_trace(folder))
        assert [(row.step, row.rank) for row in rows] == [(step, rank) for step in STEPS for rank in (0, 1)]
        for row in rows:
            assert row.compute_s + row.exposed_s + row.idle_s == pytest.approx(row.step_time_s, abs=1e-9)
            assert row.overlapped_s + row.exposed_s <= row.communication_s + 1e-9
            assert row.compute_s >= 0.065 and row.idle_s >= 0.002  # the lane "notes" is no compute


def test_each_call_is_recorded_once_with_its_bytes(runs):
    for mode in ("naive", "overlap"):
        trace = read_trace(runs.folder / mode)
        for row in report(trace):
            assert row.sent_bytes == runs.counted[row.rank][mode, row.step]
            extra = {"all_reduce": 2, "send": 2, "receive": 2} if row.step == STEPS[-1] else {"all_reduce": 1}
            others = dict.fromkeys(SENT, 1) if row.step == STEPS[-1] else {}
            assert row.calls == others | extra
        for rank in trace.ranks:
            sent = Counter()
            for span in trace.spans[rank]:
                if span["cat"] == "communication":
                    arguments = span["args"]
                    assert arguments["group"] == "dp" and arguments["group_size"] == 2
                    assert arguments["dtype"] == "float32"
                    if arguments["phase"] == "backward":
                        assert (arguments["elements"], arguments["bytes"]) == (ELEMENTS, 4 * ELEMENTS)
                    else:
                        sent[arguments["op"]] += arguments["bytes"]
            assert dict(sent) == SENT


def test_completion_is_no_earlier_than_the_link_allows(runs):
    for folder in (runs.naive, runs.overlap):
        trace = read_trace(folder)
        for rank in trace.ranks:
            spans = [span for span in trace.spans[rank] if span["cat"] == "communication"]
            slow = [span["args"] for span in spans if span["args"]["phase"] == "backward"]
            assert len(slow) == len(STEPS)
            for arguments in slow:
                expected = 2 * LINK.alpha + arguments["bytes"] / LINK.bandwidth
                assert arguments["completion_us"] - arguments["issue_us"] >= 1e6 * expected


def test_trace_file_is_well_formed(runs):
    for folder in (runs.naive, runs.overlap):
        assert [path.name for path in folder.iterdir() if path.name != "timeline.png"] == ["trace.json"]
        content = json.loads((folder / "trace.json").read_text())
        check_format(content)
        names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"]
        assert names == ["rank 0 (dp 0)", "rank 1 (dp 1)"]
        lanes = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"]
        assert sorted(set(lanes)) == ["compute", "dp", "dp receive", "dp send", "notes"]
        metadata = content["metadata"]
        assert (metadata["steps"], metadata["ranks"]) == (STEPS, [0, 1])
        assert metadata["degrees"] == {"tp": 1, "cp": 1, "pp": 1, "dp": 2, "ep": 1, "zero_replicas": 1}
        assert metadata["groups"]["1"]["dp"] == [0, 1]
        assert metadata["unpaired_messages"] == 0
        arrows = [event for event in content["traceEvents"] if event["ph"] == "s"]
        assert Counter(event["pid"] for event in arrows) == {0: 2, 1: 2}


def check_format(content: dict) -> None:
    """What Perfetto needs: no negative times, spans of a thread nested, both ends of an arrow in a span."""
    threads, flows = defaultdict(list), defaultdict(dict)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    for spans in threads.values():
        open_until = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, "spans of one lane cross"
            open_until.append(end)
    for flow in flows.values():
        assert set(flow) == {"s", "f"} and flow["s"]["ts"] <= flow["f"]["ts"]
        assert flow["s"]["pid"] != flow["f"]["pid"]
        for end in flow.values():
            assert any(start <= end["ts"] < stop for start, stop in threads[end["pid"], end["tid"]])


def test_spans_of_one_lane_nest(runs):
    """A wait lies within its phase, a phase within its step."""
    trace = read_trace(runs.overlap)
    for rank in trace.ranks:
        for outer, inner in (("step", "phase"), ("phase", "wait"), ("phase", "issue")):
            outside = trace.intervals(rank, outer)
            for interval in trace.intervals(rank, inner):
                assert trace_report.length(trace_report.intersection([interval], outside)) == pytest.approx(
                    interval[1] - interval[0], abs=1e-6
                )


def test_command_prints_the_report_and_draws(runs, capsys):
    assert main([str(runs.overlap)]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks (dp 2)" in printed and "a step of a rank, on average" in printed
    assert len([line for line in printed.splitlines() if " mean " in line]) == len(STEPS)
    assert is_png(runs.overlap / "timeline.png")
    picture = runs.folder / "one.png"
    assert main([str(runs.overlap), "--step", "2", "--out", str(picture)]) == 0
    assert is_png(picture)
    assert len([line for line in capsys.readouterr().out.splitlines() if " mean " in line]) == 1


def test_command_refuses_in_one_line(runs, tmp_path, capsys):
    (tmp_path / "trace.json").write_text("[]")
    for arguments, reason in (
        ([str(runs.folder)], "trace.json does not exist"),
        ([str(tmp_path)], "is not a trace of this project"),
        ([str(tmp_path / "trace.json")], "cannot be read: Not a directory"),
        ([str(runs.naive), "--out", "/proc/x.png"], "cannot draw /proc/x.png: "),
        ([str(runs.naive), "--step", "7"], "step 7 is not in the trace, which has 1, 2, 3"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1


def test_several_runs_in_one_picture(runs, tmp_path):
    traces = [(name, read_trace(runs.folder / name)) for name in ("naive", "overlap")]
    assert is_png(draw_timelines(traces, tmp_path / "both.png"))


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


# ---- one rank ----------------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    return build_mesh(Degrees(), torch.device("cpu"))


def test_off_it_only_names_the_phase(alone):
    for tracer in (Tracer(None, alone, None), Tracer((5, 6), alone, "nowhere")):
        with tracer.step(0), tracer.span("anything", lane="elsewhere"):
            assert collectives.recorder is None
            with tracer.phase("backward", micro_batch=3):
                assert collectives.phase == "backward"
            assert collectives.phase == "setup"
    assert Tracer(None, alone, None).close() is None


def test_an_error_in_a_traced_step_stops_the_recording(alone, tmp_path):
    tracer = Tracer((0, 0), alone, tmp_path)
    with pytest.raises(ZeroDivisionError), tracer.step(0), tracer.phase("forward"):
        raise ZeroDivisionError
    assert collectives.recorder is None and collectives.phase == "setup" and not tracer.recording


def test_one_rank_without_communication(alone, tmp_path):
    tracer = Tracer((0, 1), alone, tmp_path / "new" / "folder")
    for step in range(3):
        with tracer.step(step), tracer.phase("forward"):
            pass
    assert tracer.close() == tmp_path / "new" / "folder" / "trace.json"
    assert tracer.close() is None  # once is enough
    trace = read_trace(tmp_path / "new" / "folder")
    rows = report(trace)
    assert [row.step for row in rows] == [0, 1] and rows[0].overlap_share == 0
    print_report(trace)
    assert is_png(draw_timeline(trace, tmp_path / "timeline.png", step=0))


def test_a_run_that_ends_before_the_first_traced_step(alone, tmp_path, capsys):
    tracer = Tracer((5, 6), alone, tmp_path)
    with tracer.step(0):
        pass
    tracer.close()
    assert main([str(tmp_path)]) == 2
    assert "no steps" in capsys.readouterr().err


def test_profiler_covers_the_traced_steps(alone, tmp_path):
    tracer = Tracer((2, 3), alone, tmp_path, profile=True)
    for step in range(5):
        with tracer.step(step), tracer.phase("forward"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        assert (tracer.profiler is not None) == (step in (1, 2))  # step 1 warms it up
    tracer.close()
    events = json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    names = Counter(event.get("name") for event in events if event.get("ph") == "X")
    assert names["aten::matmul"] == 2 and names["forward"] == 2
    assert classify_kernels(events) is None  # no GPU


def test_profiler_of_a_run_that_ends_early_or_starts_late(alone, tmp_path):
    for name, steps in (("early", [1, 2]), ("late", [2, 3])):
        tracer = Tracer((2, 3), alone, tmp_path / name, profile=True)
        for step in steps:
            with tracer.step(step):
                torch.ones(8, 8) @ torch.ones(8, 8)
        tracer.close()
        assert "aten::matmul" in (tmp_path / name / "profile" / "rank-0.json").read_text()


# ---- merging -----------------------------------------------------------------------------------------------


def part(rank: int, *events, **more) -> dict:
    return {"rank": rank, "clock": "cpu", "degrees": {"dp": 2}, "place": {}, "groups": {}} | {"events": list(events)}


def recorded(category, start, end, lane="compute", step=0, **arguments) -> dict:
    """A recorded span, times in microseconds."""
    ready = {"ready": arguments.pop("ready") * 1000} if "ready" in arguments else {}
    event = {"name": category, "cat": category, "lane": lane, "start": start * 1000, "end": end * 1000}
    return event | ready | {"args": {"step": step} | arguments}


def test_collectives_of_a_lane_are_drawn_one_after_the_other():
    generator = random.Random(1)
    for _ in range(100):
        starts = [generator.randrange(50) for _ in range(8)]
        times = [(start, start + generator.randrange(20)) for start in starts]
        events = [recorded("communication", *time, lane="dp", group="dp", op="all_reduce") for time in times]
        content = merge([part(0, recorded("step", 0, 100), *events)])
        check_format(content)
        spans = [event for event in content["traceEvents"] if event.get("cat") == "communication"]
        drawn = [(span["ts"], span["ts"] + span["dur"]) for span in spans]
        assert sum(end - start for start, end in drawn) == trace_report.length(drawn)
        assert trace_report.union(drawn) == trace_report.union(times)
        measured = [(span["args"]["issue_us"], span["args"]["completion_us"]) for span in spans]
        assert sorted(measured) == sorted(times)


def test_messages_pair_in_order_and_leftovers_are_counted():
    message = {"group": "pp_forward", "lane": "pp_forward send", "op": "send"}
    arrival = {"group": "pp_forward", "lane": "pp_forward receive", "op": "receive"}
    sender = [recorded("communication", start, start + 2, peer=1, **message) for start in (1, 5, 9)]
    receiver = [recorded("communication", 0, end, peer=0, ready=end, **arrival) for end in (4, 8)]
    content = merge([part(0, recorded("step", 0, 20), *sender), part(1, recorded("step", 0, 20), *receiver)])
    check_format(content)
    flows = [event for event in content["traceEvents"] if event["ph"] in "sf"]
    assert [(flow["ph"], flow["pid"], round(flow["ts"])) for flow in flows] == [
        *(("s", 0, 1), ("f", 1, 4), ("s", 0, 5), ("f", 1, 8)),
    ]
    assert content["metadata"]["unpaired_messages"] == 1


def test_a_rank_whose_part_is_missing(tmp_path):
    """--run-dir on a disk that nodes do not share: the trace holds the ranks that rank 0 can see."""
    (tmp_path / "trace.json").write_text(json.dumps(merge([part(0, recorded("step", 0, 9)), part(3)])))
    trace = read_trace(tmp_path)
    assert trace.ranks == [0, 3]
    with pytest.raises(UsageError, match="step 0 is not in the trace"):
        trace.window(3, 0)


# ---- CUDA, without one -------------------------------------------------------------------------------------


class FakeCuda:
    """Streams as clocks, in milliseconds: all work is queued at once and runs in the order of its stream."""

    def __init__(self):
        cuda = self
        self.main = self.current = SimpleNamespace(time=0.0)
        self.network = SimpleNamespace(time=0.0)
        self.streams, self.ranges = [], []
        self.nvtx = SimpleNamespace(range_push=self.ranges.append, range_pop=lambda: self.ranges.append("pop"))

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.time = cuda.current.time

            def synchronize(self):
                pass

            def elapsed_time(self, later):
                return later.time - self.time

        self.Event = Event

    def Stream(self):
        self.streams.append(SimpleNamespace(time=0.0))
        return self.streams[-1]

    def stream(self, stream):
        cuda, before = self, self.current

        class Context:
            def __enter__(self):
                cuda.current = stream

            def __exit__(self, *_):
                cuda.current = before

        return Context()

    def synchronize(self):
        everything = [self.main, self.network, *self.streams]
        latest = max(stream.time for stream in everything)
        for stream in everything:
            stream.time = latest

    def kernel(self, milliseconds):
        self.current.time += milliseconds

    def collective(self, milliseconds):
        """Starts when the current stream comes to it, as on NCCL; `wait` blocks the then current stream."""
        self.network.time = end = max(self.network.time, self.current.time) + milliseconds

        def wait():
            self.current.time = max(self.current.time, end)

        return SimpleNamespace(wait=wait)


def test_cuda_events_on_their_streams(tmp_path, monkeypatch):
    cuda = FakeCuda()
    wall = SimpleNamespace(time_ns=lambda: round(cuda.main.time * 1e6))
    monkeypatch.setattr("common.tracing.clocks.time", wall)
    groups = {name: Group(name, (0,), 0, None, "nccl") for name in GROUP_NAMES}
    groups["dp"] = Group("dp", (0, 1), 0, None, "nccl")
    mesh = Mesh(degrees=Degrees(), device=torch.device("cpu"), **groups)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, *_, **__: cuda.collective(8))
    tracer = Tracer((1, 2), mesh, tmp_path, time_source=CudaClock(mesh, cuda))
    carried = None
    for step in range(4):
        with tracer.step(step):
            with tracer.phase("backward", micro_batch=7):
                cuda.kernel(10)
                work = all_reduce(torch.ones(4), mesh.dp, async_op=True)
                cuda.kernel(5)
                work.wait()
            if step == 1:
                carried = all_reduce(torch.ones(4), mesh.dp, async_op=True)
                cuda.kernel(1)
            elif step == 2:
                with tracer.phase("optimizer"):
                    carried.wait()
                    cuda.kernel(2)
    assert len(cuda.streams) == 1, "one side stream a group, and none outside the traced steps"
    assert cuda.ranges[:4] == ["step 1", "backward 7", "pop", "pop"]
    tracer.close()
    trace = read_trace(tmp_path)
    assert trace.metadata["clock"] == "cuda"
    first, second = report(trace)
    near = {"abs": 1e-6}
    # 5 ms of kernels cover the all-reduce of 8 ms; of the second, 1 ms lies in the step, outside its phases
    assert first.step_time_s == pytest.approx(19e-3, **near)
    assert first.compute_s == pytest.approx(15e-3, **near)
    assert first.exposed_s == pytest.approx(3e-3, **near)
    assert first.idle_s == pytest.approx(1e-3, **near)
    assert first.communication_s == pytest.approx(9e-3, **near)
    assert first.overlapped_s == pytest.approx(5e-3, **near)
    assert first.calls == {"all_reduce": 2}
    assert second.step_time_s == pytest.approx(20e-3, **near)
    assert second.exposed_s == pytest.approx(3e-3, **near)
    assert second.calls == {"all_reduce": 1}


def test_memory_snapshot_of_the_traced_steps(alone, tmp_path, monkeypatch):
    log = []
    monkeypatch.setattr(
        "torch.cuda.memory._record_memory_history", lambda *args, **options: log.append((step, options))
    )
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: log.append((step, path)))
    tracer = Tracer((1, 2), alone, tmp_path, memory_snapshot=True)
    for step in range(4):
        with tracer.step(step):
            pass
    tracer.close()
    assert [when for when, _ in log] == [1, 2, 2]
    assert log[1][1] == str(tmp_path / "memory-rank-0.pickle") and log[2][1] == {"enabled": None}


def kineto(category, name, start, duration, correlation=0) -> dict:
    event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}
    return event | {"args": {"correlation": correlation}}


KINETO = [
    {"ph": "M", "name": "process_name", "args": {}},
    kineto("cpu_op", "aten::mm", 0, 5),
    kineto("cuda_runtime", "cudaLaunchKernel", 0, 2, 1),
    kineto("cuda_driver", "cuLaunchKernelEx", 3, 1, 2),
    kineto("cuda_runtime", "cudaLaunchKernel", 60, 2, 3),
    kineto("cuda_runtime", "cudaMemcpyAsync", 70, 4, 4),
    kineto("cuda_runtime", "cudaStreamSynchronize", 75, 30, 5),
    kineto("kernel", "ampere_sgemm_128x64_nn", 10, 20, 1),  # 10-30
    kineto("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 30, 2),  # -50
    kineto("kernel", "vectorized_layer_norm_kernel", 65, 10, 3),  # 65-75
    kineto("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 80, 20, 4),  # 80-100
    kineto("gpu_user_annotation", "forward", 10, 90),
]


def test_kernels_of_a_kineto_trace(tmp_path, capsys):
    times = classify_kernels(KINETO)
    microseconds = {
        each.name: round(1e6 * getattr(times, each.name), 3)
        for each in dataclasses.fields(times)
        if each.name.endswith("_s")
    }
    assert microseconds == {
        "span_s": 90,
        "compute_s": 30,
        "exposed_s": 20,
        "copies_s": 20,
        "idle_s": 20,  # 50-65 and 75-80
        "communication_s": 30,
        "overlapped_s": 10,
        "starved_s": 12,  # 50-62: not even launched
        "launch_gap_s": 8,  # of 3, 6, 8, 16
    }
    assert times.kernels == 3 and times.overlap_share == pytest.approx(1 / 3)
    assert times.blocking == {
        "cudaMemcpyAsync": (1, pytest.approx(4e-6)),
        "cudaStreamSynchronize": (1, pytest.approx(30e-6)),
    }
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-3.json").write_text(json.dumps({"traceEvents": KINETO}))
    (tmp_path / "profile" / "rank-12.json").write_text(json.dumps({"traceEvents": KINETO[:4]}))
    trace_report.print_kernels(tmp_path)
    printed = capsys.readouterr().out
    assert "    3 " in printed and " 12 " not in printed and "cudaStreamSynchronize: 1 calls" in printed
