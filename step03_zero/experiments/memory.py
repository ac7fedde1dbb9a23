"""Bytes that a rank holds: parameters, gradients, optimizer state and activations, in each stage and dtype."""

import statistics

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.measure.allocator import live_bytes
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, total_bytes
from step03_zero.experiments import predictions
from step03_zero.experiments.tools import MIB, PARTS, SHAPE, STAGES, Run, on_every_case, units_of

GIB = 2**30
# Read off the bars of the playbook's figure of 8 B parameters on 8 ranks (zero3_memoryusage), GiB
PUBLISHED = {0: (15, 15, 60), 1: (15, 15, 7.5), 2: (15, 1.875, 7.5), 3: (1.875, 1.875, 7.5)}
PUBLISHED_ACTIVATIONS = {1024: 4.25, 4096: 17, 16384: 68}


def memory(quick: bool) -> None:
    """Parameters, gradients and optimizer state per rank in each stage: predicted, and the storages that exist."""
    parameters, measured = units_of(SHAPE).parameters, {}
    for ranks in (2,) if quick else (2, 4):
        cases = [(dtype, stage) for dtype in predictions.OURS for stage in STAGES]
        flags = [SHAPE | {"global_batch": ranks, "dtype": dtype, "zero": stage} for dtype, stage in cases]
        found = on_ranks(ranks, on_every_case, bytes_held, flags, title="memory", jobs=len(cases))
        for number, (dtype, stage) in enumerate(cases):
            measured[ranks, dtype, stage] = {
                part: statistics.mean(rank[number][part] for rank in found) for part in (*PARTS, "activations")
            }
    for ranks, dtype in dict.fromkeys((ranks, dtype) for ranks, dtype, _ in measured):
        rows = []
        for stage in STAGES:
            expected = predictions.held(parameters, stage, ranks, predictions.OURS[dtype])
            sizes = measured[ranks, dtype, stage]
            rows += [(f"{stage}: {part}", size, sizes[part]) for part, size in zip(PARTS, expected)]
            rows.append((f"{stage}: sum", sum(expected), sum(sizes[part] for part in PARTS)))
        title = f"{dtype}, {ranks} ranks, {parameters:,} parameters: MiB that a rank holds"
        print_comparison(title, "stage", rows, ",.3f", MIB)
    print("  Measured: the storages behind the tensors, each once, mean over ranks. Units are padded to equal shards,")
    print("  by less than N elements each; with these shapes no padding is needed.")

    rows = []
    for stage in STAGES:
        columns = (predictions.OURS["float32"], predictions.OURS["bfloat16"], predictions.PAPER)
        for_8 = [sum(predictions.held(1, stage, 8, widths)) for widths in (*columns, predictions.FLOAT32_SUMS)]
        limits = [predictions.limit(stage, widths) for widths in columns]
        shown = ["-" if stage == 0 else f"{value:.2f}" if value < 1e6 else "no limit" for value in limits]
        rows.append((stage, *(f"{value:.2f}" for value in for_8), *shown))
    header = ("stage", "float32 4+4+8", "bf16 2+4+12", "paper 2+2+12", "sums too 2+6+12")
    header += ("limit, float32", "limit, bf16", "limit, paper")
    print_table("predicted: bytes per parameter on 8 ranks, and how many times less for N -> infinity", header, rows)

    rows, model = [], TrainConfig(**SHAPE).model_config
    for dtype in predictions.OURS:
        kept = saved_activations(model, SHAPE["micro_batch"], SHAPE["seq_len"], getattr(torch, dtype))
        for stage in STAGES:
            sizes = measured[2, dtype, stage]
            rows.append((f"{dtype}, {stage}", total_bytes(kept), sizes["activations"]))
    print_comparison("bytes of activations that a rank keeps for the backward, 2 ranks", "stage", rows)
    draw_memory(parameters, measured)


def bytes_held(run: Run) -> dict[str, int]:
    """Return the bytes that this rank holds in a step, and those that autograd keeps of a forward."""
    return run.step(0) | {"activations": kept_for_backward(run)}


def kept_for_backward(run: Run) -> int:
    """Return the bytes that a forward keeps for the backward, without the weights among them."""
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return tensor

    run.zero.gather()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        share = run.loss_share(0, 0)
    weights = {unit.weights.untyped_storage().data_ptr() for unit in run.zero.units}
    held = live_bytes(tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in weights)
    del share
    return held


def draw_memory(parameters: int, measured: dict) -> None:
    """Draw stacked bars of what was measured, with a mark where theory expects the end of each part."""
    figure, axes = new_figure(columns=2, width=9.5)
    for dtype, axis in zip(predictions.OURS, axes):
        for number, ranks in enumerate(sorted({key[0] for key in measured})):
            for stage in STAGES:
                place, top, expected_top = stage + (number - 0.5) * 0.4, 0.0, 0.0
                expected = predictions.held(parameters, stage, ranks, predictions.OURS[dtype])
                for part, size in zip(PARTS, expected):
                    height = measured[ranks, dtype, stage][part] / MIB
                    axis.bar(place, height, 0.36, top, color=COLOURS[part], edgecolor="white", linewidth=0.5)
                    top, expected_top = top + height, expected_top + size / MIB
                    axis.plot([place - 0.2, place + 0.2], [expected_top] * 2, color="black", linewidth=1)
                axis.text(place, top + 1, f"{ranks}", ha="center", va="bottom", fontsize=11)
        axis.set_xticks(STAGES, [f"stage {stage}" for stage in STAGES], fontsize=12)
        widths, total = " + ".join(map(str, predictions.OURS[dtype])), sum(predictions.OURS[dtype])
        axis.set_title(f"{dtype}: {widths} = {total} bytes per parameter", fontsize=12, loc="left")
        axis.set_ylim(0, 1.08 * parameters * total / MIB)
    axes[0].set_ylabel("MiB on each of 2 or 4 ranks", fontsize=12)
    handles = [axes[0].bar(0, 0, color=COLOURS[part], label=part) for part in PARTS]
    handles += axes[0].plot([], [], color="black", linewidth=1, label="predicted")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=12)
    save_figure(figure, "memory")


# ---- larger than this machine ---------------------------------------------------------------------------------------


def llama(quick: bool) -> None:
    """PREDICTED: 8 B parameters on 8 ranks in bfloat16, beside the published bars of the playbook."""
    model, ranks = PRESETS["llama3-8b"], 8
    count, rows = count_parameters(model).total, []
    for stage in STAGES:
        plotted, ours = (
            predictions.held(count, stage, ranks, widths)
            for widths in (predictions.PLOTTED, predictions.OURS["bfloat16"])
        )
        cells = [" / ".join(f"{size / GIB:.2f}" for size in sizes) for sizes in (plotted, ours)]
        published = " / ".join(f"{size:g}" for size in PUBLISHED[stage])
        ratio = sum(PUBLISHED[stage]) / (sum(plotted) / GIB)
        rows.append((stage, published, cells[0], f"{ratio:.4f}", cells[1], f"{sum(ours) / GIB:.1f}"))
    header = ("stage", "published", "2 + 2 + 8 bytes", "ratio of the sums", "2 + 4 + 12, as here", "sum")
    title = f"{count / 1e9:.2f} B parameters, {ranks} ranks: GiB of parameters / gradients / optimizer"
    print_table(title, header, rows)

    rows = []
    for length, published in PUBLISHED_ACTIVATIONS.items():
        cells = [f"{activations(length, how) / GIB:.2f}" for how in ("none", "selective", "full")]
        rows.append((f"{length:,} tokens", published, *cells))
    print_table("GiB of activations, micro-batch 1", ("", "published", "ours: none", "selective", "full"), rows)
    draw_llama(count, ranks)


def activations(length: int, recompute: str) -> float:
    """Return the bytes of activations that a sequence of Llama 3 8B keeps in bfloat16."""
    return total_bytes(saved_activations(PRESETS["llama3-8b"], 1, length, torch.bfloat16, recompute=recompute))


def draw_llama(count: int, ranks: int) -> None:
    """Draw what each GPU holds by stage and length of the sequence."""
    figure, axes = new_figure(columns=3, width=9.5, sharey=True)
    for axis, length in zip(axes, PUBLISHED_ACTIVATIONS):
        for stage in STAGES:
            sizes, bottom = predictions.held(count, stage, ranks, predictions.OURS["bfloat16"]), 0.0
            for part, size in zip((*PARTS, "activations"), (*sizes, activations(length, "selective"))):
                label = part if stage == 0 else None
                axis.bar(stage, size / GIB, 0.7, bottom, color=COLOURS[part], label=label)
                bottom += size / GIB
            axis.text(stage, bottom + 2, f"{bottom:.0f}", ha="center", fontsize=12)
        axis.axhline(80, color="black", linewidth=1.2, linestyle="--")
        axis.set_xticks(STAGES, STAGES, fontsize=12)
        axis.set_title(f"{length:,} tokens", fontsize=12, loc="left", fontweight="bold")
        axis.set_ylim(0, 260)
    axes[0].set_ylabel("GiB on each of 8 GPUs", fontsize=12)
    axes[1].set_xlabel("stage of ZeRO (dashed: an H100's 80)", fontsize=12)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=12)
    save_figure(figure, "llama_memory")
