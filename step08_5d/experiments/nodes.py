"""Where to place the dimensions: the same ranks in every order over two nodes that are joined by a slow cable."""

from dataclasses import replace

from common import collectives
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table
from common.errors import UsageError
from common.experiments.on_nodes import HEADER, compared_cells, limited, on_nodes, seconds_on, timed
from common.process_groups import AXES, Degrees, Mesh
from step08_5d.experiments.grid import NODE, crossing, label_bars, uses_of
from step08_5d.experiments.tools import STEP, Run

CABLE = "4mbit"
DEGREES = Degrees(dp=2, pp=2, cp=2, tp=2, zero_replicas=4)  # without ZeRO each of the dp x cp ranks has a copy
# Few parameters beside the tokens of a step. Two query heads share a K/V head
MODEL = STEP | {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 256, "data": "synthetic"}
MODEL |= {"seq_len": 256, "warmup": 1, **{axis: getattr(DEGREES, axis) for axis in AXES}}
BATCHES = {16: 2, 4: 1}  # sequences in a step: in a micro-batch
REPEATS = 3
# Over two nodes only the outermost axis matters (experiment `order`). The others stay as they are by default
ORDERS = {across: (across, *(axis for axis in AXES if axis != across)) for across in AXES}


def nodes(quick: bool) -> None:
    """Two nodes of 8 ranks, a slow cable: tokens/s with dp, pp, cp or tp across, for a large and a small batch."""
    batches = list(BATCHES)[quick:]
    orders = {across: ",".join(reversed(axes)) for across, axes in ORDERS.items()}  # innermost first, as --order has it
    cases = {
        (batch, across): {"global_batch": batch, "micro_batch": BATCHES[batch], "order": order}
        for batch in batches
        for across, order in orders.items()
    }
    try:
        of_ranks = on_nodes(DEGREES.world // NODE, NODE, steps, list(cases.values()))
    except UsageError as error:
        print(f"  left out: {error}")
        return
    measured = [dict(zip(cases, found)) for found in of_ranks]
    speeds = {}
    for batch in batches:
        rows, tokens = [], batch * MODEL["seq_len"]
        for across, axes in ORDERS.items():
            uses = [found[batch, AXES[0]]["uses"] for found in measured]  # of all ranks, in the default order
            free, slow = (measured[0][batch, across][name] for name in ("free", "slow"))
            sent = sum(crossing(uses, replace(DEGREES, axes=axes), NODE).values()) / 2  # in each direction
            on_cable = seconds_on(CABLE, sent)
            seconds = predict(across, batch // BATCHES[batch] // DEGREES.dp, free["seconds"], on_cable)
            speeds[batch, across] = tokens / seconds, tokens / slow["seconds"]
            cells = compared_cells(sent, seconds, CABLE, free, slow)
            rows.append((slow["seconds"], orders[across], *cells, f"{tokens / slow['seconds']:,.0f}"))
        title = f"{tokens:,} tokens in a step, nodes of {NODE} ranks, a cable of {CABLE}: sent by a node, and the time"
        header = ("order, innermost first", *HEADER[1:], "tokens/s")
        print_table(title, header, [row[1:] for row in sorted(rows)])
    if not quick:
        draw_placement(speeds, orders)


def predict(across: str, micro_batches: int, without: float, on_cable: float) -> float:
    """Predicted seconds of a step, from those without a limit and those that its bytes take on the cable.

    Collectives are waited for. In a pipeline of two stages the first gradient returns after the first activation has
    arrived: one message more than there are micro-batches. Meanwhile others compute, but for the first forward and the
    last backward.
    """
    if across != "pp":
        return without + on_cable
    return max(without, (micro_batches + 1) / micro_batches * on_cable + without / micro_batches)


def steps(mesh: Mesh, cases: list[dict]) -> list[dict]:
    """On a rank: for each case what `timed` says of a step's gradients, and what the rank issues for them."""
    found = []
    for flags in cases:
        run = Run(mesh, **MODEL | flags)
        with collectives.record() as calls:
            run.gradients()
        (free,) = timed(mesh, [run.gradients], REPEATS)
        short = flags["order"].endswith(("dp", "pp"))  # with tp across a step takes half a minute
        with limited(mesh, CABLE):
            (slow,) = timed(mesh, [run.gradients], REPEATS if short else 1)
        found.append({"free": free, "slow": slow, "uses": uses_of(calls)})
    return found


def draw_placement(speeds: dict[tuple[int, str], tuple[float, float]], orders: dict[str, str]) -> None:
    """A panel for each batch: tokens/s by order, the fastest first."""
    figure, axes = new_figure(1, len(BATCHES), width=11.0, height=3.0)
    for axis, batch in zip(axes, BATCHES):
        ordered = sorted(orders, key=lambda across: -speeds[batch, across][1])
        for index, (name, shift) in enumerate((("predicted", -0.2), ("measured", 0.2))):
            places = [place + shift for place in range(len(ordered))]
            values = [speeds[batch, across][index] for across in ordered]
            axis.barh(places, values, 0.36, color=COLOURS[name], label=name)
            for place, value in zip(places, values):
                axis.text(value, place, f" {value:,.0f}", va="center", fontsize=8.5)
        names = [f"{across} outermost" for across in ordered]
        label_bars(axis, names, ordered.index(AXES[0]))
        axis.set_title(f"{batch * MODEL['seq_len']:,} tokens in a step", loc="left", fontsize=10)
        axis.set_xlabel("tokens/s")
    axes[-1].legend(fontsize=9, frameon=False, loc="lower right")
    save_figure(figure, "placement")
