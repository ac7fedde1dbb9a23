"""Paired timing: two ways to do the same work take turns in the same processes, so that drift cancels.

The driver of all benchmarks: ours is the real `train_step` of a step, and a benchmark brings the peer's.
"""

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.config import TrainConfig
from common.launching.command_line import STEP_NAMES
from common.model import Decoder
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.memory_meter import MemoryMeter
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

# Ranks keep freed memory, as CUDA's caching allocator does. By default glibc returns it to the system whenever enough
# of it happens to lie at the end of the heap; page faults then slow down the next step of either side.
HEAP = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


@dataclass
class Ratio:
    """Throughput of ours over that of the peer: median of the pairs, 95% interval of that median, and both times."""

    median: float
    low: float
    high: float
    pairs: int
    ours_s: float
    peer_s: float

    def __str__(self) -> str:
        times = f"{self.ours_s * 1e3:.1f} ms against {self.peer_s * 1e3:.1f} ms"
        return f"{self.median:.3f}  [{self.low:.3f}, {self.high:.3f}]  {times}  ({self.pairs} pairs)"


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def time_pairs(ours, peer, pairs: int, warmup: int = 3) -> list[tuple[float, float]]:
    """Seconds of (ours, peer) for each pair, as this rank saw them; which one goes first alternates.

    Each call starts behind a barrier, so that one side's stragglers are not charged to the other.
    """
    times = []
    gc.collect()
    gc.disable()
    for index in range(-warmup, pairs):
        seconds = {}
        for function in (ours, peer) if index % 2 == 0 else (peer, ours):
            wait_for_all()
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[function] = time.perf_counter() - start
        if index >= 0:
            times.append((seconds[ours], seconds[peer]))
    gc.enable()
    return times


def peak_bytes(step, device: torch.device, warmup: int = 2, steps: int = 5) -> int:
    """Highest number of bytes alive during `step()`, the median of a few; with nothing else alive in the process.
    (Where a gloo thread drops the last reference to a message, its release is seen late, see `MemoryMeter`.)
    """
    warnings.filterwarnings("ignore", message="Memory block of unknown size")
    peaks, meter = [], MemoryMeter(device)
    for _ in range(warmup):
        step()
    for _ in range(steps):
        gc.collect()
        wait_for_all()
        # Not subclasses: a DTensor has no memory, and its local tensor is in this list as well
        with meter.measure(o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)) as measured:
            step()
        peaks.append(measured.peak_bytes)
    return statistics.median(peaks)


# ---- the steps that take turns ---------------------------------------------------------------------------------------


def prepare(step: int, flags: str) -> tuple[TrainConfig, Mesh, Batches]:
    """Return what the train.py of a step begins with on this rank, under these flags."""
    config = configure(step, f"--data synthetic --device cpu --warmup 0 --steps 1 {flags}")
    mesh = mesh_of(config)
    return config, mesh, load_batches(config, mesh)


def first_batch(flags: str) -> tuple[TrainConfig, Mesh, torch.Tensor, torch.Tensor]:
    """Return what a peer starts from: the inputs and targets of this rank are those of `our_step`."""
    config, mesh, batches = prepare(8, flags)
    rows = config.global_batch // config.dp
    return config, mesh, *batches.micro_batch(0, 0, rows, mesh.dp.rank, mesh.dp.size)


def our_step(step: int, flags: str, tracer=None) -> Callable[[], float]:
    """Return a call of the step's real `train_step`, always with the first batch, which returns the loss."""
    return our_training(step, flags, tracer)[0]


def our_training(step: int, flags: str, tracer=None) -> tuple[Callable[[], float], tuple]:
    """Return what `our_step` does, and what the step's `build` has built."""
    config, mesh, batches = prepare(step, flags)
    module = importlib.import_module(f"{STEP_NAMES[step - 1]}.train")
    built = module.build(config, mesh)
    mesh = getattr(built[0], "mesh", mesh)  # a pipeline adds groups
    tracer = tracer or Tracer(None, mesh, None)

    def call() -> float:
        with tracer.step(0):
            return module.train_step(0, *built, batches, config, mesh, tracer)["loss"].item()

    return call, built


def whole_model(config: TrainConfig, **part) -> Decoder:
    """Return the model, or this part of it, with the initial weights that `our_step` has."""
    model = Decoder(config.model_config, **part)
    materialise(model, torch.float32, torch.device("cpu"), random_values(config.seed))
    return model


# ---- on ranks --------------------------------------------------------------------------------------------------------


def take_turns(makers: list[Callable[[], Callable]], pairs: int):
    """On a rank: of ours and the peer's step, their times and how far their losses are apart. Of one, its peak bytes.

    A maker returns a step, which is called without arguments and returns its loss.
    """
    steps = [make() for make in makers]
    if len(steps) == 1:
        return peak_bytes(steps[0], torch.device("cpu"))
    losses = [], []
    times = time_pairs(lambda: losses[0].append(steps[0]()), lambda: losses[1].append(steps[1]()), pairs)
    # Of the first steps only: rounding differs between the sides, and training amplifies it
    return times, max(abs(a - b) for a, b in zip(losses[0][:5], losses[1][:5], strict=True))


def compare(title: str, world: int, ours: Callable, peer: Callable, pairs: int) -> dict:
    """Throughput and memory of ours over the peer's, printed and as a row of the results. Both are makers of steps,
    which go to the ranks by name.
    """
    os.environ.update(HEAP)  # for the ranks
    mine, theirs = (max(run_ranks(world, take_turns, [side], 0, timeout=1800)) for side in (ours, peer))
    per_rank = run_ranks(world, take_turns, [ours, peer], pairs, timeout=1800)
    ratio, gap = summarise([times for times, _ in per_rank]), max(gap for _, gap in per_rank)
    print(f"  {world} ranks, {title}   first losses differ by {gap:.1e}")
    print(f"    throughput {ratio}")
    print(f"    memory     {mine / theirs:.3f}  {mine / 1e6:.1f} MB against {theirs / 1e6:.1f} MB", flush=True)
    if not gap < 1e-3:
        raise SystemExit("the two sides do not train the same model")
    memory = {"memory_ratio": mine / theirs, "ours_peak_bytes": mine, "peer_peak_bytes": theirs}
    return asdict(ratio) | memory | {"first_losses_differ_by": gap}


def measure_alone(world: int, make: Callable, steps: int) -> tuple[float, int]:
    """Median seconds of a step that has no peer, and its peak bytes, of the slowest and of the fullest rank."""
    os.environ.update(HEAP)
    seconds, peaks = zip(*run_ranks(world, alone, make, steps, timeout=1800), strict=True)
    return max(seconds), max(peaks)


def alone(make: Callable, steps: int) -> tuple[float, int]:
    """What `measure_alone` asks of a rank."""
    step, times = make(), []
    for _ in range(steps + 2):
        wait_for_all()
        start = time.perf_counter()
        step()
        wait_for_all()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), peak_bytes(step, torch.device("cpu"), warmup=0, steps=3)


def summarise(per_rank: list[list[tuple[float, float]]]) -> Ratio:
    """A step is over when its slowest rank is done. The interval of the median is that of the sign test."""
    pairs = [(max(r[i][0] for r in per_rank), max(r[i][1] for r in per_rank)) for i in range(len(per_rank[0]))]
    ratios = sorted(peer / ours for ours, peer in pairs)
    margin = 0.98 * len(ratios) ** 0.5  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = int(len(ratios) / 2 - margin), int(len(ratios) / 2 + margin)
    interval = ratios[max(0, low)], ratios[min(len(ratios) - 1, high)]
    ours, peer = (statistics.median(times) for times in zip(*pairs))
    return Ratio(statistics.median(ratios), *interval, len(ratios), ours, peer)


def parse_options(description: str, **defaults) -> argparse.Namespace:
    """Read --ranks, --pairs and other options, each with its default: a number, False of a switch, a list of numbers or
    of names, or a tuple of names of which one is chosen, by default the first.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in ({"ranks": [2, 4], "pairs": 30} | defaults).items():
        if default is False:
            settings = {"action": "store_true"}
        elif isinstance(default, tuple):
            settings = {"choices": default, "default": default[0]}
        else:
            several, names = isinstance(default, list), isinstance(default, list) and isinstance(default[0], str)
            settings = {"nargs": "*" if several else None, "default": default}
            settings |= {"choices": default} if names else {"type": int}
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def adamw_settings(model: torch.nn.Module, config: TrainConfig) -> dict:
    """Arguments for torch's AdamW that make it the optimizer of step 1."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return {"params": groups, "lr": config.lr, "betas": (0.9, 0.95), "eps": 1e-5, "fused": True}


def keep(name: str, rows: dict) -> Path:
    """Write the figures, and what they were measured on, to tests/benchmarks/results/NAME.json."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    date, cores = time.strftime("%Y-%m-%d"), os.cpu_count()
    content = {"hardware": {"device": device, "cores": cores, "torch": torch.__version__, "date": date}} | rows
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
