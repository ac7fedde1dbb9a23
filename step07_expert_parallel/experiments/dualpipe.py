"""DualPipe's point: a forward and a backward of two micro-batches hide each other's all-to-alls."""

import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest import mock

from common import collectives
from common.config import TrainConfig
from common.costs.hardware import NETWORK, NVLINK
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.link import Link
from common.presets import PRESETS
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace, read_trace
from common.tracing.tracer import Tracer
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, runs_as_one, simulate
from step05_pipeline.stages import schedule_of
from step07_expert_parallel import train
from step07_expert_parallel.experiments import predictions
from step07_expert_parallel.experiments.blocks import draw_lanes, phases, slow_down, slow_weight_gradients
from step07_expert_parallel.experiments.overlap import PEAK, SEQ
from step07_expert_parallel.experiments.predictions import Part, alone, in_turns, nodes_reached
from step07_expert_parallel.experiments.ranks import SHAPE, Run, routing
from step07_expert_parallel.interleave import InterleavedPipeline

PP, EP = 2, 2
FLAGS = SHAPE | {"layers": 4, "hidden": 32, "expert_ffn": 16, "vocab": 256, "micro_batch": 1}
FLAGS |= {"pp": PP, "ep": EP, "schedule": "dualpipe"}
LAYERS = FLAGS["layers"] // PP  # of a stage
ATTENTION, EXPERTS, TRAVEL = 0.03, 0.03, 0.02  # seconds of a layer's forward, and of an all-to-all of tokens
KINDS = {"one after the other": Pipeline, "in turns": InterleavedPipeline}


def dualpipe(quick: bool) -> None:
    """Real runs of `--schedule dualpipe --ep 2 --pp 2` over a slow link, F and B in turns or not, and timelines."""
    flags, steps = FLAGS | {"global_batch": (4 if quick else 8) * EP}, 1 if quick else 3
    with tempfile.TemporaryDirectory() as folder:
        config = on_ranks(PP * EP, run_both, flags, steps, folder, title="dualpipe", jobs=len(KINDS))[0]
        traces = {name: read_trace(Path(folder, name)) for name in KINDS}
    schedule, rows, panels = schedule_of(config), [], []
    for name, trace in traces.items():
        costs = costs_of(name)
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
    words = "A: attention, E: experts; D: dispatch, C: combine"
    draw_lanes("dualpipe", panels, f"ms on rank 0, two layers. {words}", letters=True)


def run_both(mesh: Mesh, done: Callable, flags: dict, steps: int, folder: str) -> TrainConfig:
    """On a rank: the gradients of a step, `steps` times, with each kind of pipeline."""
    for name, kind in KINDS.items():
        with mock.patch.object(train, "InterleavedPipeline", kind):
            run = Run(mesh, **flags, link=f"0,{1e-9 * link().bandwidth}")
        tracer = Tracer((0, steps - 1), run.mesh, f"{folder}/{name}")
        for layer in (layer for stage in run.pipeline.stages for layer in stage.layers.values()):
            slow_down(layer.attention, "attention", ATTENTION, tracer)
            slow_down(layer.mlp.experts, "experts", EXPERTS, tracer)
        with routing(evenly=True), slow_weight_gradients(LAYERS * (ATTENTION + EXPERTS)):
            for step in range(-1, steps):  # the first one is not traced
                collectives.barrier(run.mesh.world)
                with tracer.step(step):
                    run.gradients(tracer)
        tracer.close()
        done()
    return run.config


def link() -> Link:
    """A link on which an all-to-all of a micro-batch's tokens takes `TRAVEL`."""
    size = predictions.dispatch_bytes(FLAGS["seq_len"], FLAGS["top_k"], FLAGS["hidden"], EP, 4)
    return Link(0.0, size / TRAVEL)


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
    times = []
    for rank in trace.ranks:
        for pair in pairs_of(schedule, rank % PP):  # data-parallel ranks, which share the experts, do the same
            start, end = window(trace, rank, step, pair)
            times.append(1e-6 * (end - start))
    return statistics.median(times)


def makespan(trace: Trace, step: int) -> float:
    """From the first action of any rank to the end of the last one, in seconds."""
    times = [time for rank in trace.ranks for name, time in phases(trace, rank, step).items() if name[0] in "FBIW"]
    return 1e-6 * (max(end for _, end in times) - min(start for start, _ in times))


# ---- predicted -------------------------------------------------------------------------------------------------------


def parts(kind: str, attention: float, experts: float, travel: float, layers: int) -> list[Part]:
    """What an action of a stage does: a backward takes twice as long as the forward, its first half (I) as long."""
    if kind == "W":
        return [("compute", attention + experts)] * layers
    times = 2 if kind == "B" else 1
    layer = [("compute", times * attention), ("travel", travel), ("compute", times * experts), ("travel", travel)]
    if kind != "F":
        return layer[::-1] * layers
    return [*layer[:1], ("counts", 0.0), *layer[1:]] * layers


def costs_of(name: str) -> Costs:
    """In seconds, as `simulate` takes them."""
    return stage_costs(ATTENTION, EXPERTS, TRAVEL, LAYERS, together=name == "in turns", communication=TRAVEL)


def stage_costs(*layer, together: bool, communication: float = 0.0) -> Costs:
    """The costs of a stage's actions, with all-to-alls; F and B `together` hide those of each other."""
    actions = {kind: parts(kind, *layer) for kind in "FBIW"}
    joint = in_turns(actions["B"], actions["F"]) if together else None  # the backward begins
    return Costs(**{kind: alone(each) for kind, each in actions.items()}, FB=joint, communication=communication)


# ---- larger than this machine ----------------------------------------------------------------------------------------

STAGE = 4  # layers of a stage


def partners(quick: bool) -> None:
    """PREDICTED: behind what each all-to-all hides on H100s, and how much of it does not."""
    mixtral, deepseek = PRESETS["mixtral-8x7b"], PRESETS["deepseek-v3-like"]
    each_expert, each_node = deepseek.top_k * 63 / 64, nodes_reached(deepseek)
    cases = [("mixtral-8x7b, ep 8, NVLink", mixtral, mixtral.top_k * 7 / 8, NVLINK)]
    cases += [("mixtral-8x7b, ep 8, InfiniBand", mixtral, mixtral.top_k * 7 / 8, NETWORK)]
    cases += [("deepseek-v3-like, ep 8, NVLink", deepseek, deepseek.top_k * 7 / 8, NVLINK)]
    cases += [("deepseek-v3-like, ep 64, InfiniBand", deepseek, each_expert, NETWORK)]
    cases += [("the same, once to each of at most 4 nodes", deepseek, each_node, NETWORK)]
    rows = []
    for name, model, copies, bandwidth in cases:
        attention = predictions.attention_flops(model, SEQ) / PEAK
        experts, travel = predictions.expert_flops(model) / PEAK, 2 * copies * model.hidden / bandwidth
        backward, forward = (parts(kind, attention, experts, travel, STAGE) for kind in "BF")
        exposed = in_turns(backward, forward) / STAGE - 3 * (attention + experts)
        times = travel, attention, 2 * experts, experts, 2 * attention, 4 * travel, exposed
        rows.append((name, *(f"{1e6 * abs(time):.2f}" for time in times), f"{1 - exposed / (4 * travel):.0%}"))
    header = ("", "an all-to-all", "C of B: A of F", "D of F: E of B", "D of B: E of F", "C of F: A of B")
    title = f"predicted: F and B in turns on H100s, bfloat16, {SEQ:,} tokens of a sequence; µs per token and layer"
    print_table(title, (*header, "all four travel", "exposed", "hidden"), rows)


def simulated(quick: bool) -> None:
    """SIMULATED: makespan of a step in which F and B hide each other's all-to-alls, against 1F1B and ZB-H1."""
    rows = []
    for ranks, micro_batches in ((4, 16), (8, 16), (8, 32)):
        for share in (0.25, 0.5, 1.0, 2.0):
            # the computation of a stage's forward takes 1, so that of F and B takes 3; all-to-alls `share` for each
            layer = (0.5 / STAGE, 0.5 / STAGE, share / (2 * STAGE))
            apart, joint = (stage_costs(*layer, STAGE, together=each) for each in (False, True))
            half = stage_costs(*layer, STAGE // 2, together=True)  # dualpipev has two stages on a rank
            cells = [f"{apart.of('F') + apart.of('B'):.2f}", f"{joint.FB:.2f}"]
            runs = [("1f1b", apart), ("zb-h1", apart), ("dualpipe", apart), ("dualpipe", joint), ("dualpipev", half)]
            spans = [simulate(build_schedule(name, ranks, micro_batches), costs).makespan for name, costs in runs]
            cells += [f"{each:.1f}" for each in spans]
            rows.append((f"{ranks} ranks, m {micro_batches}, {share:g}", *cells, f"{spans[0] / spans[3]:.2f}"))
    header = ("all-to-alls of F / its computation", "F + B", "F&B", "1f1b", "zb-h1", "dualpipe, F + B", "dualpipe, F&B")
    title = f"simulated: makespan, in units of the computation of a stage's forward ({STAGE} layers); I and W take 1"
    print_table(title, (*header, "dualpipev, F&B", "1f1b / dualpipe"), rows)
