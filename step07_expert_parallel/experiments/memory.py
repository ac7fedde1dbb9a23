"""What a rank holds when it has some of the experts: parameters, gradients and optimizer state."""

import statistics

from common.config import TrainConfig
from common.costs.vocabulary import KINDS
from common.drawing.charts import bars
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.counting import held, print_held
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.presets import PRESETS
from common.process_groups import Mesh
from step07_expert_parallel import cost
from step07_expert_parallel.experiments.layer import SHAPE, Training

RANKS, DEGREES, STAGES = 4, (1, 2, 4), (0, 1, 2, 3)
# As in Mixtral, nearly all parameters are those of experts
MODEL = SHAPE | {"layers": 2, "hidden": 256, "expert_ffn": 512, "seq_len": 32, "micro_batch": 1}
MIB, GIB = 2**20, 2**30


def memory(quick: bool) -> None:
    """Parameters, gradients and optimizer state of a rank with ep 1, 2 and 4 and every stage of ZeRO."""
    model = TrainConfig(**MODEL).model_config
    keys = [(zero, ep) for zero in ((0, 3) if quick else STAGES) for ep in DEGREES]
    cases = [MODEL | {"ep": ep, "zero": zero} for zero, ep in keys]
    ranks = on_ranks(RANKS, on_every_case, held_by_part, cases, title="memory", jobs=len(cases))
    measured = {
        name: {key: statistics.mean(each[key] for each in of_ranks) for key in of_ranks[0]}
        for name, of_ranks in zip(keys, zip(*ranks))
    }
    predicted = {f"ZeRO {zero}, ep {ep}": cost.held(model, RANKS, ep, zero, "float32") for zero, ep in keys}
    experts, rest = cost.split_parameters(model)
    title = f"{experts:,} parameters of experts, {rest:,} others, {RANKS} ranks, float32"
    print_held(title, predicted, dict(zip(predicted, measured.values())))
    large_models()
    draw_memory(measured, experts / (experts + rest))


def held_by_part(mesh: Mesh, flags: dict) -> dict[tuple[str, str], float]:
    """On a rank: bytes by kind, of experts and of all else."""
    return held(Training(mesh, **flags), lambda name: "experts" if ".experts." in name else "all else")


def large_models() -> None:
    """PREDICTED: Mixtral and DeepSeek-V3 on 64 ranks, with ZeRO 0, 1 or 3."""
    rows = []
    for name in ("mixtral-8x7b", "deepseek-v3-like"):
        model = PRESETS[name]
        for ep in (each for each in (1, 8, 64) if model.experts % each == 0):
            sums = [sum(cost.held(model, 64, ep, zero, "bfloat16").values()) for zero in (0, 1, 3)]
            rows.append((f"{name}, ep {ep}", *(f"{each / GIB:,.0f}" for each in sums)))
    title = "predicted: GiB of parameters, gradients and optimizer state on each of 64 ranks, bfloat16"
    print_table(title, ("", "ZeRO 0", "ZeRO 1", "ZeRO 3"), rows)


def growth(quick: bool) -> None:
    """PREDICTED: what grows with ep, what shrinks, and what is repeated if ep ranks read the same tokens."""
    rows, seq = [], 4096
    for name in ("mixtral-8x7b", "deepseek-v3-like"):
        model = PRESETS[name]
        for ep in (each for each in (1, 2, 4, 8, 64) if model.experts % each == 0):
            found = cost.grown(model, seq, ep)
            cells = (found.sequences, found.experts, f"{found.rows:,}", f"{found.states / GIB:,.0f}")
            repeated = cost.repeated_work(model, seq, ep)
            rows.append((f"{name}, ep {ep}", *cells, f"{found.sent / 1e6:,.0f}", f"{repeated:.2f}"))
    header = ("", "sequences a step", "experts", "rows", "GiB of states", "MB sent", "work without dp")
    print_table(f"predicted: micro-batches of {seq:,} tokens, bfloat16, a rank and a layer", header, rows)


def draw_memory(measured: dict[tuple[int, int], dict], share: float) -> None:
    """Stacked bars of what was measured, by (ZeRO, ep): below what ep does not divide, above the experts."""
    from matplotlib.patches import Patch

    figure, axis = new_figure(width=9.5, height=4.4)
    stages, degrees = (list(dict.fromkeys(each)) for each in zip(*measured))
    parts = {f"{kind} of {part}": (kind, part) for part in ("all else", "experts") for kind in KINDS}
    groups = {zero: [] for zero in stages}
    for (zero, _), sizes in measured.items():
        groups[zero].append({name: sizes[part] / MIB for name, part in parts.items()})
    bars(axis, groups, colours={name: COLOURS[kind] for name, (kind, _) in parts.items()}, value="{:.0f}")
    for index, container in enumerate(axis.containers):  # of a bar's six parts, the first three are not of experts
        for patch in container if index % len(parts) < len(KINDS) else ():
            patch.set_hatch("////")
    width, names = 0.8 / len(degrees), [f"ep {ep}" for ep in degrees] * len(stages)
    places = [place - 0.4 + (index + 0.5) * width for place in range(len(stages)) for index in range(len(degrees))]
    axis.set_xticks(places, names, fontsize=9)
    for place, zero in enumerate(stages):
        look = {"ha": "center", "va": "top", "fontweight": "bold", "xytext": (0, -26), "textcoords": "offset points"}
        axis.annotate(f"ZeRO {zero}", (place, 0), **look)
    axis.set(ylabel="MiB on a rank")
    axis.set_title(f"measured: {RANKS} ranks, float32; experts have {share:.0%} of the parameters", loc="left")
    named = [Patch(facecolor=COLOURS[kind], label=kind) for kind in reversed(KINDS)]
    named.append(Patch(facecolor=COLOURS["other"], edgecolor="white", hatch="////", label="hatched: not of experts"))
    axis.legend(handles=named, frameon=False)
    save_figure(figure, "memory")
