"""What a rank keeps: activations of a block in every way, and the logits with what the loss makes of them."""

import torch

from common.config import TrainConfig
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.measure.saved_tensors import SavedTensors
from common.presets import PRESETS
from step04_tensor_parallel.experiments import predictions
from step04_tensor_parallel.experiments.predictions import Way
from step04_tensor_parallel.experiments.tools import COLOURS, RECOMPUTED, SHAPE, WAYS, Run, on_every_case, way_of

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
    parts = predictions.block_activations(*of_model("bfloat16"), 4, Way())
    print("  bfloat16, tp 4, SP, overlap, by part: " + ", ".join(f"{name} {size:,}" for name, size in parts.items()))

    rows = []
    for t in (1, 2, 4, 8, 16):
        paper = [predictions.gpt_block_activations(t, sequence_parallel) for sequence_parallel in (False, True)]
        rows.append((t, *(f"{each:.2f}" for each in paper), *(f"{each:.2f}" for each in llama_block(t))))
    header = ("tp", "GPT: 10 + 24/tp", "GPT + SP: 34/tp", "llama3-8b", "+ SP, plain", "+ SP, overlap")
    print_table(
        "predicted: a block's activations in units of s b h bytes, half precision, without scores", header, rows
    )
    compare_70b()
    draw(measured, sizes)


def of_model(dtype: str) -> tuple:
    """`SHAPE` as predictions want it."""
    config = TrainConfig(**SHAPE)
    return config.model_config, config.micro_batch, config.seq_len, getattr(torch, dtype)


def predict(flags: dict) -> int:
    return sum(predictions.block_activations(*of_model(flags["dtype"]), flags["tp"], way_of(flags)).values())


def kept_for_backward(run: Run) -> int:
    """Bytes that a forward leaves for the backward on this rank, each storage once, without the weights."""
    run.zero.gather()
    with SavedTensors(run.model) as saved:
        loss = run.loss(*run.logits_and_targets())
    del loss
    return saved.bytes


def llama_block(tp: int) -> list[float]:
    """Our formula for llama3-8b in units of s b h bytes: without SP, with SP plain, with SP overlap."""
    model, seq = PRESETS["llama3-8b"], 8192
    result = []
    for way in (Way(False), Way(True, "plain"), Way()):
        kept = sum(predictions.block_activations(model, 1, seq, torch.bfloat16, tp, way).values())
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
            way = Way(sequence_parallel)
            ours = sum(predictions.block_activations(model, 1, seq, torch.bfloat16, t, way).values())
            gpt = predictions.gpt_block_activations(t, sequence_parallel) * stream
            shown = f"{PUBLISHED_70B[sequence_parallel][t]:g}"
            name = f"tp {t}{' + SP' if sequence_parallel else ''}"
            rows.append((name, shown, f"{gpt:.2f}", f"{ours * model.layers / 2**30:.2f}"))
    header = ("", "published", "GPT formula", "llama3-70b, ours")
    print_table(f"predicted: GiB of activations a rank, 80 layers, {seq:,} tokens, without scores", header, rows)


def draw(measured: dict, sizes: tuple[int, ...]) -> None:
    """Left what our block keeps, measured, with a mark where the formula ends; right Llama 3 8B, predicted."""
    figure, (left, right) = new_figure(columns=2, width=9.6, height=4.1)
    names = {"no SP": "no SP, plain", "SP, plain": "SP, plain", "SP, overlap": "SP, overlap"}
    for place, ranks in enumerate(sizes):
        for number, (label, name) in enumerate(names.items()):
            key = ("bfloat16", ranks, "one process" if ranks == 1 else name)
            if ranks == 1 and number:
                continue
            x = place + (0 if ranks == 1 else (number - 1) * 0.29)
            predicted, found = measured[key]
            left.bar(x, found / 2**20, width=0.27, color="#999999" if ranks == 1 else COLOURS[label])
            left.plot([x - 0.14, x + 0.14], [predicted / 2**20] * 2, color="black", linewidth=1.6)
            left.text(x, found / 2**20 + 0.04, f"{found / 2**20:.2f}", ha="center", fontsize=9.5)
    left.set_xticks(range(len(sizes)), [f"tp {ranks}" for ranks in sizes], fontsize=11)
    left.set(ylabel="MiB per block and rank", ylim=(0, 1.12 * measured["bfloat16", 1, "one process"][1] / 2**20))
    left.set_title("measured: 256 tokens, our small block", fontsize=11.5, loc="left")
    left.grid(visible=False, axis="x")

    degrees = (1, 2, 4, 8, 16)
    model, seq = PRESETS["llama3-8b"], 8192
    unit = seq * model.hidden * model.layers / 2**30  # of b s h in all layers, in GiB
    titles = ("tensor parallelism alone", "with SP, gathered inputs kept (plain)", "with SP, gathered again (default)")
    for index, (label, title) in enumerate(zip(COLOURS, titles, strict=True)):
        values = [unit * llama_block(degree)[index] for degree in degrees]
        right.plot(degrees, values, color=COLOURS[label], marker="o", linewidth=2, label=title)
        right.text(17.5, values[-1], f"{values[-1]:.1f}", va="center", fontsize=10.5, color=COLOURS[label])
    right.set(xscale="log", yscale="log", xlabel="tp", ylabel="GiB per rank, 32 blocks", xlim=(0.9, 26))
    right.minorticks_off()
    right.set_xticks(degrees, degrees)
    right.set_yticks([2, 4, 8, 16, 32, 64], [2, 4, 8, 16, 32, 64])
    right.set_title("predicted: Llama 3 8B, 8,192 tokens", fontsize=11.5, loc="left")
    right.legend(frameon=False, fontsize=10, loc="lower left")
    save_figure(figure, "activations")


# ---- logits ----------------------------------------------------------------------------------------------------------


def logits(quick: bool) -> None:
    """Logits, and what the loss keeps of them: 1/t on a rank; and how much it would be with a large vocabulary."""
    rows, tokens = [], SHAPE["micro_batch"] * SHAPE["seq_len"]
    for ranks in (1, 2) if quick else (1, 2, 4):
        cases = [(dtype, vocab) for vocab in (384, 387) for dtype in DTYPES]
        flags = [SHAPE | {"tp": ranks, "dtype": dtype, "vocab": vocab} for dtype, vocab in cases]
        found = on_ranks(ranks, on_every_case, logit_bytes, flags, title="logits", jobs=len(cases))[0]
        for (dtype, vocab), (made, kept) in zip(cases, found):
            name, width = f"tp {ranks}, {dtype}, vocabulary {vocab}", getattr(torch, dtype).itemsize
            rows.append((f"{name}: logits", tokens * -(-vocab // ranks) * width, made))
            rows.append((f"{name}: kept by the loss", predictions.loss_bytes(tokens, vocab, ranks), kept))
    print_comparison(f"bytes on a rank, {tokens} tokens", "", rows)

    model, tokens, rows = PRESETS["llama3-8b"], 8192, []
    for t in (1, 2, 4, 8):
        made, kept = tokens * model.vocab * 2 / t, predictions.loss_bytes(tokens, model.vocab, t)
        exchanged = predictions.sent("all_reduce", 3 * tokens * 4, t)
        gathered = predictions.sent("all_gather", tokens * model.vocab * 2, t)
        rows.append((t, f"{made / 1e9:.3f}", f"{kept / 1e9:.3f}", f"{exchanged / 1e6:.3f}", f"{gathered / 1e6:,.0f}"))
    header = ("tp", "logits, GB", "kept by the loss, GB", "sent by the loss, MB", "sent to gather all logits, MB")
    print_table(f"predicted: {tokens:,} tokens, vocabulary {model.vocab:,}, bfloat16, a rank", header, rows)


def logit_bytes(run: Run) -> tuple[int, int]:
    """Bytes of this rank's logits, and of what the loss keeps."""
    run.zero.gather()
    made, targets = run.logits_and_targets()
    with SavedTensors(run.model) as saved:
        loss = run.loss(made, targets)
    del loss
    return made.nbytes, saved.bytes
