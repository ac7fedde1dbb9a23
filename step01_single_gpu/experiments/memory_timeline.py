"""The memory of the first steps over time, by category, as in the playbook's figure of Llama 1B.

The allocator tells when which bytes came and went, but not what they are. Tensors are therefore labelled while they
live (parameters at the start, whatever autograd keeps, gradient sums, optimizer state), and a label goes to the
allocation that was alive at its address. What nobody labelled is a temporary.
"""

import bisect
import contextlib
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from common.drawing.charts import legend
from common.drawing.figures import COLOURS
from step01_single_gpu.experiments.tools import MIB, OneProcess
from step01_single_gpu.running.memory_meter import Allocation, MemoryMeter

CATEGORIES = ("parameters", "moments", "gradients", "activations", "temporaries")
MARKER = 1_000_003  # bytes of an allocation whose time is known on both clocks
COLUMNS = 240  # of the picture
SLACK = 2e-4  # seconds by which the two clocks may differ
ARROW = {"textcoords": "offset points", "ha": "right", "fontsize": 10, "arrowprops": {"arrowstyle": "->"}}


@dataclass
class MemoryTimeline:
    """Bytes alive by category: `points` holds (seconds, bytes of each of CATEGORIES); `phases` (name, start, end)."""

    points: list[tuple[float, list[int]]]
    phases: list[tuple[str, float, float]]
    steps: list[tuple[float, float]]

    def peak(self, step: int) -> tuple[float, list[int]]:
        """The point of a step at which most bytes are alive."""
        start, end = self.steps[step]
        return max((point for point in self.points if start <= point[0] <= end), key=lambda point: sum(point[1]))


def record(run: OneProcess, steps: int) -> MemoryTimeline:
    """Run `steps` steps, from the first one, and find out what lived when."""
    labels: list[tuple[float, int, str]] = []  # seconds, address, category
    phases, ends = [], []

    def label(category: str, *tensors: torch.Tensor) -> None:
        labels.extend((time.time(), each.untyped_storage().data_ptr(), category) for each in tensors)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        label("activations", tensor)
        return tensor

    @contextlib.contextmanager
    def phase(name: str):
        start = time.time()
        yield
        phases.append((name, start, time.time()))

    for parameter in run.parameters:  # this hook comes after that of Gradients, which has put the sum in its place
        parameter.register_post_accumulate_grad_hook(lambda p: label("gradients", run.gradient_sums.sums[p]))
    fixed = [*run.parameters, *run.optimizer.masters]
    with _allocations([*fixed, run.batches.tokens]) as recording:
        begin = time.time()
        for _ in range(steps):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                run.step(SimpleNamespace(phase=phase))
            label("moments", *(value for state in run.optimizer.state.values() for value in state.values()))
            ends.append(time.time())
    alive = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in fixed}
    points = [(seconds - begin, sizes) for seconds, sizes in _stack(recording.events, labels, alive)]
    starts = [0.0, *(end - begin for end in ends)]
    phases = [(name, start - begin, end - begin) for name, start, end in phases]
    return MemoryTimeline(points, phases, list(zip(starts, starts[1:])))


class _Recording:
    def __init__(self):
        self.events: list[Allocation] = []  # seconds as time.time() has them


@contextlib.contextmanager
def _allocations(baseline: list[torch.Tensor]):
    """All events of the CPU's allocator in the region."""
    recording = _Recording()
    with MemoryMeter("cpu").measure(baseline) as measured:
        before = time.time()
        marker = torch.empty(MARKER, dtype=torch.uint8)
        del marker
        yield recording
    shift = before - next(event.seconds for event in measured.allocations if event.bytes == MARKER)
    for event in measured.allocations:
        if abs(event.bytes) != MARKER:
            recording.events.append(event._replace(seconds=event.seconds + shift))


def _stack(events: list[Allocation], labels: list, alive: dict[int, int]) -> list[tuple[float, list[int]]]:
    """Bytes alive by category after every event."""
    allocations: dict[int, list[list]] = {}  # address -> [start, category], in order
    for event in events:
        if event.bytes > 0:
            allocations.setdefault(event.address, []).append([event.seconds, "temporaries"])
    for seconds, address, category in labels:
        if address in alive:
            continue  # a parameter that autograd keeps is no activation
        candidates = [item for item in allocations.get(address, ()) if item[0] <= seconds + SLACK]
        if candidates and (category != "activations" or candidates[-1][1] == "temporaries"):
            candidates[-1][1] = category
    sizes = dict.fromkeys(CATEGORIES, 0)
    sizes["parameters"] = sum(alive.values())
    category_at = dict.fromkeys(alive, "parameters")
    points = []
    for event in events:
        if event.bytes > 0:
            category_at[event.address] = allocations[event.address].pop(0)[1]
        sizes[category_at.get(event.address, "temporaries")] += event.bytes
        points.append((event.seconds, list(sizes.values())))
    return points


def draw(timeline: MemoryTimeline, predicted: list[int], steps: int, axis) -> None:
    """The first `steps` steps: stacked areas, a strip with the phases, each step's peak predicted (line) and measured.

    The axis counts the allocator's events, so that the picture does not depend on what else the machine does. A column
    shows the fullest of its moments: the loss's few events would be narrower than a pixel.
    """
    times = [seconds for seconds, _ in timeline.points]

    def place(seconds: float) -> int:
        return bisect.bisect_left(times, seconds)

    end = place(timeline.steps[steps - 1][1])
    width, top = -(-end // COLUMNS), max(predicted) / MIB
    starts = range(0, end, width)
    columns = [max((sizes for _, sizes in timeline.points[i : min(i + width, end)]), key=sum) for i in starts]
    sizes = [[size / MIB for size in category] for category in zip(*columns)]
    colours = [COLOURS[name] for name in CATEGORIES]
    axis.stackplot(list(starts), *sizes, step="post", labels=CATEGORIES, colors=colours, lw=0, aa=False)
    for name, *limits in timeline.phases:
        start, stop = map(place, limits)
        if stop <= end:
            axis.broken_barh([(start, stop - start)], (-0.11 * top, 0.07 * top), color=COLOURS[name], linewidth=0)
            text = "update" if name == "optimizer" else name
            axis.text((start + stop) / 2, -0.075 * top, text, ha="center", va="center", fontsize=9, color="white")
    for number, limits in enumerate(timeline.steps[:steps]):
        start, stop = map(place, limits)
        names = ("predicted peak", "measured peak") if number == 0 else (None, None)  # once in the legend
        axis.hlines(predicted[number] / MIB, start, stop, color="black", lw=1.2, label=names[0])
        seconds, held = timeline.peak(number)
        x = (place(seconds) // width + 0.5) * width
        axis.plot(x, sum(held) / MIB, "o", color="black", ms=6, label=names[1])
        axis.text((start + stop) / 2, 1.12 * top, f"training step {number + 1}", ha="center", fontsize=11)
        axis.axvline(stop, color="black", lw=0.8, ls=":")
        axis.annotate("the loss", (x - width, 0.93 * sum(held) / MIB), (-45, -10), **ARROW)
    axis.set(ylim=(-0.13 * top, top * 1.22), xlim=(0, end), xticks=[])
    axis.set_xlabel("allocations and releases, in order", fontsize=10)
    axis.set_ylabel("MiB", fontsize=10)
    legend(axis.figure)
