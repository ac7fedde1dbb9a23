"""What one machine cannot show: predictions for real hardware, beside published numbers. Nothing here is measured."""

import itertools

import torch

from common.costs.networks import bus_bandwidth
from common.drawing.tables import print_table
from common.presets import PRESETS
from step01_single_gpu import cost as memory
from step02_data_parallel import cost

# GPUs: (tokens/s and GPU, micro-batch) of a 1.34 B model, sequences of 4,096 tokens, 256 of them per step, as published
# in the playbook's figure "dp_scaling". Its points mix two sizes of micro-batches.
PUBLISHED = {8: (40150, 2), 16: (37610, 1), 32: (35368, 1), 64: (31112, 1), 128: (26446, 2), 256: (15700, 1)}


def scaling(quick: bool) -> None:
    """PREDICTED strong scaling on H100 nodes beside published numbers: nothing here is measured by this project."""
    parameters, seq_len, samples, rows = 1.34e9, 4096, 256, []
    alone = PUBLISHED[8][0]
    reached = 6 * parameters * alone  # FLOP/s, without attention
    for (gpus, (published, micro_batch)), change in zip(PUBLISHED.items(), ["", *drops()]):
        cells, shape = [], (gpus, samples, micro_batch, seq_len)
        for width in (2, 4):
            needed = cost.tokens_to_hide(gpus, bus_bandwidth("all_reduce", gpus), reached, width)
            cells += [f"{cost.tokens_per_second_per_gpu(*shape, alone, reached, width):,.0f}", f"{needed:,.0f}"]
        shown = f"{100 * change:+.1f} %" if change else ""
        rows.append((gpus, f"{published:,}", shown, *cells, f"{micro_batch * seq_len:,}"))
    header = ("GPUs", "published", "change", "at most, β 2", "tokens needed", "at most, β 4", "needed", "there are")
    print_table("strong scaling, 1.34 B parameters, 256 x 4,096 tokens per step: tokens/s per GPU", header, rows)
    print(f"  The bounds start from the speed of 8 GPUs, {reached / 1e12:.0f} TFLOP/s.")


def drops() -> list[float]:
    """The relative change of the published speed from each number of GPUs to the next."""
    speeds = [speed for speed, _ in PUBLISHED.values()]
    return [after / before - 1 for before, after in itertools.pairwise(speeds)]


def journey(quick: bool) -> None:
    """PREDICTED memory of a GPU under data parallelism, however many there are: what sends us on to step 3."""
    lengths, models = (1024, 2048, 4096, 8192, 16384), ("llama3-1b", "llama3-8b", "llama3-70b")
    rows = []
    for name in models:
        model, dtype = PRESETS[name], torch.bfloat16
        held = sum(memory.states(model, dtype).values()) / 2**30
        saved = [memory.saved_activations(model, 1, length, dtype, recompute="selective") for length in lengths]
        rows.append((name, f"{held:,.1f}", *(f"{held + memory.total_bytes(each) / 2**30:,.1f}" for each in saved)))
    title = "GiB on each GPU, bfloat16, micro-batch 1, selective recomputation: states, and with activations"
    print_table(title, ("", "states", *(f"{length:,} tokens" for length in lengths)), rows)
