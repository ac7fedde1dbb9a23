"""What hides the way of tokens to their experts: the condition, and the shared expert over a simulated slow link."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from common import collectives
from common.config import TrainConfig
from common.costs.hardware import H100_TFLOPS, NETWORK, NVLINK
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.link import Link
from common.presets import PRESETS
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace, read_trace
from common.tracing.tracer import Tracer
from step07_expert_parallel.experiments import predictions
from step07_expert_parallel.experiments.blocks import BACKWARD, draw_lanes, phases, slow_down
from step07_expert_parallel.experiments.predictions import Clock
from step07_expert_parallel.experiments.ranks import SHAPE, ExpertLayer, routing
from step07_expert_parallel.expert_parallel import AllToAll

# ---- the condition ---------------------------------------------------------------------------------------------------

PEAK, SEQ = H100_TFLOPS * 1e12, 4096
NODE = 8


def condition(quick: bool) -> None:
    """PREDICTED: how wide experts must be to hide dispatch and combine, for H100-like numbers, and the cheatsheet's."""
    cases = [("mixtral-8x7b", 8, "NVLink", NVLINK), ("mixtral-8x7b", 8, "InfiniBand", NETWORK)]
    cases += [("deepseek-v3-like", 8, "NVLink", NVLINK), ("deepseek-v3-like", 64, "InfiniBand", NETWORK)]
    widths, sheets = [], []
    for name, ep, link, bandwidth in cases:
        model, label = PRESETS[name], f"{name}, ep {ep}, {link}"
        forward, backward = (predictions.width_to_hide(PEAK, bandwidth, ep, backward=each) for each in (False, True))
        shared = predictions.shared_to_hide(model, PEAK, bandwidth, ep)
        ours, theirs = forward / model.expert_ffn, predictions.cheatsheet(model, PEAK, bandwidth, ep)
        cells = (f"{model.expert_ffn:,}", f"{forward:,.0f}", f"{backward:,.0f}", f"{ours:.3f}")
        held = model.shared_experts * model.expert_ffn
        widths.append((label, *cells, f"{held:,}" if held else "none", f"{shared:,.0f}"))
        factors = 2, model.experts / ep, 4 * model.hidden / model.expert_ffn
        product = " x ".join(f"{each:.3g}" for each in factors)
        sheets.append((label, f"{theirs:.4f}", f"{ours:.4f}", f"{ours / theirs:.4g}", product))
    print(f"\npeak {H100_TFLOPS:g} TFLOP/s; NVLink 450 GB/s, InfiniBand 50 GB/s out of each GPU; bfloat16")
    header = ("", "f_e", "at least: forward", "backward", "travel / experts, forward", "shared", "to hide the dispatch")
    print_table("predicted: width of experts that hides their own dispatch and combine", header, widths)
    header = ("", "cheatsheet", "ours, forward", "ours / cheatsheet", "beta x E/EP x 4h/f_e")
    print_table("predicted: communication / computation", header, sheets)

    rows, model = [], PRESETS["deepseek-v3-like"]
    elsewhere = predictions.nodes_reached(model)
    for label, copies, beta in (
        ("a copy for each expert", model.top_k * 63 / 64, (2, 2)),
        ("once to each of at most 4 nodes", elsewhere, (2, 2)),
        ("and in 8 bits on the way there", elsewhere, (1, 2)),
    ):
        travel = copies * model.hidden * sum(beta) / NETWORK
        compute = predictions.layer_flops(model, SEQ) / PEAK
        back = copies * model.hidden * 4 / NETWORK  # gradients in 16 bits
        cells = (f"{1e6 * travel:.2f}", f"{1e6 * compute:.2f}", f"{travel / compute:.2f}")
        rows.append((label, *cells, f"{(travel + back) / (3 * compute):.2f}"))
    header = ("", "dispatch + combine", "a layer computes", "forward: travel / computation", "F and B together")
    title = f"predicted: deepseek-v3-like, ep 64 on 8 nodes, InfiniBand alone, {SEQ:,} tokens of a sequence"
    print_table(f"{title}; microseconds for a token and a layer", header, rows)


# ---- the shared expert -----------------------------------------------------------------------------------------------

RANKS = 4
FLAGS = SHAPE | {"ep": RANKS, "seq_len": 64, "micro_batch": 1}
SHARED, EXPERTS = 0.03, 0.03  # seconds of their forwards
TRAVELS = (0.015, 0.03, 0.06)  # seconds of an all-to-all of tokens
DRAWN = 0.03
VARIANTS = {  # (shared experts, whether they are computed while tokens travel)
    "no shared expert": (0, True),
    "shared one after the wait": (1, False),
    "shared one while tokens travel": (1, True),
}


def overlap(quick: bool) -> None:
    """The shared expert under the dispatch, over links of three speeds: exposed communication, time, and timelines."""
    rows, travels = [], (DRAWN,) if quick else TRAVELS
    cases = [(variant, travel) for travel in travels for variant in VARIANTS]
    traces = dict(zip(cases, traced(cases, 2 if quick else 6)))
    for variant, travel in cases:
        for phase, predicted in play(variant, travel).items():
            found = measure(traces[variant, travel], phase)
            cells = [cell for pair in zip(predicted, found) for cell in compared(*(1e3 * x for x in pair), ".1f")]
            rows.append((f"{1e3 * travel:g} ms, {variant}: {phase}", *cells))
    header = ("an all-to-all takes", "exposed: predicted", "measured", "ratio", "phase: predicted", "measured", "ratio")
    title = f"{RANKS} ranks; shared experts compute {1e3 * SHARED:g} ms, routed ones {1e3 * EXPERTS:g}"
    print_table(f"{title}, in the backward twice that; ms of one layer", header, rows)
    panels = []
    for variant in list(VARIANTS)[1:]:
        trace = traces[variant, DRAWN]
        lasted = {step: phases(trace, 0, step) for step in trace.steps}
        step, times = min(lasted.items(), key=lambda item: item[1]["backward"][1] - item[1]["forward"][0])
        spans = [span for span in trace.spans[0] if span["args"]["step"] == step]
        waits = sum(measure(trace, phase)[0] for phase in ("forward", "backward"))
        title = f"{variant.replace('one', 'expert')}: waits {1e3 * waits:.0f} ms"
        panels.append((title, spans, times["forward"][0], times["backward"][1]))
    draw_lanes("overlap", panels, "ms of one layer, forward and backward")


def link_of(travel: float) -> Link:
    """A link on which an all-to-all of this layer's tokens takes `travel` seconds."""
    model = TrainConfig(**FLAGS).model_config
    size = predictions.dispatch_bytes(FLAGS["seq_len"], model.top_k, model.hidden, RANKS, 4)
    return Link(0.0, size / travel)


def traced(cases: list[tuple[str, float]], steps: int) -> list[Trace]:
    """The trace of each case (variant, seconds of an all-to-all)."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(RANKS, run_cases, cases, steps, folder, title="overlap", jobs=len(cases))
        return [read_trace(Path(folder, str(index))) for index in range(len(cases))]


def run_cases(mesh: Mesh, done: Callable, cases: list[tuple[str, float]], steps: int, folder: str) -> None:
    """On a rank: forward and backward of one layer, `steps` times for each case."""
    for index, (variant, travel) in enumerate(cases):
        shared, meanwhile = VARIANTS[variant]
        layer = ExpertLayer(mesh, **FLAGS, shared_experts=shared, link=f"0,{1e-9 * link_of(travel).bandwidth}")
        tracer = Tracer((0, steps - 1), layer.mesh, f"{folder}/{index}")
        slow_down(layer.layer.experts, "experts", EXPERTS, tracer)
        if shared:
            slow_down(layer.layer.shared, "shared", SHARED, tracer)
        with routing(evenly=True), nullcontext() if meanwhile else waiting_at_once():
            for step in range(-1, steps):  # the first one is not traced
                collectives.barrier(mesh.world)
                with tracer.step(step):
                    for phase in ("forward", "backward"):
                        with tracer.phase(phase):
                            getattr(layer, phase)()
        tracer.close()
        done()


def waiting_at_once():
    """Context manager: whoever starts an all-to-all of tokens waits for it before anything else."""
    launch = AllToAll.launch

    def launch_and_wait(exchange: AllToAll, *args):
        result = launch(exchange, *args)
        exchange.in_flight[1].wait()
        return result

    return mock.patch.object(AllToAll, "launch", launch_and_wait)


def measure(trace: Trace, phase: str) -> tuple[float, float]:
    """Seconds that a rank was blocked in a phase, and seconds of the phase: means over ranks in its shortest step."""
    found = []
    for step in trace.steps:
        whole = blocked = 0.0
        for rank in trace.ranks:
            start, end = phases(trace, rank, step)[phase]
            waits = [
                each for each in trace.spans[rank] if each["cat"] in ("wait", "issue") and start <= each["ts"] < end
            ]
            whole += 1e-6 * (end - start) / len(trace.ranks)
            blocked += 1e-6 * sum(each["dur"] for each in waits) / len(trace.ranks)
        found.append((whole, blocked))
    whole, blocked = min(found)
    return blocked, whole


def play(variant: str, travel: float) -> dict[str, tuple[float, float]]:
    """By phase: predicted seconds that a rank is blocked, and those of the phase."""
    (shared, meanwhile), result = VARIANTS[variant], {}
    counts = predictions.counts_bytes(FLAGS["experts"], RANKS) / link_of(travel).bandwidth
    for phase, times in (("forward", 1.0), ("backward", BACKWARD)):
        clock, hidden = Clock(), shared * SHARED * times
        if phase == "forward":
            clock.wait(clock.send(counts))
        else:  # begins where the forward ends: with the gradients of what came home
            clock.wait(clock.send(travel))
            clock.now += EXPERTS * times
        arrives = clock.send(travel)
        if not meanwhile:
            clock.wait(arrives)
        clock.now += hidden
        clock.wait(arrives)
        if phase == "forward":
            clock.now += EXPERTS
            clock.wait(clock.send(travel))
        result[phase] = clock.blocked, clock.now
    return result
