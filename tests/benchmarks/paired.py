"""Paired timing: two ways to do the same work take turns in the same processes, so that drift cancels.

The driver of all benchmarks: a timed call is a whole training step, ours the real `train_step`, and a benchmark brings
the peer's. Memory is measured apart from that, with one side alone in its processes.
"""

import argparse
import gc
import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.config import TrainConfig
from common.experiments.training_step import Training
from common.launching.command_line import STEP_NAMES
from common.model import Decoder
from common.process_groups import Mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.running.memory_meter import MemoryMeter
from tests.benchmarks.kept import files_run
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

# Ranks keep freed memory, as CUDA's caching allocator does. By default glibc returns it to the system whenever enough
# of it happens to lie at the end of the heap; page faults then slow down the next step of either side.
HEAP = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


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
    return config, mesh, *batches.micro_batch(0, 0, rows, mesh.dp)


def our_step(step: int, flags: str) -> Callable[[], float]:
    """Return a call of the step's real `train_step`, always with the first batch, which returns the loss."""
    return our_training(step, flags)[0]


def our_training(step: int, flags: str) -> tuple[Callable[[], float], tuple]:
    """Return what `our_step` does, and what the step's `build` has built."""
    config, mesh, batches = prepare(step, flags)
    run = Training(importlib.import_module(f"{STEP_NAMES[step - 1]}.train"), config, mesh, batches)
    return lambda: run.take()["loss"], run.parts


def whole_model(config: TrainConfig, **part) -> Decoder:
    """Return the model, or this part of it, with the initial weights that `our_step` has."""
    model = Decoder(config.model_config, **part)
    materialise(model, torch.float32, torch.device("cpu"), random_values(config.seed))
    return model


def adamw(model: torch.nn.Module, config: TrainConfig, kind: type = torch.optim.AdamW, **more) -> torch.optim.Optimizer:
    """Return torch's AdamW, or an optimizer of this kind that contains it, with the settings of step 1's."""
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.weight_decay}]
    groups += [{"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    return kind(groups, **more, lr=config.lr, betas=(0.9, 0.95), eps=1e-5, fused=True)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_step(model, optimizer, batch: tuple, keeps_gradients: bool) -> Callable[[], float]:
    """Return a training step as PyTorch's documentation shows it, with what `first_batch` returned. Gradients that are
    views of buckets that stay are kept until the next step, and others freed at the end of each.
    """
    config, mesh, tokens, targets = batch

    def step() -> float:
        if keeps_gradients:
            optimizer.zero_grad()
        loss = mean_loss(model(tokens), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        if not keeps_gradients:
            optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / mesh.world.size

    return step


# ---- on a rank -------------------------------------------------------------------------------------------------------


def seconds_of(function: Callable) -> float:
    """Return what a call takes. It starts behind a barrier: one side's stragglers are not charged to the other."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def take_turns(makers: list[Callable], pairs: int) -> tuple[list[tuple[float, float]], float]:
    """Return the seconds of (ours, the peer's) step in each pair, and how far their losses are apart.

    A maker returns a step, which is called without arguments and returns its loss. Which side goes first alternates.
    """
    steps, losses, times = [make() for make in makers], ([], []), []
    gc.collect()
    gc.disable()
    for index in range(-3, pairs):  # three to warm up
        seconds = {}
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            seconds[side] = seconds_of(lambda side=side: losses[side].append(steps[side]()))
        if index >= 0:
            times.append((seconds[0], seconds[1]))
    gc.enable()
    # Of the first steps only: rounding differs between the sides, and training amplifies it
    return times, max(abs(a - b) for a, b in zip(losses[0][:5], losses[1][:5], strict=True))


def peak_alone(make: Callable) -> tuple[int, list[str]]:
    """Return `peak_of_steps`, with nothing else alive in the process, and the project's files that a step runs."""
    step = make()
    return peak_of_steps(step), files_run(step)


def peak_of_steps(step: Callable, steps: int = 5) -> int:
    """Return the highest number of bytes alive during a step, the median of these. (Where a gloo thread drops the last
    reference to a message, its release is seen late, see `MemoryMeter`.)
    """
    warnings.filterwarnings("ignore", message="Memory block of unknown size")
    peaks, meter = [], MemoryMeter(torch.device("cpu"))
    step()
    step()
    for _ in range(steps):
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        # Not subclasses: a DTensor has no memory, and its local tensor is in this list as well
        with meter.measure(o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)) as measured:
            step()
        peaks.append(measured.peak_bytes)
    return statistics.median(peaks)


# ---- on all ranks ----------------------------------------------------------------------------------------------------


def compare(title: str, world: int, ours: Callable, peer: Callable, pairs: int) -> dict:
    """Throughput and memory of ours over the peer's, printed and as a row of the results. Both are makers of steps,
    which go to the ranks by name. The throughput is the median of the pairs, with the 95% interval of the sign test.
    """
    os.environ.update(HEAP)  # for the ranks
    found = [zip(*run_ranks(world, peak_alone, side, timeout=1800), strict=True) for side in (ours, peer)]
    (mine, our_files), (theirs, peer_files) = ((max(peaks), set().union(*files)) for peaks, files in found)
    per_rank, gaps = zip(*run_ranks(world, take_turns, [ours, peer], pairs, timeout=1800), strict=True)
    times = [[max(side) for side in zip(*pair, strict=True)] for pair in zip(*per_rank, strict=True)]  # slowest rank
    ratios = sorted(peer / ours for ours, peer in times)
    margin = 0.98 * pairs**0.5  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = ratios[max(0, int(pairs / 2 - margin))], ratios[min(pairs - 1, int(pairs / 2 + margin))]
    row = {"median": statistics.median(ratios), "low": low, "high": high, "pairs": pairs}
    row |= zip(("ours_s", "peer_s"), map(statistics.median, zip(*times, strict=True)), strict=True)
    row |= {"memory_ratio": mine / theirs, "ours_peak_bytes": mine, "peer_peak_bytes": theirs}
    row |= {"first_losses_differ_by": max(gaps), "files": sorted(our_files | peer_files)}
    print(f"  {world} ranks, {title}   first losses differ by {max(gaps):.1e}")
    ms = f"{row['ours_s'] * 1e3:.1f} ms against {row['peer_s'] * 1e3:.1f} ms"
    print(f"    throughput {row['median']:.3f}  [{low:.3f}, {high:.3f}]  {ms}  ({pairs} pairs)")
    print(f"    memory     {mine / theirs:.3f}  {mine / 1e6:.1f} MB against {theirs / 1e6:.1f} MB", flush=True)
    if not max(gaps) < 1e-3:
        raise SystemExit("the two sides do not train the same model")
    return row


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_options(description: str, **defaults) -> argparse.Namespace:
    """Read --ranks, --pairs and other options, each with its default: a number, or a list of numbers or of names.
    `whole` of the result says whether all have their defaults.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in ({"ranks": [2, 4], "pairs": 30} | defaults).items():
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{name}", type=kind, nargs="*" if several else None, default=default)
    options = parser.parse_args()
    options.whole = all(value == parser.get_default(name) for name, value in vars(options).items())
    return options


def run_as_module(name: str) -> None:
    """Run the main() of tests.benchmarks.NAME, under the name by which ranks can import what it asks them to call."""
    importlib.import_module(f"tests.benchmarks.{name}").main()
