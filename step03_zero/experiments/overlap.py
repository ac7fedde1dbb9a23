"""How much communication hides behind computation, over a simulated link, from the intervals of traces."""

from common.config import TrainConfig
from common.costs.alpha_beta import Player
from common.drawing.figures import figure_path
from common.experiments.runs import BUCKET_MB, MODEL, tensor_sizes
from common.experiments.traces import TracedPart, computation, one_rank, print_hidden, quietest, run_parts
from common.model import Decoder
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace
from common.tracing.timelines import draw_timelines
from step02_data_parallel.cost import SCALAR, play_step
from step02_data_parallel.data_parallel import pack
from step03_zero import cost
from step03_zero.experiments.tools import NoPrefetch, regions_of, run_with
from step03_zero.zero import Zero

LINK = "2000,0.2"  # as in step 2: 2 ms a message, 0.2 GB/s
SHAPE = MODEL | {"seq_len": 256, "micro_batch": 2, "global_batch": 4, "link": LINK, "bucket_mb": BUCKET_MB}
VARIANTS = {  # name: stage, another kind of `Zero`
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "3": (3, None),
    "3, no prefetch": (3, NoPrefetch),
}
TITLES = {
    "1": "stage 1: gathers before the forward needs them",
    "3": "stage 3: a unit is gathered while its neighbor computes",
    "3, no prefetch": "stage 3 without prefetch: a unit waits for its own gather",
}


def overlap(quick: bool) -> None:
    """Stages 1, 2 and 3 over a slow link: exposed communication, with and without prefetch, and their timelines."""
    traces = run_parts(2, step_of, VARIANTS, steps=4 if quick else 9, title="overlap")
    times = {name: (computation(trace, "forward"), computation(trace, "backward")) for name, trace in traces.items()}
    shown = "; ".join(f"{name}: {1e3 * each[0]:.0f} + {1e3 * each[1]:.0f}" for name, each in times.items())
    print(f"\nThe predictions start from the forwards and backwards measured, ms:\n  {shown}")
    print_hidden(f"2 ranks, --link {LINK}, by stage", {name: play(name, times[name]) for name in traces}, traces)
    panels = []
    for name, title in TITLES.items():
        blocked = f"; blocked for {1e3 * quietest(traces[name]).exposed_s:.0f} ms"
        panels.append((title + blocked, by_operation(one_rank(traces[name]))))
    print(f"  figure: {draw_timelines(panels, figure_path('timelines'))}")


def step_of(mesh: Mesh, case: tuple[int, type[Zero] | None]) -> TracedPart:
    """On a rank: one training step."""
    stage, zero = case
    run = run_with(mesh, SHAPE | {"zero": stage}, zero)
    return TracedPart(lambda tracer: run.take(tracer=tracer), run.mesh)


def play(name: str, times: tuple[float, float]) -> Player:
    """Play a step of a variant on two ranks over `LINK`. `times`: seconds of its forward and of its backward."""
    (sizes, costs), player = tensor_sizes(), Player(2, TrainConfig(link=LINK).link_model)
    regions, buckets = regions_of(Decoder(TrainConfig(**MODEL).model_config)), pack(sizes, BUCKET_MB * 1e6)
    stage, zero = VARIANTS[name]
    if stage == 0:
        play_step(player, buckets, sizes, costs, times)
    elif stage < 3:
        cost.play_buckets(player, buckets, regions, sizes, costs, times)
    else:
        units = [[sum(values[index] for index in region) for region in regions] for values in (sizes, costs)]
        cost.play_units(player, *units, times, prefetch=zero is None)
    for _ in range(2):  # the gradient norm and the loss, which nothing can hide
        player.wait(player.all_reduce(SCALAR))
    return player


def by_operation(trace: Trace) -> Trace:
    """The trace with a lane per kind of collective instead of per group."""
    names, spans = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}, {}
    for rank in trace.ranks:
        spans[rank] = []
        for span in trace.spans[rank]:
            group = {"group": names.get(span["args"]["op"], "scalars")} if span["cat"] == "communication" else {}
            spans[rank].append(span | {"args": span["args"] | group})
    return Trace(spans, trace.steps, trace.degrees)
