"""What our tracer says of a step on a GPU, beside what PyTorch's profiler, Kineto, says of its kernels."""

import json

from common.tracing.chrome_trace import read_trace, time_by_state
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import train_alone

TINY = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 256 --dtype bfloat16 --global-batch {} --micro-batch {}"
TINY += " --seq-len {}"


def kineto_events(found: Findings, name: str) -> list[dict]:
    """Return the events of a run that torch.profiler has seen."""
    return json.loads((found.folder / name / "profile" / "rank-0.json").read_text())["traceEvents"]


@on_devices([""], quick=[""])
def test_tracer(found, item):
    """What our tracer says of the phases of a step, against the kernels that Kineto saw."""
    model_flags = "--model smollm-135m --dtype bfloat16 --seq-len 1024 --micro-batch 8 --global-batch 16"
    model_flags = TINY.format(2, 1, 16) if found.quick else model_flags
    train_alone(found, "run", 1, f"{model_flags} --data synthetic --steps 6 --trace 4:5 --profile")
    rows, ratio = compare_clocks(read_trace(found.folder / "run").spans[0], kineto_events(found, "run"))
    found.note("ms of two steps", [("phase", "our tracer", "kernels in it", "ratio"), *rows])
    assert {row[0] for row in rows} == {"forward", "backward", "optimizer"}
    if found.device.type == "cuda":
        found.note("two steps by our tracer / by Kineto", f"{ratio:.3f}")
        assert 0.95 < ratio < 1.1


def compare_clocks(spans: list[dict], events: list[dict]) -> tuple[list[tuple[str, ...]], float | None]:
    """Return the times of each phase, ours and of the kernels within, and the ratio of the whole.

    The two traces have different clocks. Both end when the last kernel does.
    """

    def times(items: list[dict], shift: float = 0.0) -> list[tuple[float, float]]:
        return [(each["ts"] + shift, each["ts"] + each["dur"] + shift) for each in items]

    steps = times([span for span in spans if span["cat"] == "step"])
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    end = max(stop for _, stop in steps)
    kernels = times(kernels, end - max((stop for _, stop in times(kernels)), default=0.0))
    phases, rows = [span for span in spans if span["cat"] == "phase"], []
    for name in dict.fromkeys(phase["name"] for phase in phases):
        intervals = times([phase for phase in phases if phase["name"] == name])
        ours = sum(stop - start for start, stop in intervals)
        theirs = time_by_state(intervals, kernels).get((True, True), 0.0) if kernels else 0.0
        rows.append((name, f"{ours / 1e3:.2f}", f"{theirs / 1e3:.2f}", f"{theirs / ours:.3f}"))
    return rows, (end - min(steps)[0]) / (end - min(kernels)[0]) if kernels else None
