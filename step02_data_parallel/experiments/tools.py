"""What the experiments of this step and the next share: the model they run, runs on local ranks, tables, figures."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from common.collectives import barrier
from common.command_line import OneLineParser
from common.config import TrainConfig
from common.data.batches import Batches
from common.experiments.local_ranks import on_ranks, train_quietly
from common.initialisation import materialise, random_values
from common.measure import tcp_bytes as wire
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh
from common.record import compare
from common.tracing.intervals import time_by_state
from common.tracing.report import StepRow, Trace, mean, report
from step01_single_gpu.experiments.tools import compared, table
from step02_data_parallel.train import train

figures = Path("runs")  # where finish_figure writes; set by `command`
MODES = ("naive", "overlap", "bucket")

# 5.3 million parameters in 57 tensors: 21 MB of gradients
MODEL = {"layers": 6, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 4, "data": "synthetic", "warmup": 1}
BUCKET_MB = 2.5  # for this model what 25 MB are for one ten times its size


def against(title: str, unit: str, rows: Iterable[tuple[str, float, float]], digits: str = ",.0f") -> None:
    """Print a table of predicted, measured, and their ratio."""
    cells = []
    for name, predicted, measured in rows:
        cells.append((name, *compared(predicted if abs(predicted) > 1e-9 else 0.0, measured, digits)))
    table(title, (unit, "predicted", "measured", "ratio"), cells)


def tensor_sizes() -> tuple[list[int], list[float]]:
    """Bytes of each parameter's gradient of `MODEL`, in forward order, and what its backward costs."""
    names, parameters = zip(*Decoder(TrainConfig(**MODEL).model_config).named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(p.numel()) for name, p in zip(names, parameters)]
    return [4 * parameter.numel() for parameter in parameters], costs


def command(step: str, description: str, experiments: dict[str, Callable], argv: list[str] | None = None) -> int:
    """`python -m STEP.experiments`: run the experiments that the command line names. Returns the exit status.

    Figures go into the folder of the step, with --quick into runs/.
    """
    global figures
    parser = OneLineParser(prog=f"python -m {step}.experiments", description=description)
    parser.add_argument("--only", choices=experiments, help="one experiment (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer steps, rougher numbers")
    options = parser.parse_or_exit(argv)
    figures = Path(__file__).resolve().parents[2] / step / "figures"
    if options.quick:
        figures = Path(f"runs/{step.partition('_')[0]}-figures")
    for name in [options.only] if options.only else experiments:
        print(f"\n==== {name}: {experiments[name].__doc__.splitlines()[0]}")
        start = time.perf_counter()
        experiments[name](options.quick)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return 0


def run_jobs(
    mesh: Mesh, done: Callable, jobs: list[tuple[str, dict]], folder: str, train: Callable = train
) -> list[dict[str, int]]:
    """On a rank: one training run after another, each into folder/name; what the kernel counted meanwhile.

    Args:
        jobs: (name, flags) of each run.
        train: of the step that runs them.
    """
    counted = []

    for name, flags in jobs:
        barrier(mesh.world)
        before = [wire.sent_by_me(), wire.loopback()]
        barrier(mesh.world)  # everybody has read, before anybody sends
        train_quietly(train, **flags, run_dir=f"{folder}/{name}")
        barrier(mesh.world)
        numbers = [(new or 0) - (old or 0) for new, old in zip([wire.sent_by_me(), wire.loopback()], before)]
        counted.append(dict(zip(("sockets", "loopback"), numbers)))
        done()
    return counted


def reference_gradients(config: TrainConfig, batches: Batches) -> dict[str, torch.Tensor]:
    """One process, the whole global batch at once: the gradient of each parameter, by name."""
    model = Decoder(config.model_config)
    materialise(model, config.torch_dtype, torch.device("cpu"), random_values(config.seed))
    tokens, targets = batches.micro_batch(0, 0, config.global_batch)
    (cross_entropy_sum(model(tokens), targets) / batches.target_tokens).backward()
    return {parameter.spec.name: parameter.grad for parameter in model.parameters()}


def overlay(train: Callable, variants: dict[str, tuple[int, dict]], quick: bool) -> None:
    """The default run in float32 and float64, in every variant: its curves as a table and (float32) as a figure.

    Args:
        variants: (ranks, flags) of each, by name; the first is what the others are compared with.
    """
    runs = {"float32": 10 if quick else 40, "float64": 10}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({ranks for ranks, _ in variants.values()}):
            jobs = [
                (f"{dtype}/{name}", {"dtype": dtype, "steps": steps} | flags)
                for dtype, steps in runs.items()
                for name, (size, flags) in variants.items()
                if size == ranks
            ]
            on_ranks(ranks, run_jobs, jobs, folder, train, title="curves", jobs=len(jobs))
        for dtype, steps in runs.items():
            rows = compare.compare([compare.read_run(Path(folder, dtype, name)) for name in variants])
            print(f"\nthe default run in {dtype}, {steps} steps\n{compare.table(rows)}")
            if dtype == "float32":
                compare.plot(rows, figure_path("curves"))
                finish_figure("curves")


# ---- traces ----------------------------------------------------------------------------------------------------------


def quietest(trace: Trace) -> StepRow:
    """The mean over ranks of the shortest step: other work on the machine adds to a step and takes nothing from it."""
    return min((mean(report(trace, step)) for step in trace.steps), key=lambda each: each.step_time_s)


def quiet_step(traces: dict[str, Trace]) -> int:
    """The step to draw: the one that took least time over all runs."""
    steps = next(iter(traces.values())).steps
    return min(steps, key=lambda step: sum(mean(report(trace, step)).step_time_s for trace in traces.values()))


def computation(trace: Trace, phase: str) -> float:
    """Seconds of a phase in the shortest step, mean over ranks, without what it was blocked for."""
    step, lengths = quietest(trace).step, []
    for rank in trace.ranks:
        spans = [span for span in trace.spans[rank] if span["name"] == phase and span["args"]["step"] == step]
        phases = [(span["ts"], span["ts"] + span["dur"]) for span in spans]
        lengths.append(1e-6 * time_by_state(phases, trace.intervals(rank, "issue", "wait"))[True, False])
    return statistics.mean(lengths)


# ---- figures ---------------------------------------------------------------------------------------------------------


def new_figure(columns: int = 1, width: float = 6.5, height: float = 3.6):
    """A figure and its axes (a list of them for several columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in [axes] if columns == 1 else axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def figure_path(name: str) -> Path:
    """Where the figure of this name is to be written."""
    figures.mkdir(parents=True, exist_ok=True)
    return figures / f"{name}.png"


def finish_figure(name: str, figure=None) -> None:
    """Save `figure` unless that is done, and shrink the file: 64 colours are enough for lines and bars."""
    from PIL import Image

    path = figure_path(name)
    if figure is not None:
        figure.savefig(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"  figure: {figures.name}/{name}.png")
