"""What a rank keeps: the activations of a block in every way."""

import torch

from common.config import TrainConfig
from common.drawing.charts import bars, legend, lines
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.measure.saved_tensors import SavedTensors
from common.presets import PRESETS
from common.process_groups import Mesh
from step04_tensor_parallel import cost
from step04_tensor_parallel.experiments import tools
from step04_tensor_parallel.experiments.tools import COLOURS, RECOMPUTED, SHAPE, WAYS, way_of

DTYPES = ("float32", "bfloat16")


def activations(quick: bool) -> None:
    """Bytes that one block keeps for the backward on a rank: exact formula, and the storages that autograd kept."""
    measured, sizes = {}, (1, 2) if quick else (1, 2, 4)
    for ranks in sizes:
        ways = {"one process": {"tp_mode": "plain", "sequence_parallel": False}} if ranks == 1 else WAYS | RECOMPUTED
        keys = [(dtype, ranks, name) for dtype in DTYPES for name in ways]
        shapes = [SHAPE | {"tp": ranks, "dtype": dtype} | ways[name] for dtype, _, name in keys]
        cases = [shape | {"layers": layers} for shape in shapes for layers in (1, 2)]
        found = on_ranks(ranks, on_every_case, kept_for_backward, cases, title="activations", jobs=len(cases))[0]
        for index, key in enumerate(keys):
            one, two = found[2 * index : 2 * index + 2]
            measured[key] = (predict(shapes[index]), two - one)  # one block more
    for dtype in DTYPES:
        rows = [(f"tp {ranks}, {name}", *both) for (kind, ranks, name), both in measured.items() if kind == dtype]
        print_comparison(f"{dtype}: bytes that one block keeps on a rank", "", rows)

    rows = []
    for t in (1, 2, 4, 8, 16):
        paper = [cost.gpt_block_activations(t, sequence_parallel) for sequence_parallel in (False, True)]
        rows.append((t, *(f"{each:.2f}" for each in paper), *(f"{each:.2f}" for each in llama_block(t))))
    header = ("tp", "GPT: 10 + 24/tp", "GPT + SP: 34/tp", "llama3-8b", "+ SP, plain", "+ SP, overlap")
    print_table("predicted: a block's activations in units of s b h bytes, without scores", header, rows)
    compare_70b()
    draw(measured, sizes)


def predict(flags: dict) -> int:
    """Bytes that `cost.py` says of one block."""
    config = TrainConfig(**SHAPE)
    shape = config.model_config, config.micro_batch, config.seq_len, getattr(torch, flags["dtype"])
    return sum(cost.block_activations(*shape, flags["tp"], way_of(flags)).values())


def kept_for_backward(mesh: Mesh, flags: dict) -> int:
    """Bytes that a forward leaves for the backward on this rank, each storage once, without the weights."""
    run = tools.training(mesh, flags)
    with SavedTensors(run.parts[0]) as saved:
        total = tools.loss(run, *tools.logits_and_targets(run))
    del total
    return saved.bytes


def llama_block(tp: int) -> list[float]:
    """Our formula for llama3-8b in units of s b h bytes: without SP, with SP plain, with SP overlap."""
    model, seq = PRESETS["llama3-8b"], 8192
    result = []
    for way in (cost.Way(False), cost.Way(True, "plain"), cost.Way()):
        kept = sum(cost.block_activations(model, 1, seq, torch.bfloat16, tp, way).values())
        result.append(kept / (seq * model.hidden))
    return result


# GiB of activations of 70 B parameters, one sequence of 4,096, by tp. Published: read off the playbook's figures
# "tp_memoryusage" and "tp_sp_memoryusage" (bfloat16, selective recomputation but for tp 1; the GPT formulas).
PUBLISHED_70B = {False: {1: 85.0, 8: 32.5, 16: 28.75}, True: {8: 10.6, 16: 5.3}}


def compare_70b() -> None:
    """PREDICTED: the activations of all 80 layers of a 70 B model, beside what the playbook's figures show."""
    model, seq, rows = PRESETS["llama3-70b"], 4096, []
    stream = seq * model.hidden * model.layers / 2**30
    for t in (1, 8, 16):
        for sequence_parallel in (False, True)[: 1 if t == 1 else 2]:
            way = cost.Way(sequence_parallel)
            ours = sum(cost.block_activations(model, 1, seq, torch.bfloat16, t, way).values())
            gpt = cost.gpt_block_activations(t, sequence_parallel) * stream
            shown = f"{PUBLISHED_70B[sequence_parallel][t]:g}"
            name = f"tp {t}{' + SP' if sequence_parallel else ''}"
            rows.append((name, shown, f"{gpt:.2f}", f"{ours * model.layers / 2**30:.2f}"))
    header = ("", "published", "GPT formula", "llama3-70b, ours")
    print_table(f"predicted: GiB of activations a rank, 80 layers, {seq:,} tokens, without scores", header, rows)


def draw(measured: dict, sizes: tuple[int, ...]) -> None:
    """Left what our block keeps, measured, with a mark where the formula ends; right Llama 3 8B, predicted."""
    figure, (left, right) = new_figure(columns=2, width=9.6, height=4.1)
    groups, marks = {}, {}
    names = dict(zip(COLOURS, ("no SP, plain", "SP, plain", "SP, overlap")))
    for ranks in sizes:
        for label, name in (names if ranks > 1 else {"one process": "one process"}).items():
            predicted, found = measured["bfloat16", ranks, name]
            groups.setdefault(f"tp {ranks}", []).append({label: found / 2**20})
            marks.setdefault(f"tp {ranks}", []).append(predicted / 2**20)
    bars(left, groups, marks, COLOURS | {"one process": "#999999"}, value="{:.2f}")
    left.set(ylabel="MiB per block and rank")
    left.set_title("measured: 256 tokens, our small block", fontsize=11.5, loc="left")

    degrees = (1, 2, 4, 8, 16)
    model, seq = PRESETS["llama3-8b"], 8192
    unit = seq * model.hidden * model.layers / 2**30  # of b s h in all layers, in GiB
    series = {name: {tp: unit * llama_block(tp)[index] for tp in degrees} for index, name in enumerate(COLOURS)}
    lines(right, series, colours=COLOURS, log="xy", ticks=list(degrees), ends=False)
    for line, name in zip(right.lines, series):
        line.set_marker("o")
        end = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        right.annotate(f"{series[name][16]:.1f}", (16, series[name][16]), color=COLOURS[name], **end)
    right.set(xlim=(0.9, 25), xlabel="tp", ylabel="GiB per rank, 32 blocks")
    right.set_yticks([2, 4, 8, 16, 32, 64], [2, 4, 8, 16, 32, 64])
    right.set_title("predicted: Llama 3 8B, 8,192 tokens", fontsize=11.5, loc="left")
    legend(figure, columns=5)
    save_figure(figure, "activations")
