"""Columns, then rows, or rows, then columns: what an MLP sends in either order, and what goes wrong without a sum."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from common import collectives
from common.costs.vocabulary import sent
from common.drawing.tables import print_comparison, print_table
from common.experiments.counting import counted
from common.experiments.local_ranks import on_ranks
from common.group import Group
from common.process_groups import Mesh
from step04_tensor_parallel.operators import copy_to_ranks, make_operator, sum_over_ranks

TOKENS, HIDDEN, FFN = 256, 128, 512


def predicted_bytes(tp: int, tokens: int, hidden: int, ffn: int, width: int = 4) -> dict[str, float]:
    """Return the bytes that a rank sends for an MLP of two matrices, forward and backward, in either order.

    Column then row: an all-reduce of the output, and of the input's gradient. Row then column: an all-reduce of the
    hidden numbers, which the activation function needs whole, and an all-gather of the output; in the backward the
    all-reduce of their gradient, and an all-gather of the input's.
    """
    narrow, broad = tokens * hidden * width, tokens * ffn * width
    return {
        "column then row": 2 * sent("all_reduce", narrow, tp),
        "row then column": 2 * (sent("all_reduce", broad, tp) + sent("all_gather", narrow, tp)),
    }


def orders(quick: bool) -> None:
    """An MLP cut in both orders: calls, bytes of the sockets, and the error if the sum in the middle is left out."""
    calls, rows = [], []
    for ranks in (2,) if quick else (2, 4):
        found, wrong = on_ranks(ranks, both_orders, title="orders")[0]
        for name, size in predicted_bytes(ranks, TOKENS, HIDDEN, FFN).items():
            rows.append((f"{ranks} ranks, {name}", size, found[name]["sockets"] or found[name]["bytes"]))
            words = ", ".join(f"{count} {op}" for op, count in sorted(found[name]["calls"].items()))
            calls.append((f"{ranks} ranks, {name}", words, f"{found[name]['difference']:.0e}"))
        print(f"  {ranks} ranks, row then column without the sum in the middle: off by {wrong:.0%} of its norm")
    header = ("", "calls of a forward and a backward", "difference from one process")
    print_table(f"an MLP of two matrices, {TOKENS} tokens, h {HIDDEN}, f {FFN}, float32", header, calls)
    print_comparison("bytes that a rank's sockets send", "", rows)


def both_orders(mesh: Mesh, done: Callable = lambda: None) -> tuple[dict[str, dict], float]:
    """On a rank: silu(x W1) W2, the matrices cut in either order, beside one process; and the error without a sum."""
    group, generator = mesh.world, torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    first = torch.randn(FFN, HIDDEN, generator=generator) / HIDDEN**0.5
    second = torch.randn(HIDDEN, FFN, generator=generator) / FFN**0.5

    def part(weight: torch.Tensor, axis: int) -> torch.Tensor:
        return weight.chunk(group.size, axis)[group.rank].clone().requires_grad_()

    def column_then_row(x):
        hidden = F.silu(F.linear(copy_to_ranks(x, group), part(first, 0)))
        return sum_over_ranks(F.linear(hidden, part(second, 1)), group)

    def row_then_column(x, middle=sum_over_ranks):
        hidden = F.silu(middle(F.linear(my_columns(x, group), part(first, 1)), group))
        return all_columns(F.linear(copy_to_ranks(hidden, group), part(second, 0)), group)

    def with_gradient(function) -> tuple[torch.Tensor, torch.Tensor]:
        given = x.clone().requires_grad_()
        y = function(given)
        y.square().sum().backward()
        return y.detach(), given.grad

    expected, found = with_gradient(lambda x: F.linear(F.silu(F.linear(x, first)), second)), {}
    for name, function in (("column then row", column_then_row), ("row then column", row_then_column)):
        values: list[torch.Tensor] = []
        count = counted(
            partial(lambda values, function: values.extend(with_gradient(function)), values, function), mesh
        )
        apart = max(((ours - whole).norm() / whole.norm()).item() for ours, whole in zip(values, expected))
        calls = {op: number for (_, op), (number, _) in count.sent.items()}
        found[name] = {"calls": calls, "bytes": count.bytes, "sockets": count.sockets, "difference": apart}
        done()
    wrong = row_then_column(x, middle=lambda summand, group: summand).detach()
    return found, ((wrong - expected[0]).norm() / expected[0].norm()).item()


def _gather_columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    parts = x.new_empty(group.size, *x.shape)
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(list(parts), -1)


def _keep_mine(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group.size, -1)[group.rank].clone()


my_columns = make_operator("MyColumns", _keep_mine, _gather_columns)  # (..., hidden) -> (..., hidden/tp)
all_columns = make_operator("AllColumns", _gather_columns, _keep_mine)  # (..., hidden/tp) -> (..., hidden)
