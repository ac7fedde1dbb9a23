"""Who talks to whom: the ranks of a run as a grid, the groups of one of them, and what order of the axes is best."""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from common import collectives
from common.drawing.figures import DIMENSION_OF, DIMENSIONS, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.even_routing import choosing
from common.experiments.local_ranks import on_ranks
from common.process_groups import AXES, GROUP_NAMES, Degrees, Mesh, all_groups, coordinates
from step07_expert_parallel.router import Router
from step08_5d.experiments.tools import DENSE, EXPERTS, FIVE_D, FOUR_D, Run

RANK = 5  # whose groups are shown
# Four query heads share a K/V head, as in Llama 3
LAYOUT = {"layers": 4, "kv_heads": 2, "dp": 2, "global_batch": 8, "zero": 1}
MODELS = {"dense": DENSE | FOUR_D | LAYOUT, "experts": EXPERTS | FIVE_D | LAYOUT}
DEGREES = Degrees(dp=2, pp=2, cp=2, tp=2, ep=4, experts=True)
NODE = 8
USES = {  # what a group is for
    "tp": "activations, in every layer",
    "cp": "keys and values",
    "pp": "activations to the next stage, gradients back",
    "dp": "gradients and weights, together with cp:\nranks {dp_cp}",
    "ep": "tokens to experts, and back",
    "edp": "gradients and weights of experts",
}


class Use(NamedTuple):
    """A collective or a message as one rank has issued it."""

    op: str
    group: str
    bytes: int
    peer: int | None


@functools.cache  # experiments that are run together share the run
def recorded(model: str) -> list[tuple[dict[str, tuple[int, ...]], list[Use]]]:
    """Of every rank of a run in all dimensions: its groups by name, and what it issued in a step."""
    return on_ranks(DEGREES.world, record_step, MODELS[model], title=f"a step, {model}")


def record_step(mesh: Mesh, done: Callable, flags: dict) -> tuple:
    """On a rank."""
    with choosing(Router):
        run = Run(mesh, **flags)
        with collectives.record() as calls:
            run.update(run.gradients())
    groups = {name: getattr(run.mesh, name).ranks for name in GROUP_NAMES}
    return groups, uses_of(calls)


def uses_of(calls: list[collectives.Call]) -> list[Use]:
    return [Use(call.op, call.group, call.bytes, call.peer) for call in calls]


def grid(quick: bool) -> None:
    """16 ranks on two nodes as a grid, the groups of one rank, and how often a step uses them."""
    groups, uses = recorded("experts")[RANK]
    computed = {name: next(each for each in of_all if RANK in each) for name, of_all in all_groups(DEGREES).items()}
    rows = []
    for name in dict.fromkeys(use.group for use in uses):
        mine = [use for use in uses if use.group == name]
        number = Counter(use.op.replace("_", "-") for use in mine)
        calls = ", ".join(f"{count} {op}" for op, count in number.items())
        ranks = "all" if name == "world" else ", ".join(map(str, groups[name]))
        rows.append((name, ranks, calls, f"{sum(use.bytes for use in mine):,}"))
        assert name not in AXES or groups[name] == computed[name]
    unused = [name for name in GROUP_NAMES if len(groups[name]) > 1 and name not in {row[0] for row in rows}]
    print_table(f"what rank {RANK} uses its groups for in a step", ("", "ranks", "calls", "bytes sent"), rows)
    print(f"  not used in this run: {', '.join(unused)}")
    draw_grid()


def draw_grid() -> None:
    """Two rows of nodes: above the ranks as attention sees them, below as the experts do. Beside them, the groups."""
    figure, (above, below) = new_figure(2, 1, width=10.5, height=6.0)
    groups = {name: next(each for each in every if RANK in each) for name, every in all_groups(DEGREES).items()}
    groups["pp"] = groups["pp_forward"]  # and pp_backward, the same ranks
    dense = {rank: axis for axis in AXES for rank in groups[axis] if rank != RANK}
    experts = dict.fromkeys(groups["ep"], "ep") | dict.fromkeys(groups["edp"], "dp")
    for axis, peers, names, title in (
        (above, dense, AXES, "16 ranks, each with its place (dp, pp, cp, tp)"),
        (below, experts, ("ep", "edp"), "the same ranks for experts: dp x cp x tp folded anew"),
    ):
        for rank in range(DEGREES.world):
            place = coordinates(rank, DEGREES)
            left = 4.4 * place["dp"] + 2 * place["cp"] + place["tp"]
            colour = DIMENSIONS[peers[rank]] if rank in peers and rank != RANK else "#F6F8FB"
            look = {"edgecolor": "#333333", "linewidth": 3.0 if rank == RANK else 0.8}
            axis.broken_barh([(left + 0.06, 0.88)], (place["pp"] + 0.06, 0.88), facecolor=colour, **look)
            ink = "white" if colour == DIMENSIONS["pp"] else "black"
            axis.text(left + 0.5, place["pp"] + 0.38, str(rank), ha="center", fontsize=13, fontweight="bold", color=ink)
            if names is AXES:
                words = ", ".join(str(place[each]) for each in AXES)
            else:
                (mine,) = (each for each in all_groups(DEGREES)["ep"] if rank in each)
                held = EXPERTS["experts"] // len(mine)
                words = "experts " + ", ".join(str(mine.index(rank) * held + each) for each in range(held))
            axis.text(left + 0.5, place["pp"] + 0.72, words, ha="center", fontsize=7.5, color=ink)
        for node in range(DEGREES.world // NODE):
            axis.broken_barh([(4.4 * node - 0.08, 4.16)], (-0.08, 2.16), facecolor="none", edgecolor="#999999")
            axis.text(4.4 * node + 2, -0.2, f"node {node}", ha="center", fontsize=10)
        for stage in range(DEGREES.pp):
            axis.text(-0.2, stage + 0.5, f"stage {stage}", rotation=90, ha="right", va="center", fontsize=9)
        for line, name in enumerate(names):
            top = 0.25 + 0.52 * line
            axis.broken_barh([(8.75, 0.22)], (top - 0.13, 0.26), facecolor=DIMENSIONS[DIMENSION_OF[name]])
            listed = {each: ", ".join(map(str, ranks)) for each, ranks in groups.items()}
            words = f"{name}: ranks {listed[name]}\n{USES[name].format(**listed)}"
            axis.text(9.1, top, words, va="center", fontsize=9, linespacing=1.25)
        axis.set(xlim=(-0.6, 12.9), ylim=(2.2, -0.45))
        axis.set_title(f"{title}; in color: the groups of rank {RANK}", loc="left", fontsize=11, fontweight="bold")
        axis.axis("off")
    save_figure(figure, "grid")


# ---- the order of the axes -------------------------------------------------------------------------------------------


def order(quick: bool) -> None:
    """Bytes that cross the borders of nodes in a step, for all 24 orders of the axes; the default is tp, cp, pp, dp."""
    for model in MODELS:
        rows, classes = [], {node: {} for node in (8, 4, 2)}
        for axes in itertools.permutations(AXES):
            turned, uses = replace(DEGREES, axes=axes), [uses for _, uses in recorded(model)]
            found = {node: crossing(uses, turned, node) for node in (8, 4, 2)}
            totals = {node: sum(each.values()) for node, each in found.items()}
            rows.append((totals, ", ".join(reversed(axes))))  # innermost first, as --order has it
            for node, inside in ((8, 3), (4, 2), (2, 1)):  # which axes are within a node is all that matters
                key = frozenset(axes[-inside:])
                assert classes[node].setdefault(key, found[node]) == found[node], (node, axes)
        rows.sort(key=lambda row: tuple(row[0].values()))
        cells = [(name, *(f"{total / 1e6:.2f}" for total in totals.values())) for totals, name in rows]
        header = ("order, innermost first", "nodes of 8 ranks", "of 4", "of 2")
        print_table(f"{model}: MB that cross the borders of nodes in a step, all ranks together", header, cells)
        if model == "experts" or quick:
            continue
        draw_order(classes)


def crossing(recorded: list[list[Use]], degrees: Degrees, node: int) -> dict[str, float]:
    """Bytes between nodes of this size by dimension, if ranks have the order of `degrees.axes`.

    Every rank sends what the rank at its place in the grid has sent in the recorded run, which had the default order.
    Messages have a sender and a receiver. All-to-alls send an equal part to each rank. The other collectives are rings
    in which ranks of one node are neighbors: each rank sends all that it sends to the next one.
    """

    def place(rank: int) -> int:
        position, result = coordinates(rank, replace(degrees, axes=AXES)), 0
        for axis in degrees.axes:
            result = result * getattr(degrees, axis) + position[axis]
        return result

    listed = all_groups(degrees).items()
    groups = {name: {rank: ranks for ranks in every for rank in ranks} for name, every in listed}
    result: dict[str, float] = defaultdict(float)
    for rank, uses in enumerate(recorded):
        mine = place(rank)
        for use in uses:
            if use.group == "world" or use.op == "receive":
                continue
            members = groups[use.group][mine]
            if use.op == "all_to_all":
                share = sum(each // node != mine // node for each in members) / (len(members) - 1)
            else:
                following = members[(members.index(mine) + 1) % len(members)]
                to = following if use.peer is None else place(use.peer)
                share = float(to // node != mine // node)
            result[DIMENSION_OF[use.group]] += share * use.bytes
    return result


def draw_order(classes: dict[int, dict[frozenset, dict[str, float]]]) -> None:
    """A panel for each size of nodes: what is sent between them, by the axes that are within one."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(1, len(classes), width=11.0, height=3.3)
    for axis, (node, found) in zip(axes, classes.items()):
        ordered = sorted(found.items(), key=lambda item: sum(item[1].values()))
        for place, (_, sizes) in enumerate(ordered):
            start = 0.0
            for name in DIMENSIONS:
                size = sizes.get(name, 0.0) / 1e6
                axis.barh(place, size, 0.7, start, color=DIMENSIONS[name], edgecolor="white", linewidth=0.5)
                start += size
            axis.text(start, place, f" {start:.1f}", va="center", fontsize=9)
        labels = [", ".join(each for each in reversed(AXES) if each in inside) for inside, _ in ordered]
        default = ", ".join(AXES[: -len(ordered[0][0]) - 1 : -1])
        label_bars(axis, labels, labels.index(default))
        axis.set_title(f"nodes of {node}, inside:", loc="left", fontsize=10)
        axis.set_xlabel("MB between nodes in a step, all ranks")
    handles = [Patch(facecolor=DIMENSIONS[name], label=f"for {name}") for name in AXES]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save_figure(figure, "order")


def label_bars(axis, labels: list[str], default: int) -> None:
    """Write a label beside each bar of a panel, the default in bold."""
    axis.set_yticks(range(len(labels)), labels, fontsize=9.5)
    axis.get_yticklabels()[default].set_fontweight("bold")
    axis.set(ylim=(len(labels) - 0.4, -0.6), xlim=(0, 1.15 * axis.dataLim.x1))
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.spines[["top", "right"]].set_visible(False)
