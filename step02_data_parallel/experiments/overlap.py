"""How much communication hides behind the backward, over a simulated link, from the intervals of traces."""

from common.config import TrainConfig
from common.costs.alpha_beta import Player
from common.drawing.figures import figure_path
from common.experiments.runs import BUCKET_MB, MODEL, tensor_sizes
from common.experiments.traces import computation, one_rank, print_hidden, run_cases
from common.tracing.timelines import draw_timelines
from step02_data_parallel import cost
from step02_data_parallel.data_parallel import pack
from step02_data_parallel.train import train

LINK = "2000,0.2"  # 2 ms a message, 0.2 GB/s: to this model's backward what a real network is to a large model's
SHAPE = MODEL | {"seq_len": 256, "micro_batch": 2, "global_batch": 4, "link": LINK, "bucket_mb": BUCKET_MB}
TITLES = {
    "naive": "naive: {} all-reduces, all after the backward",
    "overlap": "overlap: {} all-reduces, each as soon as its gradient has been computed",
    "bucket": f"bucket: {{}} all-reduces of up to {BUCKET_MB:g} MB, each as soon as its bucket is full",
}


def overlap(quick: bool) -> None:
    """Naive, hook and bucket over a slow link: exposed communication, overlap share, step time, three timelines."""
    cases = {mode: SHAPE | {"dp_mode": mode, "steps": 5 if quick else 8} for mode in TITLES}
    traces = run_cases(train, 2, cases, title="overlap")
    backward = {mode: computation(trace, "backward") for mode, trace in traces.items()}
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in backward.values())
    print(f"\nThe predictions start from the backwards measured: {shown} ms")
    players = {mode: play(backward[mode], mode) for mode in TITLES}
    print_hidden(f"2 ranks, --link {LINK}", players, traces)
    panels = [(TITLES[mode].format(len(buckets_of(mode))), one_rank(trace)) for mode, trace in traces.items()]
    print(f"  figure: {draw_timelines(panels, figure_path('timelines'))}")


SWEEP = (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 25.0)  # MB of a bucket
# Products take the time of their FLOPs on a simulated device: a backward of 0.2 s, however busy this machine is
SIMULATED = SHAPE | {"seq_len": 64, "compute": 12.0}


def bucket_sweep(quick: bool) -> None:
    """Small buckets pay the link's latency often, large ones start late: exposed communication over --bucket-mb."""
    cases = {
        f"{mb:g} MB": SIMULATED | {"bucket_mb": mb, "steps": 3 if quick else 8}
        for mb in (SWEEP[1::2] if quick else SWEEP)
    }
    traces = run_cases(train, 2, cases, title="bucket_sweep")
    backward = {name: computation(trace, "backward") for name, trace in traces.items()}
    players = {name: play(backward[name], "bucket", flags["bucket_mb"]) for name, flags in cases.items()}
    named = {name: f"{name}: {len(buckets_of('bucket', flags['bucket_mb']))} buckets" for name, flags in cases.items()}
    of_names = ({named[name]: each for name, each in some.items()} for some in (players, traces))
    print_hidden(f"2 ranks, --link {LINK}, 21 MB of gradients", *of_names)


def buckets_of(mode: str, bucket_mb: float = BUCKET_MB) -> list[list[int]]:
    """Indices of the parameters in each bucket."""
    return pack(tensor_sizes()[0], bucket_mb * 1e6 if mode == "bucket" else 0)


def play(backward: float, mode: str, bucket_mb: float = BUCKET_MB) -> Player:
    """What the alpha-beta model says of a step on two ranks over `LINK`, with the norm and the loss."""
    player = Player(2, TrainConfig(link=LINK).link_model)
    cost.play_step(player, buckets_of(mode, bucket_mb), *tensor_sizes(), (0.0, backward), naive=mode == "naive")
    for _ in range(2):
        player.wait(player.all_reduce(cost.SCALAR))
    return player
