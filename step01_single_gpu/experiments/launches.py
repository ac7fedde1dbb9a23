"""Does the host keep up with the device? Kernels that a step launches, times that it waits, and the host's own time.

Counted on the CPU. PyTorch hands every operator to a dispatch mode, which counts those that a GPU would launch kernels
for: not views, which compute nothing, and not allocations. A foreach operator counts as one, although on a GPU it
launches one kernel for every few dozen tensors.
"""

import tempfile
from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.config import TrainConfig
from common.costs.hardware import H100_TFLOPS
from common.counts import count_parameters
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table
from common.presets import PRESETS
from step01_single_gpu.experiments.compute import cpu_times
from step01_single_gpu.experiments.tools import Run, train_in

READS = ("item", "tolist", "__bool__", "__float__")  # of a tensor: on a GPU the host waits for its value
FLAGS = {"seq_len": 64, "micro_batch": 2, "peak_tflops": 1.0}
HOST_COLOURS = COLOURS | {"batch": "#777777"}
HOST_LEGEND = {
    "batch": "prepare a micro-batch",
    "other": "launch a kernel",
    "forward": "forward",
    "backward": "backward",
    "idle": "wait",
}
PEAK = 1e12 * H100_TFLOPS


class _Launches(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += not (function.is_view or name.startswith(("empty", "new_empty", "_local_scalar")))
        return function(*args, **(kwargs or {}))


def _count(dtype: str, steps: int, layers: int = 2, micro_batches: int = 2) -> tuple[int, int]:
    """Launches and reads of a run of train.py."""
    reads = []
    flags = FLAGS | {"layers": layers, "global_batch": 2 * micro_batches, "dtype": dtype, "steps": steps}
    with ExitStack() as stack:
        for name in READS:
            real = getattr(torch.Tensor, name)
            counting = mock.patch.object(torch.Tensor, name, lambda self, real=real: reads.append(0) or real(self))
            stack.enter_context(counting)
        counted = stack.enter_context(_Launches())
        train_in(stack.enter_context(tempfile.TemporaryDirectory()), data="synthetic", **flags)
    return counted.count, len(reads)


def _of_a_step(dtype: str, layers: int = 2, micro_batches: int = 2) -> tuple[int, int]:
    """What one step adds to a run: a run of three steps minus a run of two."""
    fewer, more = (_count(dtype, steps, layers, micro_batches) for steps in (2, 3))
    return more[0] - fewer[0], more[1] - fewer[1]


def launches(quick: bool) -> None:
    """Kernels that a step launches, how often the host waits, and how many tokens keep a GPU busy meanwhile."""
    rows = []
    for dtype in ("float32", "bfloat16", "float16"):
        counted, reads = _of_a_step(dtype)
        one, two = (_of_a_step(dtype, micro_batches=each)[0] for each in (1, 2))
        three, four = (_of_a_step(dtype, layers=3, micro_batches=each)[0] for each in (1, 2))
        rows.append((dtype, f"{counted:,}", reads, (four - three) - (two - one)))
    title = "One step of 2 layers and 2 micro-batches, counted on the CPU"
    header = ("", "kernels launched", "times that the host waits", "kernels of a layer and micro-batch")
    print_table(title, header, rows)

    tiny = {"hidden": 8, "heads": 1, "ffn": 8, "vocab": 16, "seq_len": 2, "micro_batch": 1, "dtype": "bfloat16"}
    runs = {(layers, k): Run(TrainConfig(**tiny, layers=layers, global_batch=k)) for layers in (2, 6) for k in (1, 3)}
    times = cpu_times({case: run.step for case, run in runs.items()}, 4 if quick else 20)
    seconds = {case: min(values) for case, values in times.items()}  # other work can only make a step longer
    host = (seconds[6, 3] - seconds[6, 1] - seconds[2, 3] + seconds[2, 1]) / (4 * 2)
    print(f"\nhost's time for a layer of a micro-batch, forward and backward: {host * 1e6:.0f} microseconds")
    rows = []
    for name in ("smollm-135m", "smollm-1.7b", "llama3-8b", "llama3-70b"):
        model = PRESETS[name]
        count = count_parameters(model)
        layer = count.attention + count.dense_mlp
        rows.append((name, f"{layer / 1e6:.2f}", *(f"{each * PEAK / (6 * layer):,.0f}" for each in (host, 1e-3))))
    header = ("", "million parameters of a layer", "tokens", "tokens if it takes 1 ms")
    print_table("Predicted: tokens of a micro-batch from which an H100 at its peak is never idle", header, rows)
    draw_host()


def draw_host() -> None:
    """Host and device on a virtual clock: long kernels, short ones, and a host that reads after every micro-batch."""
    cases = {
        "long kernels: the host runs ahead": (2.5, False),
        "the same, but the host reads the loss of every micro-batch": (2.5, True),
        "short kernels: the device waits for the host": (0.6, False),
    }
    figure, axes = new_figure(len(cases), width=8.6, height=4.8, sharex=True)
    for axis, (title, (kernel, reads)) in zip(axes, cases.items()):
        host, device = host_and_device(kernel, reads)
        busy = sum(width for _, width, kind in device if kind != "idle") / (sum(device[-1][:2]) - device[0][0])
        for row, (name, spans) in enumerate((("host", host), ("device", device))):
            for start, width, kind in spans:
                look = {"facecolor": HOST_COLOURS[kind], "edgecolor": "white", "linewidth": 0.6}
                if kind == "idle":
                    look = {"facecolor": "white", "edgecolor": "#555555", "hatch": "/////", "linewidth": 0.5}
                axis.broken_barh([(start, width)], (row + 0.08, 0.84), label=HOST_LEGEND[kind], **look)
            axis.text(-0.7, row + 0.5, name, ha="right", va="center", fontsize=11)
        axis.text(sum(device[-1][:2]) + 0.8, 1.5, f"busy {busy:.0%}", va="center", fontsize=11, weight="bold")
        axis.set_title(title, fontsize=11.5, loc="left", pad=3)
        axis.set(ylim=(2, 0), yticks=[], xticks=[])
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
    axes[-1].set_xlabel("time", fontsize=11, loc="right")
    axes[0].set_xlim(0, 62)
    handles = {label: bar for bar, label in zip(*axes[1].get_legend_handles_labels())}
    handles = [handles[label] for label in HOST_LEGEND.values()]
    figure.legend(handles, HOST_LEGEND.values(), ncol=5, fontsize=10.5, loc="outside lower center", frameon=False)
    save_figure(figure, "host")


def host_and_device(kernel: float, reads: bool) -> tuple[list, list]:
    """(start, width, kind) of what both do in four micro-batches of four kernels.

    To prepare a micro-batch takes the host 3, to launch a kernel 1.
    """
    now, free, host, device = 0.0, 0.0, [], []
    for _ in range(4):
        host.append((now, 3.0, "batch"))
        now += 3.0
        for kind in ["forward"] * 2 + ["backward"] * 2:
            host.append((now, 1.0, "other"))
            now += 1.0
            if now > free and device:
                device.append((free, now - free, "idle"))
            free = max(now, free)
            device.append((free, kernel, kind))
            free += kernel
        if reads and now < free:
            host.append((now, free - now, "idle"))
            now = free
    return host, device
