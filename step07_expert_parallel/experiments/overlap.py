"""What hides the way of tokens to their experts: the condition, and the shared expert over a simulated slow link."""

from common.costs.alpha_beta import Player
from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK, NVLINK
from common.drawing.tables import compared, print_table
from common.experiments.even_routing import choose_in_turn
from common.experiments.traces import TracedPart, run_parts
from common.presets import PRESETS
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace
from common.tracing.tracer import Tracer
from step07_expert_parallel import cost
from step07_expert_parallel.experiments.blocks import BACKWARD, draw_blocks, phases, slow_down
from step07_expert_parallel.experiments.layer import SHAPE, ExpertLayer
from step07_expert_parallel.expert_parallel import TokenDispatcher
from step07_expert_parallel.moe import Choices, MoE, _Combine, _Copy

PEAK, SEQ = H100_TFLOPS * 1e12, 4096


def condition(quick: bool) -> None:
    """PREDICTED: how wide experts must be to hide dispatch and combine, for H100-like numbers, and the cheatsheet's."""
    cases = [("mixtral-8x7b", 8, "NVLink", NVLINK), ("mixtral-8x7b", 8, "InfiniBand", NETWORK)]
    cases += [("deepseek-v3-like", 8, "NVLink", NVLINK), ("deepseek-v3-like", 64, "InfiniBand", NETWORK)]
    rows = []
    for name, ep, link, bandwidth in cases:
        model = PRESETS[name]
        forward, backward = (cost.width_to_hide(PEAK, bandwidth, ep, backward=each) for each in (False, True))
        ours, theirs = forward / model.expert_ffn, cost.cheatsheet(model, PEAK, bandwidth, ep)
        cells = (f"{model.expert_ffn:,}", f"{forward:,.0f}", f"{backward:,.0f}", f"{ours:.3f}", f"{theirs:.4f}")
        factors = 2, model.experts / ep, 4 * model.hidden / model.expert_ffn
        product = " x ".join(f"{each:.3g}" for each in factors)
        rows.append((f"{name}, ep {ep}, {link}", *cells, f"{ours / theirs:.4g}", product))
    header = ("", "f_e", "at least: forward", "backward", "travel / experts, forward")
    header += ("cheatsheet", "ours / cheatsheet", "beta x E/EP x 4h/f_e")
    title = f"predicted: width of experts that hides dispatch and combine, at {H100_TFLOPS:g} TFLOP/s, bfloat16"
    print_table(title, header, rows)


# ---- the shared expert -----------------------------------------------------------------------------------------------

RANKS = 4
FLAGS = SHAPE | {"ep": RANKS, "seq_len": 64, "micro_batch": 1}
SHARED, EXPERTS, TRAVEL = 0.03, 0.03, 0.03  # seconds of their forwards, and of an all-to-all of tokens


class SharedLast(MoE):
    """The layer, if the shared experts wait until the tokens have arrived: one line of `forward` has moved down."""

    def forward(self, x):
        chosen, gates = self.router(x)
        choices = Choices(chosen, self.router.routing.experts, some_dropped=False)
        dispatcher = TokenDispatcher(choices.counts, self.ep, self.before_wait)
        rows, counts = dispatcher.arrive(dispatcher.dispatch(_Copy.apply(x.flatten(0, 1), choices)))
        shared = self.shared(x)
        rows = dispatcher.back(self.experts(rows, counts))
        return _Combine.apply(rows, gates.flatten()[choices.order], choices).to(x.dtype).view_as(x) + shared


VARIANTS = {"shared expert after the wait": SharedLast, "shared expert while tokens travel": MoE}


def overlap(quick: bool) -> None:
    """The shared expert under the dispatch, over a slow link: exposed communication, time, and timelines."""
    traces = run_parts(RANKS, part, VARIANTS, 2 if quick else 6, title="overlap")
    rows, panels = [], []
    for name, trace in traces.items():
        waits = 0.0
        for phase, predicted in play(VARIANTS[name] is MoE).items():
            found = measure(trace, phase)
            waits += found[0]
            cells = [cell for pair in zip(predicted, found) for cell in compared(*(1e3 * x for x in pair), ".1f")]
            rows.append((f"{name}: {phase}", *cells))
        lasted = {step: phases(trace, 0, step) for step in trace.steps}
        step, times = min(lasted.items(), key=lambda item: item[1]["backward"][1] - item[1]["forward"][0])
        spans = [span for span in trace.spans[0] if span["args"]["step"] == step]
        panels.append((f"{name}: waits {1e3 * waits:.0f} ms", spans, times["forward"][0], times["backward"][1]))
    header = ("", "exposed: predicted", "measured", "ratio", "phase: predicted", "measured", "ratio")
    title = f"{RANKS} ranks; shared experts, routed ones and an all-to-all take {1e3 * TRAVEL:g} ms each"
    print_table(f"{title}, experts in the backward twice that; ms of one layer", header, rows)
    draw_blocks("overlap", panels, "ms of one layer; S: shared expert, E: experts, D: dispatch, C: combine")


def part(mesh: Mesh, kind: type) -> TracedPart:
    """On a rank: forward and backward of one layer."""
    size = cost.dispatch_bytes(FLAGS["seq_len"], FLAGS["top_k"], FLAGS["hidden"], RANKS, 4)
    layer = ExpertLayer(mesh, kind, choose_in_turn, **FLAGS, shared_experts=1, link=f"0,{1e-9 * size / TRAVEL}")
    slow_down(layer.layer.experts, "experts", EXPERTS, layer)
    slow_down(layer.layer.shared, "shared", SHARED, layer)

    def step(tracer: Tracer) -> None:
        layer.tracer = tracer
        for phase in ("forward", "backward"):
            with tracer.phase(phase):
                getattr(layer, phase)()

    return TracedPart(step, layer.mesh)


def measure(trace: Trace, phase: str) -> tuple[float, float]:
    """Seconds that a rank was blocked in a phase, and seconds of the phase: means over ranks in its shortest step."""
    found = []
    for step in trace.steps:
        whole = blocked = 0.0
        for rank in trace.ranks:
            start, end = phases(trace, rank, step)[phase]
            spans = [each for each in trace.spans[rank] if each["cat"] in ("wait", "issue")]
            whole += 1e-6 * (end - start) / len(trace.ranks)
            blocked += 1e-6 * sum(each["dur"] for each in spans if start <= each["ts"] < end) / len(trace.ranks)
        found.append((whole, blocked))
    whole, blocked = min(found)
    return blocked, whole


def play(meanwhile: bool) -> dict[str, tuple[float, float]]:
    """By phase: predicted seconds that a rank is blocked, and those of the phase. Counts travel in no time."""
    result = {}
    for phase, times in (("forward", 1.0), ("backward", BACKWARD)):
        player = Player()
        if phase == "backward":  # begins where the forward ends: with the gradients of what came home
            player.wait(player.travel(TRAVEL))
            player.now += EXPERTS * times
        arrives = player.travel(TRAVEL)
        if not meanwhile:
            player.wait(arrives)
        player.now += SHARED * times
        player.wait(arrives)
        if phase == "forward":
            player.now += EXPERTS
            player.wait(player.travel(TRAVEL))
        result[phase] = player.blocked, player.now
    return result
