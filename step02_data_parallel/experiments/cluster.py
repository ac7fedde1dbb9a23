"""What one machine cannot show: predictions for real hardware, beside published numbers. Nothing here is measured."""

import itertools

import torch

from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table
from common.presets import PRESETS
from step01_single_gpu.memory_model import prediction as memory
from step02_data_parallel import batch_recipe
from step02_data_parallel.experiments import predictions

# GPUs: (tokens/s and GPU, micro-batch) of a 1.34 B model, sequences of 4,096 tokens, 256 of them per step, as published
# in the playbook's figure "dp_scaling". Its points mix two sizes of micro-batches.
PUBLISHED = {8: (40150, 2), 16: (37610, 1), 32: (35368, 1), 64: (31112, 1), 128: (26446, 2), 256: (15700, 1)}
CLUSTER = """torchrun --nnodes 32 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 \\
    step02_data_parallel/train.py --model llama3-1b --seq-len 4096 --micro-batch 1 --global-batch 256 \\
    --dtype bfloat16 --recompute selective --steps 20 --run-dir runs/dp256 --trace 15:17"""


def scaling(quick: bool) -> None:
    """PREDICTED strong scaling on H100 nodes beside published numbers: nothing here is measured by this project."""
    parameters, seq_len, samples = 1.34e9, 4096, 256
    alone = PUBLISHED[8][0]
    reached = 6 * parameters * alone  # FLOP/s, without attention
    predicted, rows = {2: [], 4: []}, []
    for gpus, (published, micro_batch) in PUBLISHED.items():
        for width, values in predicted.items():
            shape = (gpus, samples, micro_batch, seq_len)
            values.append(predictions.tokens_per_second_per_gpu(*shape, alone, reached, width))
        bandwidth = batch_recipe.bus_bandwidth("all_reduce", gpus)
        needed = [f"{predictions.tokens_to_hide(gpus, bandwidth, reached, width):,.0f}" for width in predicted]
        speeds = (f"{published:,}", *(f"{values[-1]:,.0f}" for values in predicted.values()))
        rows.append((gpus, *speeds, *needed, f"{micro_batch * seq_len:,}"))
    header = ("GPUs", "published", "predicted, β 2", "β 4", "tokens needed, β 2", "β 4", "there are")
    print_table("strong scaling, 1.34 B parameters, 256 x 4,096 tokens per step: tokens/s per GPU", header, rows)
    print(f"  published, from one point to the next: {', '.join(f'{100 * drop:+.1f} %' for drop in drops())}")
    print(f"  Predictions start from the speed of 8 GPUs, {reached / 1e12:.0f} TFLOP/s, and add what the last backward")
    print("  cannot hide of an all-reduce at the published bandwidths. They leave out the optimizer, the slowest rank,")
    print("  and NCCL's kernels on the same GPU, and so are upper bounds. To measure it:")
    print("    " + CLUSTER.replace("\n", "\n    "))

    figure, axes = new_figure()
    published = [speed for speed, _ in PUBLISHED.values()]
    axes.plot(list(PUBLISHED), published, "o-", color=COLOURS["published"], label="published (playbook)")
    for width, style in ((2, "-"), (4, "--")):
        label = f"predicted bound, {width} bytes per gradient"
        axes.plot(list(PUBLISHED), predicted[width], style, color=COLOURS["predicted"], label=label)
    axes.set(xscale="log", xlabel="GPUs", ylabel="tokens/s per GPU", ylim=(0, None))
    axes.set_xticks(list(PUBLISHED), list(PUBLISHED))
    axes.minorticks_off()
    axes.set_title("1.34 B model, 256 sequences of 4,096 tokens per step", fontsize=10, loc="left")
    axes.legend(frameon=False)
    save_figure(figure, "scaling")


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
