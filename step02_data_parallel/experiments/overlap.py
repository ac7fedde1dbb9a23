"""How much communication hides behind the backward, over a simulated link, from the intervals of traces."""

import tempfile
from pathlib import Path

from common.config import TrainConfig
from common.costs.alpha_beta import fill_buckets
from common.drawing.figures import figure_path
from common.drawing.tables import print_comparison
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import BUCKET_MB, MODEL, run_jobs, tensor_sizes
from common.experiments.traces import computation, quietest
from common.tracing.chrome_trace import Trace, read_trace
from common.tracing.timelines import draw_timelines
from step02_data_parallel.experiments import predictions
from step02_data_parallel.experiments.numbers import MODES, gradient_calls
from step02_data_parallel.train import train

LINK = "2000,0.2"  # 2 ms a message, 0.2 GB/s: to this model's backward what a real network is to a large model's


def overlap(quick: bool) -> None:
    """Naive, hook and bucket over a slow link: exposed communication, overlap share, step time, three timelines."""
    traces = traced_runs({mode: {"dp_mode": mode, "bucket_mb": BUCKET_MB} for mode in MODES}, "overlap", quick)
    rows = {mode: quietest(trace) for mode, trace in traces.items()}
    backward = {mode: computation(trace, "backward") for mode, trace in traces.items()}
    expected = {mode: predict(backward[mode], mode, BUCKET_MB) for mode in MODES}
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in backward.values())
    print(f"\n2 ranks, --link {LINK}; the predictions start from the backwards measured: {shown} ms")

    values = [(mode, 1e3 * expected[mode].communication, 1e3 * rows[mode].communication_s) for mode in MODES]
    print_comparison("communication, ms a step", "mode", values, ".1f")
    values = [(mode, 1e3 * expected[mode].exposed, 1e3 * rows[mode].exposed_s) for mode in MODES]
    print_comparison("exposed communication, ms a step", "mode", values, ".1f")
    values = [(mode, expected[mode].overlap_share, rows[mode].overlap_share) for mode in MODES]
    print_comparison("overlap share: communication covered by computation", "mode", values, ".1%")
    values = []
    for mode in MODES:
        predicted = rows[mode].step_time_s - rows[mode].exposed_s + expected[mode].exposed
        values.append((mode, 1e3 * predicted, 1e3 * rows[mode].step_time_s))
    print_comparison("step time, ms: its own computation and the predicted exposed communication", "mode", values)

    titles = {
        "naive": "naive: {} all-reduces, all after the backward",
        "overlap": "overlap: {} all-reduces, each as soon as its gradient has been computed",
        "bucket": f"bucket: {{}} all-reduces of up to {BUCKET_MB:g} MB, each as soon as its bucket is full",
    }
    panels = []
    for mode, trace in traces.items():
        of_rank_0 = Trace({0: trace.spans[0]}, [rows[mode].step], trace.degrees)  # the step of the tables
        panels.append((titles[mode].format(gradient_calls(trace)[0] // len(trace.steps)), of_rank_0))
    print(f"  figure: {draw_timelines(panels, figure_path('timelines'))}")


def bucket_size(quick: bool) -> None:
    """Small buckets pay latency, large ones start late: exposed communication against the size of a bucket."""
    megabytes = (0.1, 1.0, 2.5, 25.0) if quick else (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 25.0)
    traces = traced_runs({f"{size:g}": {"bucket_mb": size} for size in megabytes}, "bucket_size", quick)
    backwards = [computation(trace, "backward") for trace in traces.values()]
    rows = []
    for size, backward, trace in zip(megabytes, backwards, traces.values()):
        count = len(fill_buckets(tensor_sizes()[0], size * 1e6))
        expected = 1e3 * predict(backward, "bucket", size).exposed
        rows.append((f"{size:g} ({count})", expected, 1e3 * quietest(trace).exposed_s))
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in backwards)
    print(f"\n2 ranks, --link {LINK}; the predictions start from the backwards measured: {shown} ms")
    print_comparison("exposed communication, ms a step", "bucket size in MB (buckets)", rows, ".1f")


def predict(backward: float, mode: str, bucket_mb: float) -> predictions.Overlap:
    """What the alpha-beta model says of a step on two ranks over `LINK`."""
    sizes, costs = tensor_sizes()
    link = TrainConfig(link=LINK).link_model
    return predictions.overlap(sizes, costs, backward, 2, link, mode, bucket_mb * 1e6).with_scalars(2, link)


def traced_runs(variants: dict[str, dict], title: str, quick: bool) -> dict[str, Trace]:
    """One short traced run on two ranks over the slow link for each variant."""
    steps = 5 if quick else 8
    shape = MODEL | {"seq_len": 256, "micro_batch": 2, "global_batch": 4, "steps": steps, "trace": f"1:{steps - 1}"}
    jobs = [(name, shape | {"link": LINK} | flags) for name, flags in variants.items()]
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, run_jobs, jobs, folder, train, title=title, jobs=len(jobs))
        return {name: read_trace(Path(folder, name)) for name, _ in jobs}
