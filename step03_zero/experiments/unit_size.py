"""How large should a unit of stage 3 be? Messages, bytes and memory with units from half a layer to the whole model."""

from collections import Counter
from collections.abc import Callable
from unittest import mock

from common import collectives
from common.config import TrainConfig
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.model import Decoder
from common.process_groups import Mesh
from step03_zero.experiments import predictions
from step03_zero.experiments.residency import watched_units
from step03_zero.experiments.tools import MIB, SHAPE, Run
from step03_zero.zero import Region, Zero

RANKS = 2


def halves(layer) -> list[Region]:
    return [Region(layer.attention_norm, layer.attention), Region(layer.mlp_norm, layer.mlp)]


def cut(model: Decoder, unit: str) -> list[Region]:
    """The regions of the model if a unit is half a layer, a layer, two layers or the whole model."""
    layers = list(model.layers.values())
    if unit == "whole model":
        return [Region(model, model)]
    inner = {
        "half a layer": [half for layer in layers for half in halves(layer)],
        "layer": [Region(layer, layer) for layer in layers],
        "two layers": [Region(*pair) for pair in zip(layers[::2], layers[1::2])],
    }[unit]
    return [Region(model.embedding, model.embedding), *inner, Region(model.norm, model.head)]


UNITS = ("half a layer", "layer", "two layers", "whole model")


def unit_size(quick: bool) -> None:
    """Units of half a layer to the whole model: messages, bytes sent, and the most parameters in memory."""
    found, rows = on_ranks(RANKS, count, SHAPE, title="unit_size", jobs=len(UNITS))[0], []
    for unit in UNITS:
        predicted, measured = predict(SHAPE, unit), found[unit]
        pairs = zip((1, 1, 1e6, MIB), predicted, measured)
        cells = (f"{one / scale:.4g} = {other / scale:.4g}" for scale, one, other in pairs)
        rows.append((unit, *cells, f"{measured[-1] / (4 * sum_of(SHAPE)):.0%}"))
    header = ("unit", "all-gathers", "reduce-scatters", "MB sent", "MiB of parameters at the peak", "of the model")
    print_table(f"a step of stage 3 on {RANKS} ranks, float32: predicted = measured", header, rows)


def sum_of(flags: dict) -> int:
    return sum(parameter.numel() for parameter in Decoder(TrainConfig(**flags).model_config).parameters())


def predict(flags: dict, unit: str) -> tuple[float, ...]:
    """All-gathers, reduce-scatters, bytes that a rank sends, bytes of parameters at the peak, in float32."""
    regions = cut(Decoder(TrainConfig(**flags).model_config), unit)
    model = predictions.Model(tuple(sum(each.numel() for each in region.parameters) for region in regions))
    sent, _ = predictions.sent(model, 3, RANKS)
    return predictions.all_gathers(model), len(model.units), sent, predictions.resident(model, RANKS, 4)


def count(mesh: Mesh, done: Callable, flags: dict) -> dict[str, tuple[int, ...]]:
    """On a rank: what `predict` predicts, in the second step of a run, for each size of a unit."""
    result = {}
    for unit in UNITS:
        with mock.patch.object(Zero, "_regions", staticmethod(lambda model, unit=unit: cut(model, unit))):
            run = Run(mesh, **flags | {"zero": 3, "global_batch": mesh.world.size})
        run.step(0)
        held = []
        with (
            watched_units(lambda run=run, held=held: held.append(run.parameter_bytes())),
            collectives.record() as calls,
        ):
            run.step(1)
        ops = Counter(call.op for call in calls)
        sent = sum(call.bytes for call in calls if call.op != "all_reduce")
        result[unit] = (ops["all_gather"], ops["reduce_scatter"], sent, max(held))
        done()
    return result
