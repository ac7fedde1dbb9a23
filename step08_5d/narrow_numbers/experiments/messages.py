"""Bytes that ZeRO-3 sends in a step, with weights in BF16 and in FP8."""

from collections.abc import Callable

from common import collectives
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step08_5d.experiments.tools import Training
from step08_5d.narrow_numbers.experiments.training import SHAPE

LAYERS = 2
FLAGS = SHAPE | {"layers": LAYERS, "hidden": 512, "ffn": 1024, "micro_batch": 2, "zero": 3, "steps": 1, "fp8": "tile"}


def sent(mesh: Mesh, done: Callable, gather: bool) -> list[tuple[str, int]]:
    """Of a rank's collectives over the shards: what each is, and its model bytes."""
    training = Training(mesh, **FLAGS | {"fp8_gather": gather})
    with collectives.record() as calls:
        training.take()
    return [(call.op, call.bytes) for call in calls if call.group == "shard"]


def messages(quick: bool) -> None:
    """What 2 ranks send in a step of one micro-batch, counted: gathers, maxima, gradients."""
    found = [on_ranks(2, sent, gather)[0] for gather in (False, True)]
    rows = []
    for name, op in (("gathers", "all_gather"), ("maxima", "all_reduce"), ("gradients", "reduce_scatter")):
        sizes = [[size for each, size in calls if each == op] for calls in found]
        rows.append((name, *(f"{sum(each) / 1e3:,.1f}" for each in sizes)))
        if op == "all_gather":  # the layers' gathers are the largest ones, in the forward and in the backward
            largest = [sum(sorted(each)[-2 * LAYERS :]) for each in sizes]
            rows.append(("  those of layers", *(f"{each / 1e3:,.1f}" for each in largest)))
    print_table("ZeRO-3 with 2 layers", ("kB that a rank sends in a step", "BF16", "--fp8-gather"), rows)
    print(f"  (gathers of layers: {largest[1] / largest[0]:.2%} of the bytes)")
