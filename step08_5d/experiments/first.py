"""Which dimension first? Memory and time of every simple way to use 8 to 512 GPUs, by formula."""

import itertools
from dataclasses import dataclass, replace

import torch

from common.costs.hardware import H100_TFLOPS, NVLINK, bus_bandwidth
from common.counts import count_parameters
from common.drawing.tables import print_table
from common.model_config import ModelConfig
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, total_bytes

PEAK = H100_TFLOPS * 1e12
REACHED = PEAK / 2  # FLOP/s of matrix products
SEQ, SEQUENCES = 4096, 256  # 1 M tokens in a step, as in the playbook's experiments
MEMORY = 80 * 2**30  # bytes
# The playbook's sizes, 1.34, 8.86 and 80.0 B, are those of Llamas without grouped queries and with this vocabulary
MODELS = {
    "1 B": replace(PRESETS["llama3-1b"], kv_heads=32, vocab=131072),
    "8 B": replace(PRESETS["llama3-8b"], kv_heads=32, vocab=131072),
    "80 B": replace(PRESETS["llama3-70b"], kv_heads=64, vocab=131072),
}
GPUS = (8, 16, 32, 64, 128, 256, 512)
# The best MFU in % that the playbook's authors have found on so many GPUs (its heat map), and some configurations
PUBLISHED = {
    "1 B": (44.3, 41.6, 38.4, 32.5, 29.5, 23.2, 5.25),
    "8 B": (45.2, 43.9, 43.3, 39.5, 36.3, 32.7, 18.7),
    "80 B": (None, None, 14.8, 30.65, 34.3, 30.75, 17.8),
}
FOUND = {("1 B", 8): "dp 4 pp 2 ZeRO-1", ("8 B", 128): "dp 16 tp 8"}
FOUND |= {("80 B", 256): "dp 4 tp 4 pp 16 ZeRO-1", ("80 B", 512): "dp 32 tp 16 ZeRO-1"}


@dataclass(frozen=True)
class Layout:
    """A way to use some GPUs."""

    dp: int
    tp: int
    pp: int
    zero: int
    recompute: str
    micro_batch: int

    @property
    def micro_batches(self) -> int:
        return SEQUENCES // self.dp // self.micro_batch

    @property
    def name(self) -> str:
        degrees = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        parts += [f"ZeRO-{self.zero}"] if self.dp > 1 else []
        return " ".join(parts)


def layouts(model: ModelConfig, gpus: int) -> dict[str, list[Layout]]:
    """By kind, everything that these GPUs can do: at most one rank of `dp` per sequence."""
    some, kinds, result = (2, 4, 8, 16), {}, {}  # kind: tp, degrees of pp, stage of ZeRO
    kinds |= {"dp, ZeRO-1": (1, (1,), 1), "dp, ZeRO-3": (1, (1,), 3), "tp 8, ZeRO-1": (8, (1,), 1)}
    kinds |= {"tp 8, ZeRO-3": (8, (1,), 3), "pp": (1, some, 1), "tp 8, pp": (8, some, 1)}
    for kind, (tp, degrees, zero) in kinds.items():
        result[kind] = [
            Layout(gpus // tp // pp, tp, pp, zero, mode, micro_batch)
            for pp, mode, micro_batch in itertools.product(degrees, ("none", "full"), (1, 2, 4, 8, 16))
            if gpus % (tp * pp) == 0 and pp <= model.layers and SEQUENCES % (gpus // tp // pp * micro_batch) == 0
        ]
    return result


def memory(model: ModelConfig, layout: Layout) -> float:
    """Bytes on a rank of the first stage: states of 2 + 4 + 12 bytes per parameter, and activations.

    Under 1F1B that stage keeps as many micro-batches as there are stages (or all), each of its share of the layers.
    """
    count = count_parameters(model)
    layer = count.attention + count.dense_mlp + 2 * model.hidden
    ends = count.embedding + (count.head if layout.pp == 1 else 0)
    parameters = (model.layers / layout.pp * layer + ends) / layout.tp
    shards = [layout.dp if layout.zero >= stage else 1 for stage in (3, 2, 1)]
    states = parameters * sum(width / parts for width, parts in zip((2, 4, 12), shards))
    if layout.zero == 3:  # the weights of two layers and the gradients of one
        states += layer * (2 * 2 + 4) / layout.tp
    saved = saved_activations(model, 1, SEQ, torch.bfloat16, "fused", layout.recompute)
    kept = total_bytes(saved) - total_bytes(saved, "head", "log-probabilities")  # the fused head keeps no logits
    return states + layout.micro_batch * kept / layout.pp * min(layout.pp, layout.micro_batches) / layout.tp


def mfu(model: ModelConfig, layout: Layout) -> float:
    """Predicted, if products run at half the peak and nothing but communication and the bubble is in their way.

    ZeRO-1's gradients hide behind the last backward and its weights behind the next forward, ZeRO-3's behind other
    layers; tensor parallelism hides nothing.
    """
    gpus, parameters = layout.dp * layout.tp * layout.pp, count_parameters(model).total / layout.tp / layout.pp
    tokens, moved = layout.micro_batch * SEQ, (layout.dp - 1) / layout.dp * parameters
    forward = 2 * tokens * parameters / REACHED
    again = forward if layout.recompute == "full" else 0.0
    # One ring over whole nodes uses all their network cards. With tp there are 8 rings, each with a card of its own
    reduces, gathers = (bus_bandwidth(op, gpus) / layout.tp for op in ("all_reduce", "all_gather"))
    if layout.zero == 3:  # in every micro-batch: weights forward and backward, gradients backward
        late = max(0.0, 2 * moved / gathers - forward) + max(0.0, (2 + 4) * moved / gathers - 2 * forward - again)
        late *= layout.micro_batches
    else:
        late = max(0.0, 4 * moved / reduces - 2 * forward - again) + max(0.0, 2 * moved / reduces - forward)
    wire = 10 * model.layers / layout.pp * (layout.tp - 1) / layout.tp * tokens * model.hidden * 2 / NVLINK
    busy = layout.micro_batches + layout.pp - 1  # with the bubble
    return layout.micro_batches * 3 * forward / (busy * (3 * forward + again + wire) + late) * REACHED / PEAK


def first(quick: bool) -> None:
    """PREDICTED: which dimension first, for 1, 8 and 80 B parameters on 8 to 512 GPUs."""
    print(f"\n{SEQUENCES} sequences of {SEQ:,} tokens in a step; a cell has the fastest that fits 80 GiB, or its size")
    for name, model in MODELS.items():
        rows = []
        for gpus, published in zip(GPUS, PUBLISHED[name]):
            best, cells = {}, []
            for kind, found in layouts(model, gpus).items():
                fitting = [each for each in found if memory(model, each) <= MEMORY]
                if fitting:
                    best[kind] = max(fitting, key=lambda each: mfu(model, each))
                    cells.append(f"{mfu(model, best[kind]):.0%}, {memory(model, best[kind]) / 2**30:.0f} GiB")
                else:
                    cells.append(f"{min(memory(model, each) for each in found) / 2**30:.0f} GiB" if found else "-")
            chosen = max(best.values(), key=lambda each: mfu(model, each)).name if best else "none fits"
            shown = f"{published:.0f}%" if published else "-"
            rows.append((f"{gpus} GPUs", *cells, chosen, shown, FOUND.get((name, gpus), "")))
        header = ("", *layouts(model, 8), "best of these", "published", "which was")
        title = f"{name} ({count_parameters(model).total / 1e9:.2f} B): MFU if products reach half the peak, and memory"
        print_table(f"predicted, {title}", header, rows)
    print(COMMANDS)


COMMANDS = """
  To measure it on a cluster (nodes of 8 GPUs, Slurm), one job for each layout:
    for layout in "--zero 1" "--zero 3" "--tp 8" "--pp 2" "--tp 8 --pp 2"; do
      sbatch --nodes 4 step08_5d/train.slurm --model llama3-8b --seq-len 4096 --micro-batch 1 --global-batch 256 \\
        --steps 20 --recompute selective $layout
    done
  and then, with the folders that the jobs have written:
    python -m common.compare runs/step08-*"""
