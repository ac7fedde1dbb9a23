"""How many messages, how many bytes, and whether the result is the same."""

from collections import Counter

from common.collectives import barrier, record
from common.config import TrainConfig
from common.drawing.tables import print_comparison, print_table
from common.experiments import tcp_bytes
from common.experiments.gradients import compare_gradients, worst_difference
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import overlay, reference_gradients
from common.experiments.training_step import on_every_case
from common.presets import PRESETS
from common.process_groups import Mesh
from step06_context_parallel.experiments import predictions
from step06_context_parallel.experiments.predictions import SPLITS
from step06_context_parallel.experiments.tools import MODES, SHAPE, AttentionLayer, Run
from step06_context_parallel.train import train

DTYPES = {"float32": 4, "bfloat16": 2}


def messages(quick: bool) -> None:
    """Messages and bytes of one attention layer: by formula, by the log of calls, by what the TCP sockets sent."""
    ways = [("ring", split) for split in SPLITS] + [("allgather", "zigzag"), ("ulysses", "zigzag")]
    sends, sizes, config = [], [], TrainConfig(**SHAPE)
    tokens, model = config.micro_batch * config.seq_len, config.model_config
    widths = model.heads * model.head_width, model.kv_heads * model.head_width
    for ranks in (2,) if quick else (2, 4):
        keys = [(dtype, *way) for dtype in DTYPES for way in ways]
        cases = [SHAPE | {"cp": ranks, "dtype": d, "cp_mode": mode, "cp_split": split} for d, mode, split in keys]
        found = on_ranks(ranks, on_every_case, count_calls, cases, title="messages", jobs=len(cases))
        for index, (dtype, mode, split) in enumerate(keys):
            counted = [part[index] for part in found]
            name = f"cp {ranks}, {mode}" + f", {split}" * (mode == "ring")
            if mode == "ring" and dtype == "bfloat16":
                for what, number in predictions.ring_sends(split, ranks).items():
                    sends.append((f"{name}: {what}", number, sum(each["sends"][what] for each in counted)))
            of_rank = predictions.layer_bytes(mode, split, ranks, tokens, *widths, DTYPES[dtype], 4)
            for phase, predicted in of_rank.items():
                log, sockets = (sum(each[kind][phase] for each in counted) / ranks for kind in ("log", "sockets"))
                cells = (f"{predicted:,.0f}", f"{log:,.0f}", f"{log / predicted:.4f}")
                cells += (f"{sockets:,.0f}", f"{sockets / predicted:.4f}")
                sizes.append((f"{name}, {dtype}: {phase}", *cells))
    print_comparison("tensors that all ranks together send in one layer", "", sends)
    header = ("", "predicted", "log of calls", "ratio", "TCP sockets", "ratio")
    title = f"bytes that a rank sends for one layer (mean over ranks): {tokens} tokens, h {widths[0]}, h_kv {widths[1]}"
    print_table(title, header, sizes)
    compare_modes()


def count_calls(mesh: Mesh, flags: dict) -> dict[str, Counter]:
    """On a rank: tensors that it sent in one layer, and bytes by phase: of the log, and of its sockets."""
    layer, result = AttentionLayer(mesh, **flags), {"sends": Counter(), "log": Counter(), "sockets": Counter()}
    for phase in ("forward", "backward"):
        barrier(mesh.world)
        before = tcp_bytes.sent_by_me() or 0
        barrier(mesh.world)  # every rank has read its counter before any rank sends
        with record() as calls:
            getattr(layer, phase)()
        barrier(mesh.world)  # what was issued has left
        result["sockets"][phase] = (tcp_bytes.sent_by_me() or 0) - before
        result["log"][phase] = sum(call.bytes for call in calls)
        for call in calls:
            if call.op == "send":  # sums of gradients are float32
                what = "K and V" if call.dtype == "bfloat16" else "dK and dV"
                result["sends"][f"{phase}, {what}"] += 1
    return result


def compare_modes() -> None:
    """PREDICTED: what a layer of a large model sends, by mode and number of ranks."""
    name, tokens, rows = "llama3-8b", 131072, []
    model = PRESETS[name]
    h, h_kv = model.heads * model.head_width, model.kv_heads * model.head_width
    for ranks in (2, 4, 8, 16, 32):
        cheatsheet = (ranks - 1) * tokens // ranks * 2 * h_kv  # elements, forward
        cells = [f"{cheatsheet / 1e6:.0f}"]
        for mode in MODES:
            repeated = max(1, ranks // model.kv_heads) if mode == "ulysses" else 1
            sizes = predictions.layer_bytes(mode, "zigzag", ranks, tokens, h, h_kv * repeated, 2, 4)
            cells += [f"{size / 1e6:.0f}" for size in sizes.values()]
        rows.append((f"cp {ranks}", *cells))
    header = ("", "cheatsheet, 10^6 elements", *(f"{mode}: {phase}" for mode in MODES for phase in ("fwd", "bwd")))
    print_table(f"predicted: MB that a rank sends for one layer of {name}, {tokens:,} tokens, bfloat16", header, rows)


# ---- the same result -------------------------------------------------------------------------------------------------

FLOAT64 = SHAPE | {"hidden": 64, "ffn": 96, "seq_len": 48, "global_batch": 4, "vocab": 387, "dtype": "float64"}


def gradients(quick: bool) -> None:
    """Gradients of every mode and split against one process that takes the whole global batch at once, in float64."""
    cases = [(2, name, {"cp": 2} | flags) for name, flags in MODES.items()]
    if not quick:
        for mode, flags in MODES.items():
            cases += [(4, f"{mode}, {split}", {"cp": 4, "cp_split": split} | flags) for split in SPLITS]
        cases.append((4, "ring, one K/V head", {"cp": 4, "kv_heads": 1}))
        cases.append((4, "ring, full recomputation", {"cp": 4, "recompute": "full"}))
        cases += [(4, f"dp 2 x cp 2, ZeRO {stage}", {"cp": 2, "zero": stage, "micro_batch": 1}) for stage in (1, 2, 3)]
        cases.append((4, "cp 2 x tp 2", {"cp": 2, "tp": 2}))
        cases.append((4, "cp 2 x pp 2", {"cp": 2, "pp": 2}))
    compare_gradients(
        on_every_case, gradient_difference, [(size, name, FLOAT64 | flags) for size, name, flags in cases]
    )


def gradient_difference(mesh: Mesh, flags: dict) -> float:
    """The largest relative difference between a gradient of this rank and its part of one process's gradient."""
    run = Run(mesh, **flags)
    return worst_difference(run.shards, run.gradients(), reference_gradients(run.config, run.batches))


def curves(quick: bool) -> None:
    """The default run with context parallelism beside step 1's: the same loss and gradient norm, up to rounding."""
    shorter = {"seq_len": 32} if quick else {}
    variants = {"one": (1, shorter), "ring cp 2": (2, shorter | {"cp": 2})}
    if not quick:
        variants |= {f"{mode} cp 2": (2, {"cp": 2} | MODES[mode]) for mode in ("allgather", "ulysses")}
        variants["ring cp 4"] = (4, {"cp": 4})
    overlay(train, variants, quick)
