"""How many collectives, how many bytes, which shapes at every border, and whether the result is the same."""

from collections.abc import Callable

import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.drawing.tables import print_table
from common.experiments.counting import Counted, counted, mean_rank, print_counted
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import overlay
from common.experiments.training_step import on_every_case
from common.model import Decoder
from common.process_groups import Mesh
from step04_tensor_parallel import cost
from step04_tensor_parallel.experiments.tools import RECOMPUTED, SHAPE, WAYS, logits_and_targets, loss, training, way_of
from step04_tensor_parallel.train import train

SHARED = {"SP, overlap, 1 K/V head": WAYS["SP, overlap"] | {"kv_heads": 1}}


def traffic(quick: bool) -> None:
    """Collectives and bytes of a step of 2 blocks: by formula, by the log of calls, by what the TCP sockets sent."""
    ways = WAYS | RECOMPUTED | SHARED
    for ranks in (2,) if quick else (2, 4):
        cases = [SHAPE | {"tp": ranks} | flags for flags in ways.values()]
        found = on_ranks(ranks, on_every_case, send, cases, title="traffic", jobs=len(cases))
        means = {name: mean_rank(rank[index] for rank in found) for index, name in enumerate(ways)}
        predicted = {}
        for (name, flags), case in zip(ways.items(), cases):
            config = TrainConfig(**case)
            shape = config.model_config, config.micro_batch, config.seq_len
            predicted[name] = cost.messages(way_of(flags), ranks, *shape)
        print_counted(f"{ranks} ranks", predicted, means)


def send(mesh: Mesh, flags: dict) -> Counted:
    """On a rank: what it sends in a step."""
    run = training(mesh, flags)
    return counted(run.take, run.mesh)


def curves(quick: bool) -> None:
    """The default run with tensor parallelism beside step 1's: the same loss and gradient norm, up to rounding."""
    variants = {"one": (1, {}), "tp 2": (2, {"tp": 2}), "tp 4": (4, {"tp": 4}), "dp 2 tp 2": (4, {"tp": 2})}
    overlay(train, variants, quick)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def shapes(quick: bool) -> None:
    """Shapes at every border of a block, of the embedding, the head and the loss, read from a running model."""
    layouts, columns = {"tp 1": {"tp": 1}}, {}
    for tp in (2,) if quick else (2, 4):
        layouts |= {f"tp {tp}": {"tp": tp, "sequence_parallel": False}, f"tp {tp} + SP": {"tp": tp}}
    for name, flags in layouts.items():
        columns[name] = on_ranks(flags["tp"], on_every_case, read_shapes, [SHAPE | flags], title="shapes")[0][0]
    rows = [(where, *(column[where] for column in columns.values())) for where in columns["tp 1"]]
    title = "b {micro_batch}, s {seq_len}, h {hidden}, f {ffn}, {heads} heads, {kv_heads} K/V heads, v 384: rank 0"
    print_table(title.format(**SHAPE), ("", *columns), rows)


def read_shapes(mesh: Mesh, flags: dict) -> dict[str, str]:
    """On a rank: shapes that pass by while the loss is computed, by place in the order of the forward."""
    run = training(mesh, flags)
    seen: dict[str, str] = {}

    def note(where: str, *tensors: torch.Tensor) -> None:
        seen.setdefault(where, " ".join("(" + ", ".join(map(str, each.shape)) + ")" for each in tensors))

    def after(where: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda module, inputs, output: note(where, output))

    def before(where: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, inputs: note(where, inputs[0]))

    model: Decoder = run.parts[0]
    layer = model.layers["0"]
    core, projections = layer.attention.core, {}
    layer.attention.core = lambda q, k, v: (note("  core: q", q), note("  core: k, v", k), core(q, k, v))[-1]
    after("embedding, its output", model.embedding)
    before("block: residual stream", layer)
    after("  norm, its output", layer.attention_norm)
    after("  norm of the MLP", layer.mlp_norm)
    after("block: its output", layer)
    after("final norm", model.norm)
    after("head: logits", model.head)
    for module, enter, row in ((layer.attention, "q, k, v", "o"), (layer.mlp, "gate, up", "down")):
        watch_projection(module, note, f"  enter: {enter}")
        before(f"  TP region: input of {row}", getattr(module, f"{row}_proj"))
        after(f"  exit: output of {row}", getattr(module, f"{row}_proj"))
        projections |= {name: each for name, each in module.named_children() if name.endswith("_proj")}
    parameters = {name: each for name, each in projections.items() if name not in ("v_proj", "up_proj")}
    parameters["head"] = model.head
    with collectives.record() as calls:
        logits, targets = logits_and_targets(run)
        before_loss = len(calls)
        loss(run, logits, targets)
    messages = [f"{call.elements:,}" for call in calls[before_loss:]]
    seen["loss: numbers exchanged"] = " + ".join(messages) or "0"
    for name, module in parameters.items():
        note(f"weight of {name}", module.weight)
    return seen


def watch_projection(module: nn.Module, note: Callable, where: str) -> None:
    """Note the results of a `apply_linears`, several linear layers at once."""
    apply_linears = module.apply_linears

    def noted(x: torch.Tensor, linears: tuple) -> list[torch.Tensor]:
        results = apply_linears(x, linears)
        note(where, *results)
        return results

    module.apply_linears = noted
