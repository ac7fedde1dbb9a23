"""How fast one GPU trains, what it does meanwhile, and whether our tracer says the same as Kineto."""

import contextlib
import dataclasses
import gc
import json
import statistics
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F

from common import model
from common.config import TrainConfig
from common.model import RMSNorm, SwiGLU
from common.tracing.chrome_trace import read_trace, time_by_state
from common.tracing.gpu_kernels import classify_kernels
from step01_single_gpu import train as step01
from tests.gpu_check.findings import NOT_ON_CPU, Findings
from tests.gpu_check.launching import train_alone

STEPS = 10  # the first two warm up; the last is traced and profiled, for which the one before warms up
LARGE = "--model smollm-1.7b --dtype bfloat16 --global-batch {} --micro-batch {} --seq-len {}"
TINY = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 256 --dtype bfloat16 --global-batch {} --micro-batch {}"
TINY += " --seq-len {}"
ROOM = 56 * 2**30  # bytes that the large model takes: 31 GB of weights, moments and gradients, the rest activations
LIKE_EAGER = 1e-2  # relative difference of the losses in bfloat16


def silu_times(gate, up):
    """The part of SwiGLU between its matrix products."""
    return F.silu(gate) * up


@contextlib.contextmanager
def compiled_pieces(backend: str) -> Iterator[None]:
    """In this block four pure functions of the model are compiled: RMSNorm, the rotation, silu x up, and the loss."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def compiled(function):
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    gated = compiled(silu_times)

    def forward(self, x):
        gate, up = self.apply_linears(x, (self.gate_proj, self.up_proj))
        return self.down_proj(gated(gate, up))

    with contextlib.ExitStack() as stack:
        replaced = [(RMSNorm, "forward", compiled(RMSNorm.forward)), (SwiGLU, "forward", forward)]
        replaced += [(model, "rotate", compiled(model.rotate))]
        replaced += [(step01, "cross_entropy_sum", compiled(step01.cross_entropy_sum))]
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def speed(found: Findings) -> None:
    """Use of the peak by a model of 1.7 billion parameters, as it is and with four compiled functions; its kernels."""
    cuda, model_flags = found.device.type == "cuda", TINY if found.quick else LARGE
    if cuda and not found.quick and torch.cuda.get_device_properties(found.device).total_memory < ROOM:
        found.check("skipped", True, f"the model needs {ROOM >> 30} GiB, which this GPU does not have")
        return
    rows = [("", "sequence", "ms a step", "tokens/s", "MFU", "peak GiB", "ms of kernels", "idle")]
    for seq in (64,) if found.quick else (2048, 4096):
        rows_at_once, losses = (1, {}) if found.quick else (4096 // seq, {})
        flags = model_flags.format(rows_at_once * (2 if found.quick else 8), rows_at_once, seq)
        flags += f" --data synthetic --warmup 2 --steps {STEPS} --trace {STEPS - 1}:{STEPS - 1} --profile"
        for name in ("eager", "compiled"):
            compiled = compiled_pieces("inductor" if cuda else "eager")
            with compiled if name == "compiled" else contextlib.nullcontext():
                lines = train_alone(found, f"{name} {seq}", 1, flags, change=longer)
            losses[name] = [line["loss"] for line in lines]
            rows.append((name, str(seq), *figures(found, f"{name} {seq}", lines[2 : STEPS - 2])))
            gc.collect()  # models refer to themselves, through their hooks
            torch.cuda.empty_cache()
        worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses["compiled"], losses["eager"]))
        found.check(f"sequences of {seq}: compiled as eager within {LIKE_EAGER:g}", worst < LIKE_EAGER, f"{worst:.1e}")
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.check("the four functions are compiled, each for few shapes", 4 <= graphs <= 8, f"{graphs} graphs")
    found.note("medians of the steps that are not profiled", rows)


def longer(config: TrainConfig) -> None:
    """Let sequences be as long as the flags say, however many positions the preset has."""
    config.model_config = dataclasses.replace(config.model_config, max_positions=config.seq_len)


def kineto_events(found: Findings, name: str) -> list[dict]:
    """Return the events of a run that torch.profiler has seen."""
    return json.loads((found.folder / name / "profile" / "rank-0.json").read_text())["traceEvents"]


def figures(found: Findings, name: str, lines: list[dict]) -> tuple[str, ...]:
    """Return the cells of a run; its kernels become a table of their own."""
    seconds, tokens, mfu = (
        statistics.median(line[key] for line in lines) for key in ("step_time_s", "tokens_per_s", "mfu")
    )
    events, cells = kineto_events(found, name), (f"{1e3 * seconds:.1f}", f"{tokens:,.0f}")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        found.note(f"MFU, memory, kernels and idle time, {name}", NOT_ON_CPU)
        return *cells, *["-"] * 4
    found.note(f"kernels of a step, {name}", [("kernel", "launches", "ms", "share"), *kernel_rows(kernels)])
    times, peak = classify_kernels(events), max(line["peak_memory_bytes"] for line in lines)
    busy = times["compute"] + times["copies"]
    return *cells, f"{mfu:.1%}", f"{peak / 2**30:.1f}", f"{1e3 * busy:.1f}", f"{1 - busy / seconds:.1%}"


def kernel_rows(kernels: list[dict]) -> list[tuple[str, ...]]:
    """Return the 15 kernels that take longest: name, launches, ms and share of the time of all kernels."""
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        by_name.setdefault(event["name"], []).append(event["dur"])
    total = sum(map(sum, by_name.values()))
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:15]
    return [(name[:90], str(len(us)), f"{sum(us) / 1e3:.2f}", f"{sum(us) / total:.1%}") for name, us in longest]


def tracer(found: Findings) -> None:
    """What our tracer says of forward, backward and optimizer, against the times of the kernels that Kineto saw."""
    model_flags = "--model smollm-135m --dtype bfloat16 --seq-len 1024 --micro-batch 8 --global-batch 16"
    model_flags = TINY.format(2, 1, 16) if found.quick else model_flags
    train_alone(found, "run", 1, f"{model_flags} --data synthetic --steps 6 --trace 4:5 --profile")
    rows, ratio = compare_clocks(read_trace(found.folder / "run").spans[0], kineto_events(found, "run"))
    found.check("the tracer wrote all phases", {row[0] for row in rows} == {"forward", "backward", "optimizer"})
    found.note("ms of two steps", [("phase", "our tracer", "kernels in it", "ratio"), *rows])
    if ratio is None:
        found.note("the tracer against Kineto", NOT_ON_CPU)
    else:
        found.check("two steps by our tracer / by Kineto", 0.95 < ratio < 1.1, f"{ratio:.3f}")


def compare_clocks(spans: list[dict], events: list[dict]) -> tuple[list[tuple[str, ...]], float | None]:
    """Return for each phase our time and that of the kernels within, and the ratio of the whole; None without kernels.

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
        ours, theirs = sum(stop - start for start, stop in intervals), 0.0
        if kernels:
            theirs = time_by_state(intervals, kernels).get((True, True), 0.0)
        rows.append((name, f"{ours / 1e3:.2f}", f"{theirs / 1e3:.2f}", f"{theirs / ours:.3f}"))
    return rows, (end - min(steps)[0]) / (end - min(kernels)[0]) if kernels else None
