"""What one machine cannot measure: predicted for real hardware, or published by others, and labelled so."""

import math

from common.costs.alpha_beta import gather_ratio
from common.costs.hardware import H100_TFLOPS
from common.costs.networks import BUS_GB_PER_S, NETWORK, NODE, NVLINK
from common.counts import count_flops
from common.drawing.tables import print_table
from common.presets import PRESETS
from step04_tensor_parallel import cost

DEGREES = (2, 4, 8, 16, 32)


def bandwidth(tp: int) -> float:
    """Nominal bytes/s of a GPU in an all-gather over `tp` GPUs: rings over several nodes share the nodes' cards."""
    return NVLINK if tp <= NODE else NODE * NETWORK


def condition(quick: bool) -> None:
    """PREDICTED: an all-gather's time over that of the product behind it, for H100-like numbers."""
    peak = H100_TFLOPS * 1e12
    rows = []
    for name in ("llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b"):
        model = PRESETS[name]
        queries, keys = model.heads * model.head_width, 2 * model.kv_heads * model.head_width
        h, shared = model.hidden, (queries + keys, 2 * model.ffn)
        ratios = [gather_ratio(8, h, peak, bandwidth(8), beta) for beta in (1, 2)]
        ratios += [gather_ratio(8, width, peak, bandwidth(8)) for width in shared]
        ratios += [gather_ratio(8, 12 * h, peak, bandwidth(8), beta) for beta in (1, 2)]
        rows.append((name, f"{h:,}", *(f"{ratio:.2f}" for ratio in ratios)))
    header = ("tp 8", "h", "A3 as printed", "times beta", "q, k, v share", "gate, up share", "cheatsheet", "times beta")
    print_table("predicted: all-gather / the products that share it; up to 1 it hides", header, rows)
    rows = []
    for tp in DEGREES:
        cells = [f"tp {tp}"]
        for each in (bandwidth(tp), 1e9 * BUS_GB_PER_S["all_gather"].get(tp, 0)):
            cells += [f"{each / 1e9:g}", f"{gather_ratio(tp, 1, peak, each):,.0f}"] if each else ["-", "-"]
        rows.append(cells)
    header = ("", "GB/s, nominal", "columns", "GB/s, published", "columns")
    print_table("predicted: columns that share a gather from which on it can hide", header, rows)
    rows = []
    for name in ("llama3-8b", "llama3-70b", "llama3-405b"):
        model = PRESETS[name]
        cells = [f"{model.heads}"]
        for width in ((model.heads + 2 * model.kv_heads) * model.head_width, 2 * model.ffn):
            degrees = (1 + width * each / peak for each in (NVLINK, 1e9 * BUS_GB_PER_S["all_gather"][NODE]))
            cells += [f"{width:,}", *(f"tp {2 ** int(math.log2(each))}" for each in degrees)]
        rows.append((name, *cells))
    header = ("", "heads", "q, k, v", "nominal", "published", "gate, up", "nominal", "published")
    print_table("predicted: the largest power of two whose gather can hide, if a node had that many GPUs", header, rows)
    model, tokens, rows = PRESETS["llama3-8b"], 8192, []
    flops = count_flops(model, tokens).model
    for tp in DEGREES:
        stream = 2 * tokens * model.hidden
        sent = model.layers * sum(each.count * each.bytes for each in cost.block_messages(cost.Way(), tp, stream))
        times = sent / bandwidth(tp), flops / tp / peak
        cells = (f"{sent / 1e9:.1f}", f"{1e3 * times[0]:.0f}", f"{1e3 * times[1]:.0f}", f"{times[0] / times[1]:.2f}")
        rows.append((f"tp {tp}", *cells))
    header = ("", "GB sent by the blocks", "ms at that bandwidth", "ms of computation at peak", "ratio")
    print_table(
        f"predicted: llama3-8b, a micro-batch of {tokens:,} tokens, SP, overlap, bfloat16, a rank", header, rows
    )
