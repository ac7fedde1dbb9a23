"""The worked example, the wrong order of columns and rows, and the shapes in a running model."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives
from common.drawing.tables import print_comparison, print_table
from common.experiments import tcp_bytes
from common.experiments.local_ranks import on_ranks
from common.model import Decoder
from common.process_groups import Group, Mesh
from step04_tensor_parallel.experiments import predictions
from step04_tensor_parallel.experiments.tools import SHAPE, Run, on_every_case
from step04_tensor_parallel.operators import Split, copy_to_ranks, make_operator, sum_over_ranks
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear

# ---- columns and rows ------------------------------------------------------------------------------------------------

X = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])
W = torch.tensor([[10.0, 30.0], [20.0, 40.0]])  # columns (10, 20) and (30, 40)
MLP = {"tokens": 256, "hidden": 128, "ffn": 512}


def worked(quick: bool) -> None:
    """X W by columns and by rows on 2 ranks, number by number; and an MLP cut in the wrong order."""
    print("\n" + "\n".join(on_ranks(2, multiply_by_parts, title="worked")[0]))
    rows, counts = [], []
    for ranks in (2,) if quick else (2, 4):
        found = on_ranks(ranks, both_orders, title="worked")[0]
        expected = predictions.row_then_column_bytes(ranks, MLP["tokens"], MLP["hidden"], MLP["ffn"])
        for order, result in found.items():
            rows.append((f"{ranks} ranks, {order}", expected[order], result["sockets"]))
            if ranks == 2:
                for phase in ("forward", "backward"):
                    calls = ", ".join(f"{count} {op}" for op, count in result[phase].items())
                    counts.append((order, phase, calls, f"{result['difference']:.0e}"))
    shape = "{tokens} tokens, h {hidden}, f {ffn}".format(**MLP)
    header = ("order", "phase", "collectives", "difference from one process")
    print_table(f"an MLP of two matrices, {shape}, 2 ranks", header, counts)
    print_comparison("bytes that a rank's sockets send, forward and backward", "", rows)
    wrong = found["row then column"]["without the middle sum"]
    print(f"  row then column without the sum in the middle: output off by {wrong:.0%} of its norm, {ranks} ranks")


def multiply_by_parts(mesh: Mesh, done: Callable) -> list[str]:
    """On a rank: what it holds of X, W and Y at each moment, all ranks side by side."""
    group, lines = mesh.world, []
    split = Split(group, sequence_parallel=False, mode="plain")
    mine = slice(group.rank, group.rank + 1)

    def show(title: str, tensor: torch.Tensor) -> None:
        everybody = torch.empty(group.size, *tensor.shape)
        collectives.all_gather(everybody, tensor.contiguous(), group)
        shown = ["  ".join(str([int(x) for x in line]).ljust(12) for line in rows) for rows in zip(*everybody)]
        lines.extend([f"  {title:34}{shown[0]}", *(" " * 36 + line for line in shown[1:])])

    lines.append(f"Y = X W on {group.size} ranks{'':17}rank 0        rank 1")
    lines.append("by columns: every rank has all of X and a column of W")
    show("my column of W", W[:, mine])
    y = ColumnParallelLinear(nn.Parameter(W[:, mine].t()), split)(X[None]).detach()
    show("X times it: a column of Y", y[0])
    everybody = torch.empty(group.size, *y.shape)
    collectives.all_gather(everybody, y, group)
    show("all-gather: Y", torch.cat(list(everybody), -1)[0])
    lines.append("by rows: every rank has a column of X and a row of W")
    show("my column of X", X[:, mine])
    show("my row of W", W[mine])
    show("their product: a summand of Y", X[:, mine] @ W[mine])
    y = RowParallelLinear(nn.Parameter(W[mine].t()), split)(X[None, :, mine]).detach()
    show("all-reduce: Y", y[0])
    assert torch.equal(y[0], X @ W)
    return lines


def both_orders(mesh: Mesh, done: Callable) -> dict[str, dict]:
    """On a rank: silu(x W1) W2 with the matrices cut in either order; collectives, bytes, distance from one process."""
    group, generator = mesh.world, torch.Generator().manual_seed(0)
    tokens, hidden, ffn = MLP.values()
    x = torch.randn(1, tokens, hidden, generator=generator)
    first = torch.randn(ffn, hidden, generator=generator) / hidden**0.5
    second = torch.randn(hidden, ffn, generator=generator) / ffn**0.5

    def part(weight: torch.Tensor, axis: int) -> torch.Tensor:
        return weight.chunk(group.size, axis)[group.rank].clone().requires_grad_()

    def column_then_row(x):
        hidden = F.silu(F.linear(copy_to_ranks(x, group), part(first, 0)))
        return sum_over_ranks(F.linear(hidden, part(second, 1)), group)

    def row_then_column(x, middle=sum_over_ranks):
        summed = middle(F.linear(_my_columns(x, group), part(first, 1)), group)
        return _all_columns(F.linear(copy_to_ranks(F.silu(summed), group), part(second, 0)), group)

    def gradient_of(function) -> tuple[torch.Tensor, torch.Tensor]:
        given = x.clone().requires_grad_()
        collectives.phase = "forward"
        y = function(given)
        collectives.phase = "backward"
        y.square().sum().backward()
        return y.detach(), given.grad

    y, dx = gradient_of(lambda x: F.linear(F.silu(F.linear(x, first)), second))
    result = {}
    for name, function in (("column then row", column_then_row), ("row then column", row_then_column)):
        collectives.barrier(mesh.world)
        before = tcp_bytes.sent_by_me() or 0
        collectives.barrier(mesh.world)  # every rank has read its counter before any rank sends
        with collectives.record() as calls:
            values = gradient_of(function)
        pairs = zip(values, (y, dx))
        result[name] = {
            phase: Counter(call.op for call in calls if call.phase == phase) for phase in ("forward", "backward")
        }
        result[name]["sockets"] = (tcp_bytes.sent_by_me() or 0) - before
        result[name]["difference"] = max(((ours - whole).norm() / whole.norm()).item() for ours, whole in pairs)
    wrong = row_then_column(x, lambda summand, group: summand)
    result["row then column"]["without the middle sum"] = ((wrong - y).norm() / y.norm()).item()
    return result


def _gather_columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    parts = x.new_empty(group.size, *x.shape)
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(list(parts), -1)


def _keep_mine(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group.size, -1)[group.rank].clone()


_my_columns = make_operator("MyColumns", _keep_mine, _gather_columns)  # (..., hidden) -> (..., hidden/tp)
_all_columns = make_operator("AllColumns", _gather_columns, _keep_mine)  # (..., hidden/tp) -> (..., hidden)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def shapes(quick: bool) -> None:
    """Shapes at every border of a block, of the embedding, the head and the loss, read from a running model."""
    layouts, degrees = [("tp 1", 1, {})], (1, 2) if quick else (1, 2, 4)
    for ranks in degrees[1:]:
        layouts += [(f"tp {ranks}", ranks, {"sequence_parallel": False}), (f"tp {ranks} + SP", ranks, {})]
    columns = {}
    for ranks in degrees:
        cases = [SHAPE | {"tp": ranks} | flags for _, size, flags in layouts if size == ranks]
        found = on_ranks(ranks, on_every_case, read_shapes, cases, title="shapes", jobs=len(cases))[0]
        columns |= dict(zip([name for name, size, _ in layouts if size == ranks], found))
    rows = [(where, *(column[where] for column in columns.values())) for where in columns["tp 1"]]
    title = "b {micro_batch}, s {seq_len}, h {hidden}, f {ffn}, {heads} heads, {kv_heads} K/V heads, v 384: rank 0"
    print_table(title.format(**SHAPE), ("", *columns), rows)


def read_shapes(run: Run) -> dict[str, str]:
    """Shapes that pass by while `run` computes its loss, by place in the order of the forward."""
    seen: dict[str, str] = {}

    def note(where: str, *tensors: torch.Tensor) -> None:
        seen.setdefault(where, " ".join("(" + ", ".join(map(str, each.shape)) + ")" for each in tensors))

    def after(where: str, module: torch.nn.Module) -> None:
        module.register_forward_hook(lambda module, inputs, output: note(where, output))

    def before(where: str, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, inputs: note(where, inputs[0]))

    model: Decoder = run.model
    layer = model.layers["0"]
    after("embedding, its output", model.embedding)
    before("block: residual stream", layer)
    after("  norm, its output", layer.attention_norm)
    watch_projection(layer.attention, note, "  enter: q, k, v")
    core = layer.attention.core
    layer.attention.core = lambda q, k, v: (note("  core: q", q), note("  core: k, v", k), core(q, k, v))[-1]
    before("  TP region: input of o", layer.attention.o_proj)
    after("  exit: output of o", layer.attention.o_proj)
    after("  norm of the MLP", layer.mlp_norm)
    watch_projection(layer.mlp, note, "  enter: gate, up")
    before("  TP region: input of down", layer.mlp.down_proj)
    after("  exit: output of down", layer.mlp.down_proj)
    after("block: its output", layer)
    after("final norm", model.norm)
    after("head: logits", model.head)
    parameters = {"q_proj": layer.attention.q_proj, "k_proj": layer.attention.k_proj, "o_proj": layer.attention.o_proj}
    parameters |= {"gate_proj": layer.mlp.gate_proj, "down_proj": layer.mlp.down_proj, "head": model.head}
    with collectives.record() as calls:
        logits, targets = run.logits_and_targets()
        before_loss = len(calls)
        run.loss(logits, targets)
    messages = [f"{call.elements:,}" for call in calls[before_loss:]]
    seen["loss: numbers exchanged"] = " + ".join(messages) or "0"
    for name, module in parameters.items():
        note(f"weight of {name}", module.weight)
    return seen


def watch_projection(module: torch.nn.Module, note: Callable, where: str) -> None:
    """Note the results of a `apply_linears`, several linear layers at once."""
    apply_linears = module.apply_linears

    def noted(x: torch.Tensor, linears: tuple) -> list[torch.Tensor]:
        results = apply_linears(x, linears)
        note(where, *results)
        return results

    module.apply_linears = noted
