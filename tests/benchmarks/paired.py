"""Paired timing: two ways to do the same work take turns in the same processes, so that drift cancels."""

import gc
import json
import os
import platform
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.memory import MemoryMeter

RESULTS = Path(__file__).parent / "results"
MEMORY_WARMUP, MEMORY_STEPS = 2, 3


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


def peak_bytes(step, device: torch.device) -> int:
    """Highest number of bytes alive during `step()`, the median of a few; with nothing else alive in the process."""
    warnings.filterwarnings("ignore", message="Memory block of unknown size")
    peaks, meter = [], MemoryMeter(device)
    for _ in range(MEMORY_WARMUP):
        step()
    for _ in range(MEMORY_STEPS):
        gc.collect()
        dist.barrier()
        # Not subclasses: a DTensor has no memory, and its local tensor is in this list as well
        with meter.measure(o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)) as measured:
            step()
        peaks.append(measured.peak_bytes)
    return statistics.median(peaks)


def summarise(per_rank: list[list[tuple[float, float]]]) -> Ratio:
    """A step is over when its slowest rank is done. The interval of the median is that of the sign test."""
    pairs = [(max(r[i][0] for r in per_rank), max(r[i][1] for r in per_rank)) for i in range(len(per_rank[0]))]
    ratios = sorted(peer / ours for ours, peer in pairs)
    margin = 0.98 * len(ratios) ** 0.5  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = int(len(ratios) / 2 - margin), int(len(ratios) / 2 + margin)
    return Ratio(
        statistics.median(ratios),
        ratios[max(0, low)],
        ratios[min(len(ratios) - 1, high)],
        len(ratios),
        statistics.median(ours for ours, _ in pairs),
        statistics.median(peer for _, peer in pairs),
    )


def hardware() -> dict:
    """What the figures were measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {"device": device, "cores": os.cpu_count(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def keep(name: str, rows: dict) -> Path:
    """Write the figures to tests/benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"hardware": hardware()} | rows, indent=1) + "\n")
    return path
