"""DualPipe's point: a forward and a backward of two micro-batches hide each other's all-to-alls."""

import statistics
import time
from functools import partial
from itertools import pairwise

from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK, NVLINK
from common.drawing.tables import print_comparison, print_table
from common.experiments.even_routing import choose_in_turn
from common.experiments.traces import TracedPart, run_parts
from common.model_config import ModelConfig
from common.presets import PRESETS
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace
from step05_pipeline.apply_pipeline import build_pipeline
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, runs_as_one, simulate
from step07_expert_parallel import cost
from step07_expert_parallel.apply_experts import routers_of
from step07_expert_parallel.experiments.blocks import draw_blocks, phases, slow_down
from step07_expert_parallel.experiments.layer import SHAPE, Training
from step07_expert_parallel.overlap import OverlappedPipeline

PP, EP = 2, 2
FLAGS = SHAPE | {"layers": 4, "hidden": 32, "expert_ffn": 16, "vocab": 256, "micro_batch": 1}
FLAGS |= {"pp": PP, "ep": EP, "schedule": "dualpipe"}
LAYERS = FLAGS["layers"] // PP  # of a stage
ATTENTION, EXPERTS, TRAVEL = 0.03, 0.03, 0.02  # seconds of a layer's forward, and of an all-to-all of tokens
SEQ = 4096  # tokens of the large models' sequences


class Slow(Pipeline):
    """Postponed gradients of weights take as long as a forward."""

    def _weight_gradients(self, action: Action) -> None:
        time.sleep(LAYERS * (ATTENTION + EXPERTS))
        super()._weight_gradients(action)


class SlowTurns(Slow, OverlappedPipeline):
    """The same, of which a forward and a backward take turns."""


KINDS = {"one after the other": Slow, "in turns": SlowTurns}


def dualpipe(quick: bool) -> None:
    """Real runs of `--schedule dualpipe --ep 2 --pp 2` over a slow link, F and B in turns or not, and timelines."""
    flags, steps = FLAGS | {"global_batch": (4 if quick else 8) * EP}, 1 if quick else 3
    traces = run_parts(PP * EP, part, {name: (kind, flags) for name, kind in KINDS.items()}, steps, title="dualpipe")
    schedule, rows, panels = build_schedule("dualpipe", PP, flags["global_batch"] // EP), [], []
    for name, trace in traces.items():
        costs = stage_costs(ATTENTION, EXPERTS, TRAVEL, LAYERS, together=name == "in turns", communication=TRAVEL)
        pair, step = min((time_of_pairs(trace, schedule, step), step) for step in trace.steps)
        whole, step = min((makespan(trace, step), step) for step in trace.steps)
        rows.append((f"F and B, {name}", 1e3 * (costs.FB or costs.of("F") + costs.of("B")), 1e3 * pair))
        rows.append((f"the step, {name}", 1e3 * simulate(schedule, costs).makespan, 1e3 * whole))
        pairs = pairs_of(schedule, rank=0)
        start, end = window(trace, 0, step, pairs[len(pairs) // 2])
        title = f"F and B {name}: {(end - start) / 1e3:.0f} ms (the whole step {1e3 * whole:,.0f} ms)"
        panels.append((title, [span for span in trace.spans[0] if span["args"]["step"] == step], start, end))
    title = f"{PP} stages x ep {EP}, {schedule.micro_batches} micro-batches; a stage has {LAYERS} layers of attention "
    title += f"{1e3 * ATTENTION:g} ms, experts {1e3 * EXPERTS:g} ms, all-to-alls {1e3 * TRAVEL:g} ms; ms"
    print_comparison(title, "", rows, ",.0f")
    draw_blocks("dualpipe", panels, "ms on rank 0, two layers. A: attention, E: experts; D: dispatch, C: combine")


def part(mesh: Mesh, case: tuple[type, dict]) -> TracedPart:
    """On a rank: the gradients of a step, by this kind of pipeline."""
    kind, flags = case
    size = cost.dispatch_bytes(FLAGS["seq_len"], FLAGS["top_k"], FLAGS["hidden"], EP, 4)
    training = Training(mesh, **flags, link=f"0,{1e-9 * size / TRAVEL}")
    built, *others = training.parts
    pipeline = build_pipeline(built.schedule, built.stages, built.zero_wrappers, training.config, training.mesh, kind)
    training.parts = pipeline, *others
    for layer in (layer for stage in pipeline.stages for layer in stage.layers.values()):
        slow_down(layer.attention, "attention", ATTENTION, pipeline)
        slow_down(layer.mlp.experts, "experts", EXPERTS, pipeline)
    for _, router in routers_of(pipeline.stages):
        router.choose = partial(choose_in_turn, router)
    return TracedPart(lambda tracer: training.gradients(tracer=tracer), training.mesh)


# ---- measured --------------------------------------------------------------------------------------------------------


def pairs_of(schedule: Schedule, rank: int) -> list[tuple[Action, Action]]:
    """The forwards of a rank's schedule with the backward right behind, if the two may run as one."""
    return [pair for pair in pairwise(schedule.actions[rank]) if runs_as_one(*pair)]


def window(trace: Trace, rank: int, step: int, actions: tuple[Action, ...]) -> tuple[float, float]:
    """When the first of some actions starts and the last one ends, in microseconds."""
    times = [phases(trace, rank, step)[str(action)] for action in actions]
    return min(start for start, _ in times), max(end for _, end in times)


def time_of_pairs(trace: Trace, schedule: Schedule, step: int) -> float:
    """Seconds of a forward and the backward right behind it: the median over all such pairs of all ranks."""
    pairs = [(rank, pair) for rank in trace.ranks for pair in pairs_of(schedule, rank % PP)]  # dp ranks do the same
    return 1e-6 * statistics.median(end - start for start, end in (window(trace, r, step, pair) for r, pair in pairs))


def makespan(trace: Trace, step: int) -> float:
    """From the first action of any rank to the end of the last one, in seconds."""
    times = [time for rank in trace.ranks for name, time in phases(trace, rank, step).items() if name[0] in "FBIW"]
    return 1e-6 * (max(end for _, end in times) - min(start for start, _ in times))


# ---- predicted -------------------------------------------------------------------------------------------------------


def stage_costs(*layer, together: bool, communication: float = 0.0) -> Costs:
    """The costs of a stage's actions, with all-to-alls; F and B `together` hide those of each other.

    Args:
        layer: seconds of attention, of experts, of an all-to-all; the number of layers.
    """
    actions = {kind: cost.parts(kind, *layer) for kind in "FBIW"}
    joint = cost.in_turns(actions["B"], actions["F"]) if together else None  # the backward begins
    return Costs(**{kind: cost.alone(each) for kind, each in actions.items()}, FB=joint, communication=communication)


def partner_cases() -> list[tuple[str, ModelConfig, float, float]]:
    """Large models on H100s: name, model, copies of a token that travel over a link, and bytes/s of that link.

    With ep 8 all ranks are on one node, or each on a node of its own. With ep 64 they are on 8 nodes, and what stays
    within one of these takes NVLink.
    """
    mixtral, deepseek = PRESETS["mixtral-8x7b"], PRESETS["deepseek-v3-like"]
    nodes = deepseek.expert_groups
    return [
        ("Mixtral 8x7B, ep 8, NVLink", mixtral, cost.copies(mixtral, 8, False), NVLINK),
        ("Mixtral 8x7B, ep 8, InfiniBand", mixtral, cost.copies(mixtral, 8, False), NETWORK),
        ("DeepSeek-V3, ep 8, NVLink", deepseek, cost.copies(deepseek, 8, False), NVLINK),
        ("DeepSeek-V3, ep 64 on 8 nodes, InfiniBand", deepseek, cost.copies(deepseek, nodes, False), NETWORK),
        ("the same, once to each of at most 4 nodes", deepseek, cost.copies(deepseek, nodes, True), NETWORK),
    ]


def partner_times(model: ModelConfig, copies: float, bandwidth: float) -> tuple[float, float, float, float]:
    """PREDICTED: seconds per token and layer of attention, of experts and of an all-to-all, and what of four of these
    a forward and a backward in turns do not hide.
    """
    layers = 4
    attention, experts = (flops / (H100_TFLOPS * 1e12) for flops in cost.operations(model, SEQ).values())
    travel = 2 * copies * model.hidden / bandwidth
    backward, forward = (cost.parts(kind, attention, experts, travel, layers) for kind in "BF")
    exposed = cost.in_turns(backward, forward) / layers - 3 * (attention + experts)
    return attention, experts, travel, abs(exposed)  # rounding errors can have a sign


def partners(quick: bool) -> None:
    """PREDICTED: behind what each all-to-all hides on H100s, and how much of it does not."""
    rows = []
    for name, model, copies, bandwidth in partner_cases():
        attention, experts, travel, exposed = partner_times(model, copies, bandwidth)
        times = travel, attention, 2 * experts, experts, 2 * attention, 4 * travel, exposed
        rows.append((name, *(f"{1e6 * each:.2f}" for each in times), f"{1 - exposed / (4 * travel):.0%}"))
    header = ("", "an all-to-all", "C of B: A of F", "D of F: E of B", "D of B: E of F", "C of F: A of B")
    title = f"predicted: F and B in turns on H100s, bfloat16, {SEQ:,} tokens of a sequence; µs per token and layer"
    print_table(title, (*header, "all four travel", "exposed", "hidden"), rows)
