"""Paired timing: two ways to do the same work take turns in the same processes, so that drift cancels."""

import argparse
import gc
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
from step01_single_gpu.memory_meter import MemoryMeter
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
            if dist.is_initialized():
                dist.barrier()
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
        if dist.is_initialized():
            dist.barrier()
        # Not subclasses: a DTensor has no memory, and its local tensor is in this list as well
        with meter.measure(o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)) as measured:
            step()
        peaks.append(measured.peak_bytes)
    return statistics.median(peaks)


def measure_steps(steps: list[Callable[[], float]], pairs: int, device: torch.device):
    """On a rank: with two steps (ours, the peer's), their times and how far their losses are apart; with one, its peak
    bytes. A step returns its loss.
    """
    if len(steps) == 1:
        return peak_bytes(steps[0], device)
    losses = [], []
    times = time_pairs(lambda: losses[0].append(steps[0]()), lambda: losses[1].append(steps[1]()), pairs)
    # Of the first steps only: rounding differs between the sides, and training amplifies it
    return times, max(abs(a - b) for a, b in zip(losses[0][:5], losses[1][:5], strict=True))


def compare(title: str, world: int, on_rank: Callable, case, pairs: int) -> dict:
    """Throughput and memory of ours over the peer's, printed and as a row of the results.

    Args:
        on_rank: (case, pairs, sides) -> what `measure_steps` returns for the steps of these sides, "ours" and "peer".
    """
    os.environ.update(HEAP)  # for the ranks
    ours, peer = (max(run_ranks(world, on_rank, case, 0, (side,), timeout=1800)) for side in ("ours", "peer"))
    per_rank = run_ranks(world, on_rank, case, pairs, ("ours", "peer"), timeout=1800)
    ratio, gap = summarise([times for times, _ in per_rank]), max(gap for _, gap in per_rank)
    print(f"  {world} ranks, {title}   first losses differ by {gap:.1e}")
    print(f"    throughput {ratio}")
    print(f"    memory     {ours / peer:.3f}  {ours / 1e6:.1f} MB against {peer / 1e6:.1f} MB", flush=True)
    if not gap < 1e-3:
        raise SystemExit("the two sides do not train the same model")
    memory = {"memory_ratio": ours / peer, "ours_peak_bytes": ours, "peer_peak_bytes": peer}
    return asdict(ratio) | memory | {"first_losses_differ_by": gap}


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
    """Read --ranks and the other options, each with its default: a number, a list of numbers, or a list of names."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in ({"ranks": [2, 4]} | defaults).items():
        several, names = isinstance(default, list), isinstance(default, list) and isinstance(default[0], str)
        kind = {"type": str, "choices": default} if names else {"type": int}
        parser.add_argument(f"--{name}", nargs="*" if several else None, default=default, **kind)
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
