"""What a rank holds when it has some of the experts: parameters, gradients, optimizer state, and activations."""

import statistics

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.measure.allocator import live_bytes
from common.measure.saved_tensors import SavedTensors
from common.presets import PRESETS
from common.process_groups import Mesh
from step07_expert_parallel.experiments import predictions
from step07_expert_parallel.experiments.ranks import BYTES, SHAPE, ExpertLayer, Run, routing

RANKS, DEGREES, STAGES = 4, (1, 2, 4), (0, 1, 2, 3)
# As in Mixtral, nearly all parameters are those of experts
MODEL = SHAPE | {"layers": 2, "hidden": 256, "expert_ffn": 512, "seq_len": 32, "micro_batch": 1}
KINDS = ("parameters", "gradients", "optimizer state")
MIB, GIB = 2**20, 2**30
Held = dict[str, tuple[float, float]]  # by kind: bytes of experts, and of all else


def memory(quick: bool) -> None:
    """Parameters, gradients and optimizer state of a rank with ep 1, 2 and 4 and every stage of ZeRO."""
    stages = (0, 3) if quick else STAGES
    keys = [(dtype, ep, zero) for dtype in list(BYTES)[: 1 if quick else None] for zero in stages for ep in DEGREES]
    cases = [MODEL | {"dtype": dtype, "ep": ep, "zero": zero} for dtype, ep, zero in keys]
    found = on_ranks(RANKS, on_every_case, bytes_held, cases, title="memory", jobs=len(cases))
    model, measured, rows = TrainConfig(**MODEL).model_config, {}, []
    for index, key in enumerate(keys):
        dtype, ep, zero = key
        of_ranks = [rank[index] for rank in found]
        measured[key] = {kind: tuple(map(statistics.mean, zip(*(each[kind] for each in of_ranks)))) for kind in KINDS}
        predicted = predictions.held(model, RANKS, ep, zero, dtype)
        cells = []
        for part in range(2):
            cells += compared(*(sum(held[kind][part] for kind in KINDS) for held in (predicted, measured[key])))
        cells += [f"{sum(map(sum, measured[key].values())) / MIB:.1f}"]
        rows.append((f"{dtype}, ZeRO {zero}, ep {ep}", *cells))
    experts, rest = predictions.split_parameters(model)
    header = ("", "experts: predicted", "measured", "ratio", "the rest: predicted", "measured", "ratio", "sum, MiB")
    title = f"{experts:,} parameters of experts, {rest:,} others, {RANKS} ranks (dp {RANKS}): bytes that a rank holds"
    print_table(title, header, rows)
    large_models()
    published()
    if not quick:
        draw_memory(measured)


def bytes_held(mesh: Mesh, flags: dict) -> Held:
    """On a rank: parameters and gradients when the backwards have ended, and optimizer state after the update."""
    run = Run(mesh, **flags)
    gradients = run.gradients()
    result = {"parameters": by_part(run.weights()), "gradients": by_part(zip(run.shards, gradients, strict=True))}
    run.update(gradients)
    return result | {"optimizer state": by_part(run.states())}


def by_part(tensors) -> tuple[int, int]:
    """Bytes of experts and of all else, in pairs (a tensor with the spec that says which, tensor to count)."""
    sorted_ = {True: [], False: []}
    for owner, tensor in tensors:
        sorted_[".experts." in owner.spec.name].append(tensor)
    return live_bytes(sorted_[True]), live_bytes(sorted_[False])


def large_models() -> None:
    """PREDICTED: Mixtral and DeepSeek-V3 on 64 ranks, with ZeRO 1 or 3."""
    rows = []
    for name in ("mixtral-8x7b", "deepseek-v3-like"):
        model = PRESETS[name]
        for ep in (each for each in (1, 8, 64) if model.experts % each == 0):
            cells = []
            for zero in (0, 1, 3):
                held = predictions.held(model, 64, ep, zero, "bfloat16")
                cells.append(" + ".join(f"{sum(held[kind]) / GIB:,.1f}" for kind in KINDS))
                cells.append(f"{sum(map(sum, held.values())) / GIB:,.0f}")
            rows.append((f"{name}, ep {ep}", *cells))
    header = ("", *(cell for zero in (0, 1, 3) for cell in (f"ZeRO {zero}", "sum")))
    print_table("predicted: GiB of parameters + gradients + optimizer on each of 64 ranks, bfloat16", header, rows)


def published() -> None:
    """The playbook's bar of EP 8 in its figure of an 8 B model, whose MLPs it divides by 8."""
    model = PRESETS["llama3-8b"]
    mlp, total = model.layers * count_parameters(model).dense_mlp, count_parameters(model).total
    rows = [
        ("one GPU", "14.96", f"{2 * total / GIB:.2f}"),
        ("EP 8", "5.77", f"{2 * (total - mlp + mlp / 8) / GIB:.2f}"),
    ]
    header = ("", "published, read off the figure", "(others + MLPs / EP) x 2 bytes")
    print_table("parameters of an 8 B model in bfloat16, GiB", header, rows)


def draw_memory(measured: dict[tuple, Held]) -> None:
    """Stacked bars of what was measured: below what ep does not divide, above the experts."""
    from matplotlib.patches import Patch

    figure, axis = new_figure(width=8.0, height=4.0)
    places, labels = [], []
    for zero in STAGES:
        for number, ep in enumerate(DEGREES):
            held, top = measured["float32", ep, zero], 0.0
            places.append(4 * zero + number)
            labels.append(f"ep {ep}")
            for part in (1, 0):
                for kind in KINDS:
                    size, look = held[kind][part] / MIB, {"hatch": "////"} if part else {}
                    axis.bar(places[-1], size, 0.9, top, color=COLOURS[kind], edgecolor="white", linewidth=0.6, **look)
                    top += size
            axis.text(places[-1], top + 1, f"{top:.0f}", ha="center", fontsize=9)
        axis.text(4 * zero + 1, -16, f"ZeRO {zero}", ha="center", fontsize=10, fontweight="bold")
    axis.set_xticks(places, labels, fontsize=9)
    axis.tick_params(axis="x", length=0)
    axis.grid(visible=False, axis="x")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set(ylabel="MiB on a rank", ylim=(0, 119))
    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in reversed(KINDS)]
    handles.append(Patch(facecolor="#AAAAAA", hatch="////", edgecolor="white", label="hatched: not of experts"))
    axis.legend(handles=handles, frameon=False, fontsize=9.5, loc="upper right")
    experts, rest = predictions.split_parameters(TrainConfig(**MODEL).model_config)
    title = f"measured: {RANKS} ranks, float32; experts have {experts / (experts + rest):.0%} of the parameters"
    axis.set_title(title, fontsize=10, loc="left")
    save_figure(figure, "memory")


# ---- activations -----------------------------------------------------------------------------------------------------


def activations(quick: bool) -> None:
    """Bytes that one layer of experts keeps for the backward: the same for any ep, if experts are equally busy."""
    rows, model = [], TrainConfig(**SHAPE).model_config
    for ranks in (1, 2) if quick else (1, 2, 4):
        keys = [(dtype, evenly) for dtype in BYTES for evenly in (True, False)]
        cases = [SHAPE | {"ep": ranks, "dtype": dtype, "evenly": evenly} for dtype, evenly in keys]
        found = on_ranks(ranks, on_every_case, kept_for_backward, cases, title="activations", jobs=len(cases))
        for index, (dtype, evenly) in enumerate(keys):
            of_ranks = [rank[index] for rank in found]
            name = f"ep {ranks}, {dtype}, chosen " + ("in turn" if evenly else "by the router")
            ends = (max(of_ranks),) if evenly else (min(of_ranks), max(of_ranks))
            for kept, received, tokens in ends:
                predicted = predictions.activations(model, tokens, received, BYTES[dtype], ranks)
                rows.append((name, f"{received:,}", *compared(predicted, kept)))
    header = ("", "rows of its experts", "predicted", "measured", "ratio")
    title = f"bytes that one layer of experts keeps, {SHAPE['micro_batch'] * SHAPE['seq_len']} tokens on a rank"
    print_table(f"{title}; least and fullest rank", header, rows)


def kept_for_backward(mesh: Mesh, flags: dict) -> tuple[int, int, int]:
    """On a rank: bytes that a forward leaves for the backward, rows that its experts have got, and its tokens."""
    flags, received = dict(flags), []
    evenly = flags.pop("evenly")
    layer = ExpertLayer(mesh, **flags)
    layer.layer.experts.register_forward_pre_hook(lambda module, inputs: received.append(len(inputs[0])))
    with routing(evenly), SavedTensors(layer.layer) as saved:
        layer.forward()
    return live_bytes([*saved.tensors, *order_of_rows(layer.y)]), received[0], layer.tokens


def order_of_rows(y: torch.Tensor) -> list[torch.Tensor]:
    """What the layer keeps beside autograd's own: which rows a token has, in the node that has added them up."""
    node = y.grad_fn
    while not hasattr(node, "choices"):
        node = node.next_functions[0][0]
    return [each for each in vars(node.choices).values() if isinstance(each, torch.Tensor)]
