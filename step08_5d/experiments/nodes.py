"""Where to place the dimensions: the same ranks in every order over two nodes that are joined by a slow cable."""

from functools import partial

from common.drawing.charts import bars, legend
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.experiments.on_nodes import Found, Workload, two_nodes
from common.process_groups import AXES, Degrees, Mesh
from step08_5d.experiments.tools import STEP, Training

DEGREES = Degrees(dp=2, pp=2, cp=2, tp=2)
# Few parameters beside the tokens of a step. Two query heads share a K/V head. Without ZeRO each rank has a copy
MODEL = STEP | {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 256, "data": "synthetic"}
MODEL |= {"seq_len": 256, "warmup": 1, **{axis: getattr(DEGREES, axis) for axis in AXES}}
BATCHES = {16: 2, 4: 1}  # sequences in a step: in a micro-batch


def nodes(quick: bool) -> None:
    """Two nodes of 8 ranks, a slow cable: tokens/s with dp, pp, cp or tp across, for a large and a small batch."""
    panels = {}
    for batch, micro_batch in list(BATCHES.items())[quick:]:
        cases = {}
        for across in AXES:  # over two nodes only the outermost axis matters
            order = [axis for axis in reversed(AXES) if axis != across] + [across]  # innermost first
            size = {"global_batch": batch, "micro_batch": micro_batch}
            cases[f"{across} outermost"] = size | {"order": ",".join(order)}
        tokens, micro_batches = batch * MODEL["seq_len"], batch // micro_batch // DEGREES.dp
        found = two_nodes(
            f"{tokens:,} tokens in a step",
            step,
            cases,
            partial(predict, micro_batches),
            "4mbit",
            ranks=DEGREES.world // 2,
            repeats=1 if quick else 3,
        )
        speeds = {name: (tokens / each.predicted, tokens / each.slow) for name, each in found.items()}
        panels[f"{tokens:,} tokens in a step"] = dict(sorted(speeds.items(), key=lambda item: -item[1][1]))
        for name, (_, measured) in speeds.items():
            print(f"  {name}: {measured:,.0f} tokens/s")
    if not quick and all(panels.values()):
        draw_placement(panels)


def step(mesh: Mesh, flags: dict) -> Workload:
    """On a rank: the gradients of a step."""
    training = Training(mesh, **MODEL | flags)
    return Workload(training.gradients, training.mesh)


def predict(micro_batches: int, flags: dict, found: Found) -> float:
    """Seconds of a step, from those without a limit and those that its bytes take on the cable.

    Collectives are waited for. In a pipeline of two stages the first gradient returns after the first activation has
    arrived: one message more than there are micro-batches. Meanwhile others compute, but for the first forward and the
    last backward.
    """
    on_cable = found.on_cable.total()
    if not flags["order"].endswith("pp"):
        return found.free + on_cable
    return max(found.free, (micro_batches + 1) / micro_batches * on_cable + found.free / micro_batches)


def draw_placement(panels: dict[str, dict[str, tuple[float, float]]]) -> None:
    """A panel for each batch: tokens/s by order, the fastest first."""
    figure, axes = new_figure(1, len(panels), width=11.0, height=3.0)
    for axis, (title, speeds) in zip(axes, panels.items()):
        groups = {name: [{"measured": measured}] for name, (_, measured) in speeds.items()}
        marks = {name: [predicted] for name, (predicted, _) in speeds.items()}
        bars(axis, groups, marks, {"measured": COLOURS["measured"]}, value="{:,.0f}", horizontal=True)
        axis.get_yticklabels()[list(speeds).index("dp outermost")].set_fontweight("bold")  # our order
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("tokens/s")
    legend(figure)
    save_figure(figure, "placement")
