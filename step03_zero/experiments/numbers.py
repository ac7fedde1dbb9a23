"""How many bytes a rank holds, how many it sends and in how many messages, and whether the result is the same."""

import functools
from collections.abc import Callable

from torch import nn

from common.config import TrainConfig
from common.costs.vocabulary import KINDS, WIDTHS, Message, added
from common.drawing.tables import print_table
from common.experiments import counting
from common.experiments.counting import counted, mean_rank, print_counted, print_held
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import BUCKET_MB, overlay, tensor_sizes
from common.experiments.training_step import on_every_case
from common.measure.storages import live_bytes
from common.model import Decoder
from common.process_groups import Mesh
from step02_data_parallel.data_parallel import pack
from step03_zero import cost
from step03_zero.by_layer import ZeroByLayer
from step03_zero.experiments.tools import SHAPE, STAGES, run_with, units_of
from step03_zero.train import train
from step03_zero.zero import Region

MIB = 2**20

# ---- held ------------------------------------------------------------------------------------------------------------


def memory(quick: bool) -> None:
    """Parameters, gradients and optimizer state per rank in each stage: predicted, and the storages that exist."""
    parameters = sum(units_of(SHAPE))
    for ranks in (2,) if quick else (2, 4):
        cases = {f"{dtype}, {stage}": (dtype, stage) for dtype in ("float32", "bfloat16") for stage in STAGES}
        flags = [SHAPE | {"global_batch": ranks, "dtype": dtype, "zero": stage} for dtype, stage in cases.values()]
        found = on_ranks(ranks, on_every_case, hold, flags, title="memory", jobs=len(flags))
        predicted = {name: cost.held(parameters, stage, ranks, WIDTHS[d]) for name, (d, stage) in cases.items()}
        means = {name: mean(rank[index] for rank in found) for index, name in enumerate(cases)}
        print_held(f"{ranks} ranks, {parameters:,} parameters, MiB", predicted, means, MIB, ",.3f")
    print("  Counted: the storages behind the tensors, each once, mean over ranks.")


def hold(mesh: Mesh, flags: dict) -> dict[str, float]:
    """On a rank: bytes by kind."""
    return counting.held(run_with(mesh, flags))


def mean(ranks) -> dict[str, float]:
    ranks = list(ranks)
    return {kind: sum(rank[kind] for rank in ranks) / len(ranks) for kind in KINDS}


# ---- sent ------------------------------------------------------------------------------------------------------------

SEVERAL = {  # name: flags, micro-batches
    "1, 4 micro-batches": ({"zero": 1}, 4),
    "2, 4 micro-batches": ({"zero": 2}, 4),
    "2, 4, --zero-reduce step": ({"zero": 2, "zero_reduce": "step"}, 4),
    "3, 4 micro-batches": ({"zero": 3}, 4),
    "3, 4, --zero-reduce step": ({"zero": 3, "zero_reduce": "step"}, 4),
    "3, tied": ({"zero": 3, "tie_embeddings": True}, 1),
}
SEVERAL |= {f"{stage}, bfloat16": ({"zero": stage, "dtype": "bfloat16"}, 1) for stage in (0, 1, 3)}
HYBRID = {f"{stage}, 2 replicas": ({"zero": stage, "zero_replicas": 2}, 1) for stage in (1, 3)}


def traffic(quick: bool) -> None:
    """Collectives and bytes of a step: by formula, by the log of calls, by what the TCP sockets sent."""
    for ranks in (2,) if quick else (2, 4):
        cases = {str(stage): ({"zero": stage}, 1) for stage in STAGES} | SEVERAL | (HYBRID if ranks == 4 else {})
        every = [SHAPE | flags | {"global_batch": ranks * m} for flags, m in cases.values()]
        found = on_ranks(ranks, on_every_case, send, every, title="traffic", jobs=len(every))
        means = {name: mean_rank(rank[index] for rank in found) for index, name in enumerate(cases)}
        predicted = {name: expected(flags, ranks, m) for name, (flags, m) in cases.items()}
        print_counted(f"{ranks} ranks, stage of ZeRO", predicted, means)
    print("  The log holds model bytes. Sockets: payload alone; the surplus is gloo's own.")


def expected(flags: dict, ranks: int, micro_batches: int) -> list[Message]:
    """What `cost.py` says of `SHAPE` with these flags."""
    stage, tied = flags["zero"], flags.get("tie_embeddings", False)
    sizes, _ = tensor_sizes()
    buckets = [sum(sizes[index] for index in each) // 4 for each in pack(sizes, BUCKET_MB * 1e6)]
    units = units_of(SHAPE | {"tie_embeddings": tied}) if stage == 3 else tuple(buckets[::-1])
    replicas = flags.get("zero_replicas", 1) if stage else ranks
    each_micro_batch, widths = flags.get("zero_reduce") != "step", WIDTHS[flags.get("dtype", "float32")]
    return cost.messages(units, stage, ranks // replicas, micro_batches, replicas, each_micro_batch, widths, tied)


def send(mesh: Mesh, flags: dict) -> counting.Counted:
    """On a rank: what it sends in a step."""
    run = run_with(mesh, flags)
    return counted(run.take, run.mesh)


# ---- how large is a unit ---------------------------------------------------------------------------------------------

UNITS = ("half a layer", "layer", "two layers", "whole model")


def unit_size(quick: bool) -> None:
    """Units of half a layer to the whole model: messages, bytes sent, and the most parameters in memory."""
    found, rows = on_ranks(2, count_units, SHAPE, title="unit_size", jobs=len(UNITS))[0], []
    whole = 4 * sum(units_of(SHAPE))
    for unit in UNITS:
        predicted, measured = predict_units(SHAPE, unit), found[unit]
        pairs = zip((1, 1, 1e6, MIB), predicted, measured)
        cells = (f"{one / scale:.4g} = {other / scale:.4g}" for scale, one, other in pairs)
        rows.append((unit, *cells, f"{measured[-1] / whole:.0%}"))
    header = ("unit", "all-gathers", "reduce-scatters", "MB sent", "MiB of parameters at the peak", "of the model")
    print_table("a step of stage 3 on 2 ranks, float32: predicted = measured", header, rows)


def cut(model: Decoder, unit: str) -> list[list[nn.Module]]:
    """The regions of the model if a unit is half a layer, a layer, two layers or the whole model."""
    layers = list(model.layers.values())
    if unit == "whole model":
        return [[model]]
    inner = {
        "half a layer": [
            half for layer in layers for half in ([layer.attention_norm, layer.attention], [layer.mlp_norm, layer.mlp])
        ],
        "layer": [[layer] for layer in layers],
        "two layers": [list(pair) for pair in zip(layers[::2], layers[1::2])],
    }[unit]
    return [[model.embedding], *inner, [model.norm, model.head]]


def predict_units(flags: dict, unit: str) -> tuple[float, ...]:
    """All-gathers, reduce-scatters, bytes that a rank sends, bytes of parameters at the peak, in float32."""
    regions = cut(Decoder(TrainConfig(**flags).model_config), unit)
    units = tuple(sum(each.numel() for each in region.parameters) for region in map(Region, regions))
    return *gathers_and_scatters(added(cost.messages(units, 3, 2))), cost.resident(units, 2, 4)


def gathers_and_scatters(sent: counting.Sent) -> tuple[float, ...]:
    """How many of each in the shard group, and the bytes of both."""
    (gathers, gathered), (scatters, scattered) = (sent["shard", op] for op in ("all_gather", "reduce_scatter"))
    return gathers, scatters, gathered + scattered


def count_units(mesh: Mesh, done: Callable, flags: dict) -> dict[str, tuple[float, ...]]:
    """On a rank: what `predict_units` predicts, in a step of a run, for each size of a unit."""
    result = {}
    for unit in UNITS:
        regions = functools.partial(cut, unit=unit)
        run = run_with(mesh, flags | {"zero": 3, "global_batch": mesh.world.size}, WatchedZero, regions)
        sent = counted(run.take, run.mesh).sent
        result[unit] = *gathers_and_scatters(sent), run.parts[1].most
        done()
    return result


class WatchedZero(ZeroByLayer):
    """Notes the most bytes of weights, whenever some have been gathered."""

    most = 0

    def _before_forward(self, *arguments) -> None:
        super()._before_forward(*arguments)
        self.note()

    def _before_backward(self, index: int) -> None:
        super()._before_backward(index)
        self.note()

    def note(self) -> None:
        self.most = max(self.most, live_bytes(each for unit in self.units for each in (unit.weights, unit.shard)))


def curves(quick: bool) -> None:
    """The default run in stages 1, 2, 3 beside step 1's: the same loss and gradient norm, up to rounding."""
    variants = {"step 1": (1, {}), **{f"stage {stage}": (2, {"zero": stage, "bucket_mb": 0.5}) for stage in (1, 2, 3)}}
    overlay(train, variants | {"stage 3, 4 ranks": (4, {"zero": 3, "micro_batch": 1})}, quick)
