"""Does the host keep up with the device? Kernels that a step launches, times that it waits, and the host's own time.

Counted on the CPU. PyTorch hands every operator to a dispatch mode, which counts those that a GPU would launch kernels
for: not views, which compute nothing, and not allocations. A foreach operator counts as one, although on a GPU it
launches one kernel for every few dozen tensors.
"""

import statistics
import tempfile
import time

import numpy as np
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.config import TrainConfig
from common.costs.hardware import H100_TFLOPS
from common.counts import count_flops, count_parameters
from common.drawing.tables import print_table
from common.presets import PRESETS
from step01_single_gpu.data.batches import Batches
from step01_single_gpu.data.token_cache import Corpus
from step01_single_gpu.experiments.compute import cpu_times
from step01_single_gpu.experiments.tools import OneProcess, train_in

READS = ("item", "tolist", "__bool__", "__float__")  # of a tensor: on a GPU the host waits for its value
FLAGS = {"seq_len": 64, "micro_batch": 2, "peak_tflops": 1.0}


class _Launches(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += not (function.is_view or name.startswith(("empty", "new_empty", "_local_scalar")))
        return function(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Counts reads of tensors by Python."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in READS
        return function(*args, **(kwargs or {}))


def _count(dtype: str, steps: int, layers: int = 2, micro_batches: int = 2) -> tuple[int, int]:
    """Launches and reads of a run of train.py."""
    flags = FLAGS | {"layers": layers, "global_batch": 2 * micro_batches, "dtype": dtype, "steps": steps}
    with tempfile.TemporaryDirectory() as folder, _Reads() as reads, _Launches() as launched:
        train_in(folder, data="synthetic", **flags)
    return launched.count, reads.count


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
    runs = {
        (layers, k): OneProcess(TrainConfig(**tiny, layers=layers, global_batch=k)) for layers in (2, 6) for k in (1, 3)
    }
    times = cpu_times({case: run.step for case, run in runs.items()}, 4 if quick else 20)
    seconds = {case: min(values) for case, values in times.items()}  # other work can only make a step longer
    host = (seconds[6, 3] - seconds[6, 1] - seconds[2, 3] + seconds[2, 1]) / (4 * 2)
    print(f"\nhost's time for a layer of a micro-batch, forward and backward: {host * 1e6:.0f} microseconds")
    rows = []
    for name in ("smollm-135m", "smollm-1.7b", "llama3-8b", "llama3-70b"):
        model = PRESETS[name]
        count = count_parameters(model)
        layer = count.attention + count.dense_mlp
        rows.append((name, f"{layer / 1e6:.2f}", f"{host * 1e12 * H100_TFLOPS / (6 * layer):,.0f}"))
    header = ("", "million parameters of a layer", "tokens")
    print_table("Predicted: tokens of a micro-batch from which an H100 at its peak is never idle", header, rows)


def loading(quick: bool) -> None:
    """How fast shuffled micro-batches are read from a large memory map, beside the time that a GPU computes on them."""
    rows, tokens = [], 2**23 if quick else 2**28
    with tempfile.NamedTemporaryFile() as file:
        np.zeros(tokens, np.uint16).tofile(file.name)
        corpus = Corpus("zeros", np.memmap(file.name, np.uint16, "r"), "", 2, None)
        for seq_len, rows_at_once in ((512, 8), (4096, 1), (4096, 8)):
            batches, times = Batches(corpus, seq_len, rows_at_once, seed=0), []
            for step in range(20 if quick else 200):
                start = time.perf_counter()
                batches.micro_batch(step, 0, rows_at_once)
                times.append(time.perf_counter() - start)
            speed = rows_at_once * seq_len / statistics.median(times)  # the first call draws the order of the epoch
            flops = 3 * count_flops(PRESETS["llama3-8b"], seq_len).forward / seq_len
            share = 1e12 * H100_TFLOPS / flops / speed
            rows.append((f"{rows_at_once} x {seq_len:,}", f"{speed / 1e6:,.0f}", f"{share:.2%}"))
    header = ("micro-batch", "million tokens/s", "of the time of an H100 at its peak, Llama 3 8B")
    print_table("Reading a corpus", header, rows)
