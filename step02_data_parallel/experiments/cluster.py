"""What one machine cannot show: predictions for real hardware, beside published numbers. Nothing here is measured."""

import torch

from common.counts import count_parameters
from common.experiments.figures import COLOURS, new_figure, save_figure
from common.experiments.tables import print_table
from common.presets import PRESETS
from step01_single_gpu.memory_model import prediction as memory
from step02_data_parallel import batch_recipe
from step02_data_parallel.experiments import predictions

# GPUs: (tokens/s and GPU, micro-batch) of a 1.34 B model, sequences of 4,096 tokens, 256 of them a step, as published
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
        needed = predictions.tokens_to_hide(gpus, batch_recipe.all_reduce_bandwidth(gpus), reached, 2)
        speeds = (f"{published:,}", f"{predicted[2][-1]:,.0f}", f"{predicted[4][-1]:,.0f}")
        rows.append((gpus, *speeds, f"{needed:,.0f} of {micro_batch * seq_len:,}"))
    header = ("GPUs", "published", "predicted, 2 bytes a gradient", "4 bytes", "tokens needed to hide 2 bytes")
    print_table("strong scaling, 1.34 B parameters, 256 x 4,096 tokens a step: tokens/s and GPU", header, rows)
    print("  Predicted: 8 GPUs' speed, and what the last backward cannot hide of one all-reduce at the playbook's own")
    print("  bandwidths. It has no optimizer step, no waiting for the slowest rank and no kernels that share the GPU")
    print("  with NCCL's, so it is an upper bound. To measure it, on a cluster:")
    print("    " + CLUSTER.replace("\n", "\n    "))

    figure, axes = new_figure()
    published = [speed for speed, _ in PUBLISHED.values()]
    axes.plot(list(PUBLISHED), published, "o-", color=COLOURS["published"], label="published (playbook)")
    for width, style in ((2, "-"), (4, "--")):
        label = f"predicted bound, {width} bytes a gradient"
        axes.plot(list(PUBLISHED), predicted[width], style, color=COLOURS["predicted"], label=label)
    axes.set(xscale="log", xlabel="GPUs", ylabel="tokens/s and GPU", ylim=(0, None))
    axes.set_xticks(list(PUBLISHED), list(PUBLISHED))
    axes.minorticks_off()
    axes.set_title("1.34 B model, 256 sequences of 4,096 tokens a step", fontsize=10, loc="left")
    axes.legend(frameon=False)
    save_figure(figure, "scaling")


def journey(quick: bool) -> None:
    """PREDICTED memory of a GPU under data parallelism, however many there are: what sends us on to step 3."""
    lengths, models = (1024, 2048, 4096, 8192, 16384), ("llama3-1b", "llama3-8b", "llama3-70b")
    figure, axes = new_figure(columns=3, width=9)
    places, rows = range(len(lengths)), []
    for name, axis in zip(models, axes):
        model, dtype = PRESETS[name], torch.bfloat16
        parts = {key: [value / 1e9] * len(lengths) for key, value in memory.states(model, dtype).items()}
        held = sum(values[0] for values in parts.values())
        saved = [memory.saved_activations(model, 1, length, dtype, recompute="selective") for length in lengths]
        parts["activations"] = [memory.total_bytes(each) / 1e9 for each in saved]
        rows.append((name, f"{held:,.1f}", *(f"{held + each:,.1f}" for each in parts["activations"])))
        bottom = [0.0] * len(lengths)
        for part, heights in parts.items():
            axis.bar(places, heights, bottom=bottom, color=COLOURS[part], label=part, width=0.7)
            bottom = [low + height for low, height in zip(bottom, heights)]
        axis.axhline(80, color="black", linewidth=1, linestyle="--")
        axis.set_xticks(places, [f"{length // 1024}k" for length in lengths])
        axis.set_title(f"{name}, {count_parameters(model).total / 1e9:.2f} B", fontsize=10, loc="left")
    title = "GB on each GPU, bfloat16, micro-batch 1, selective recomputation: states, and with activations"
    print_table(title, ("", "states", *(f"{length:,} tokens" for length in lengths)), rows)
    axes[0].set_ylabel("GB on each GPU")
    axes[1].set_xlabel("sequence length (dashed: 80 GB)")
    title = "predicted; bfloat16, micro-batch 1, selective recomputation"
    figure.suptitle(title, fontsize=10)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    save_figure(figure, "journey")
