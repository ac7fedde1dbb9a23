"""What one machine cannot show: predictions for real hardware, beside published numbers. Nothing here is measured."""

import math

from common.costs.alpha_beta import Player
from common.costs.hardware import H100_TFLOPS, MEMORY_BANDWIDTH
from common.costs.networks import BUS_GB_PER_S, NODE, NVLINK
from common.costs.vocabulary import WIDTHS
from common.counts import count_parameters
from common.drawing.tables import print_table
from common.link import Link
from common.presets import PRESETS
from step02_data_parallel.cost import tokens_to_hide
from step03_zero import cost
from step03_zero.experiments.tools import STAGES

GIB = 2**30
# Read off the bars of the playbook's figure of 8 B parameters on 8 ranks (zero3_memoryusage), GiB. They leave out the
# master weights: 2 + 2 + 8 bytes per parameter
PUBLISHED = {0: (15, 15, 60), 1: (15, 15, 7.5), 2: (15, 1.875, 7.5), 3: (1.875, 1.875, 7.5)}
PLOTTED = (2, 2, 8)
UPDATE_BYTES = 28 + 2  # AdamW reads gradient, master weight and two moments and writes three; and the narrow weight


def llama(quick: bool) -> None:
    """PREDICTED: 8 B parameters on 8 ranks in bfloat16, beside the published bars of the playbook."""
    count, rows = count_parameters(PRESETS["llama3-8b"]).total, []
    for stage in STAGES:
        both = [cost.held(count, stage, 8, widths).values() for widths in (PLOTTED, WIDTHS["bfloat16"])]
        cells = [" / ".join(f"{size / GIB:.2f}" for size in sizes) for sizes in both]
        published = " / ".join(f"{size:g}" for size in PUBLISHED[stage])
        rows.append((stage, published, *cells, f"{sum(both[1]) / GIB:.1f}"))
    header = ("stage", "published", "2 + 2 + 8 bytes", "2 + 4 + 12, as here", "sum")
    print_table(f"{count / 1e9:.2f} B parameters, 8 ranks: GiB of parameters / gradients / optimizer", header, rows)
    sizes, rows = (8, 64, 512, math.inf), []
    for name, widths in (("2 + 2 + 12 bytes", (2, 2, 12)), ("2 + 4 + 12, as here", WIDTHS["bfloat16"])):
        for stage in STAGES[1:]:
            rows.append((f"{name}, stage {stage}", *(f"{cost.saving(stage, ranks, widths):.2f}" for ranks in sizes)))
    print_table("how many times smaller than without ZeRO", ("ranks", "8", "64", "512", "no end of them"), rows)


def condition(quick: bool) -> None:
    """PREDICTED: how many tokens per GPU hide stage 3's messages, and the playbook's conditions beside ours."""
    peak, tokens, parameters = H100_TFLOPS * 1e12, 4096, count_parameters(PRESETS["llama3-8b"]).total
    places = {f"{NODE}, nominal": (NODE, NVLINK, NVLINK, NVLINK)}
    for gpus in BUS_GB_PER_S["all_gather"]:
        places[str(gpus)] = (
            gpus,
            *(1e9 * BUS_GB_PER_S[op][gpus] for op in ("all_gather", "reduce_scatter", "all_reduce")),
        )
    needed, ratios = [], []
    for name, (gpus, gather, scatter, reduce) in places.items():
        ours = cost.tokens_to_hide_gather(gpus, gather, peak), cost.tokens_to_hide_scatter(gpus, scatter, peak)
        both = cost.tokens_to_hide_backward(gpus, gather, scatter, peak), tokens_to_hide(gpus, reduce, peak, 4)
        needed.append((name, f"{gather / 1e9:g}", f"{scatter / 1e9:g}", *(f"{each:,.0f}" for each in (ours[0], *both))))
        three = [cost.appendix_a3(gpus, gather, peak, tokens), cost.cheatsheet_zero3(gpus, gather, peak, tokens)]
        three.append(cost.cheatsheet_zero2(gpus, scatter, peak, tokens, parameters))
        cells = (*three[:2], ours[0] / tokens, three[2], ours[1] / tokens)
        ratios.append((name, *(f"{each:.3g}" for each in cells)))
    header = ("GPUs", "all-gather GB/s", "reduce-scatter", "forward: 2 bytes", "backward: 2 + 4", "step 2: 4")
    print_table("tokens per GPU and micro-batch that hide it, 989 TFLOP/s, published bandwidths", header, needed)
    header = ("GPUs", "A3, ZeRO-3", "cheatsheet, ZeRO-3", "ours: gather, 2 bytes", "cheatsheet, ZeRO-2")
    title = f"communication / computation that hides it, {tokens:,} tokens per GPU; it hides up to 1"
    print_table(title, (*header, "ours: reduce-scatter, 4 bytes"), ratios)


def early_gathers(quick: bool) -> None:
    """PREDICTED: stage 1 that gathers a bucket as soon as it is updated, beside ours, which waits for the next step."""
    model, tokens, rows = PRESETS["llama3-8b"], 4096, []
    count = count_parameters(model)
    layer = count.attention + count.dense_mlp + 2 * model.hidden
    units = [count.embedding, *[layer] * model.layers, count.head + model.hidden]  # each is a bucket and a region
    sizes, order = [WIDTHS["bfloat16"][0] * unit for unit in units], [[index] for index in range(len(units))]
    forward = 2 * count.total * tokens / (H100_TFLOPS * 1e12)
    for gpus in (8, 64, 512):
        link = Link(0.0, 1e9 * BUS_GB_PER_S["all_gather"][gpus])
        update = count.total / gpus * UPDATE_BYTES / MEMORY_BANDWIDTH["H100"]
        ends = []
        for early in (False, True):
            player = Player(gpus, link)
            times = forward, 2 * forward
            cost.play_buckets(player, order[::-1], order, sizes, units, times, update, early)
            ends.append(player.now)
        gathers = sum(Player(gpus, link).message(size) for size in sizes)
        cells = (f"{1e3 * each:,.1f}" for each in (update, gathers, *ends, ends[0] - ends[1]))
        rows.append((gpus, *cells))
    title = f"llama3-8b, ZeRO-1, {tokens:,} tokens per GPU at 989 TFLOP/s, published bandwidths: ms"
    print_table(title, ("GPUs", "update", "gathers", "a step, ours", "gathers during the update", "saved"), rows)
