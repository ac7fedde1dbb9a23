"""Bytes per parameter: the published recipes, and ours as tensors hold them after a step."""

from collections.abc import Callable

from common.drawing.charts import bars
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.measure.storages import live_bytes
from common.process_groups import Mesh
from step08_5d.experiments.tools import Training
from step08_5d.narrow_numbers.experiments.recipes import OURS, PUBLISHED
from step08_5d.narrow_numbers.experiments.training import SHAPE

FLAGS = {"ours, BF16": {}, "ours, --fp8": {"fp8": "tile"}}
FLAGS["ours, --fp8 --moments bfloat16"] = {"fp8": "tile", "moments": "bfloat16"}


def held(mesh: Mesh, done: Callable, flags: dict) -> dict[str, float]:
    """Bytes per parameter after a step, counted on the tensors' storages."""
    training = Training(mesh, **SHAPE | {"steps": 1, "zero": 2} | flags)
    count = sum(shard.numel() for shard in training.shards)
    gradients = training.gradients()
    sums = live_bytes(gradients)
    training.update(gradients)
    states = [training.optimizer.state_of(master) for master in training.optimizer.masters]
    found = {
        "weights": live_bytes(weight for _, weight in training.weights()),
        "masters": live_bytes(training.optimizer.masters),
        "sums": sums,
        "moments": live_bytes(state[key] for state in states for key in ("exp_avg", "exp_avg_sq")),
    }
    return {name: size / count for name, size in found.items()}


def memory(quick: bool) -> None:
    """Bytes per parameter of each recipe by component, and ours as measured."""
    rows, drawn = [], {}
    for name, each in (PUBLISHED | OURS).items():
        moments = " + ".join(f"{size:g}" for size in each.moments)
        parts = (each.weights, each.masters, each.gradients, each.sums)
        measured = ""
        if name in FLAGS:
            found = on_ranks(1, held, FLAGS[name])[0]
            measured = f"{sum(found.values()):.2f}"
        change = f"{each.total / PUBLISHED['BF16, sums in float32'].total - 1:+.0%}"
        rows.append((name, *(f"{part:g}" for part in parts), moments, f"{each.total:g}", change, measured))
        parts = {"parameters": each.weights, "master weights": each.masters}
        parts |= {"gradients": each.gradients + each.sums, "moments": sum(each.moments)}
        drawn[name] = [parts]
    header = ("", "weights", "masters", "gradients", "sums", "moments", "total", "of 20", "measured")
    print_table("Bytes per parameter", header, rows)
    figure, axis = new_figure(width=8, height=3.6)
    bars(axis, drawn, value="{:g}", horizontal=True)
    axis.set_xlabel("bytes per parameter")
    axis.legend(frameon=False, fontsize=8)
    save_figure(figure, "memory")
