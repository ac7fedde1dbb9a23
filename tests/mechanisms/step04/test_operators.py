"""The operators and layers of tensor parallelism against dense mathematics: values and gradients."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.process_groups import Group
from step04_tensor_parallel import operators
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, apply_column_parallel
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy_sum
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import FORMS, tp_mesh

BATCH, PART, HIDDEN = 3, 2, 4  # PART tokens of each sequence on each rank


def random(seed: int, *shape: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mine(whole: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    return whole.chunk(group.size, axis)[group.rank]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative, and infinite for another shape or type."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    return ((ours - theirs).norm() / (theirs.norm() + 1e-300)).item()


# ---- f, f*, g, g* ----------------------------------------------------------------------------------------------------


def ranks_conjugates():
    """Of each operator: result and gradient against dense mathematics."""
    group, found = tp_mesh().tp, {}
    size, rank = group.size, group.rank
    parts = [random(seed, size, BATCH, PART, HIDDEN).unbind() for seed in (1, 2)]
    wholes = [random(seed, size, BATCH, PART * size, HIDDEN).unbind() for seed in (3, 4)]
    equal = [[random(seed, BATCH, PART * size, HIDDEN)] * size for seed in (5, 6)]
    begin, end = ("copy_to_ranks", "gather_sequence"), ("sum_over_ranks", "reduce_scatter_sequence")
    cases = {  # every rank's x and gradient of y; what this rank should get from them; the partner
        begin[0]: (equal[0], wholes[0], lambda x: x[rank], sum, end[0]),
        end[0]: (wholes[0], equal[1], sum, lambda y: y[rank], begin[0]),
        begin[1]: (parts[0], wholes[0], lambda x: torch.cat(x, 1), lambda y: mine(sum(y), group, 1), end[1]),
        end[1]: (wholes[1], parts[1], lambda x: mine(sum(x), group, 1), lambda y: torch.cat(y, 1), begin[1]),
    }
    for name, (xs, ys, forward, backward, partner) in cases.items():
        x, y = xs[rank].clone().requires_grad_(), ys[rank].clone()
        result = getattr(operators, name)(x, group)
        result.backward(y)
        found |= {
            (name, "forward"): distance(result.detach(), forward(xs)),
            (name, "backward"): distance(x.grad, backward(ys)),
            (name, "backward is the partner's forward"): distance(x.grad, getattr(operators, partner)(y, group)),
            (name, "its arguments are untouched"): distance(x.detach(), xs[rank]) + distance(y, ys[rank]),
        }
    return found


# ---- column- and row-parallel layers ---------------------------------------------------------------------------------


def ranks_mlp():
    """Two column-parallel layers of one input, a row-parallel one, and something nonlinear between and after: values
    and all gradients, in every form, for few and many tokens and inputs that are not contiguous."""
    group, found = tp_mesh().tp, {}
    width = 5 * group.size
    first, second, third = random(1, width, HIDDEN), random(2, width, HIDDEN), random(3, HIDDEN, width)
    for batch, part in ((1, 1), (1, 5), (BATCH, PART)):
        x, out = (random(seed, batch, part * group.size, HIDDEN) for seed in (4, 5))
        whole = [each.clone().requires_grad_() for each in (x, first, second, third)]
        y = F.linear(F.silu(F.linear(whole[0], whole[1])) * F.linear(whole[0], whole[2]), whole[3])
        (y.sin() * out).sum().backward()
        for form in FORMS:
            split = Split(group, *form)
            columns = [ColumnParallelLinear(nn.Parameter(mine(each, group, 0)), split) for each in (first, second)]
            row = RowParallelLinear(nn.Parameter(mine(third, group, 1)), split)

            def cut(tensor, split=split):
                return mine(tensor, group, 1) if split.sequence_parallel else tensor

            entering = cut(x).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
            gate, up = apply_column_parallel(entering, columns)
            result = row(F.silu(gate) * up)
            (result.sin() * cut(out)).sum().backward()
            found |= {
                (batch, part, form, "y"): distance(result.detach(), cut(y.detach())),
                (batch, part, form, "one layer"): distance(columns[0](entering).detach(), gate.detach()),
                (batch, part, form, "dx"): distance(entering.grad, cut(whole[0].grad)),
                (batch, part, form, "gate"): distance(columns[0].weight.grad, mine(whole[1].grad, group, 0)),
                (batch, part, form, "up"): distance(columns[1].weight.grad, mine(whole[2].grad, group, 0)),
                (batch, part, form, "down"): distance(row.weight.grad, mine(whole[3].grad, group, 1)),
            }
    return found


# ---- the vocabulary --------------------------------------------------------------------------------------------------

VOCABULARIES = (12, 10, 5, 2, 1)  # on 4 ranks: divisible, padded, one rank and three ranks of nothing but padding


def padded(whole: torch.Tensor, axis: int, group: Group, value: float) -> torch.Tensor:
    """This rank's part of a tensor with one row or column per token id; those that pad it are `value`."""
    shape = list(whole.shape)
    shape[axis] = -whole.shape[axis] % group.size
    return mine(torch.cat((whole, whole.new_full(shape, value)), axis), group, axis)


def ranks_embedding():
    """All ids, so those at the borders of the shards too: what is looked up, and gradients of the rows."""
    group, found = tp_mesh().tp, {}
    for vocab in VOCABULARIES:
        tokens = torch.cat((torch.arange(vocab), torch.arange(vocab).flip(0), torch.zeros(3, dtype=torch.int64)))
        tokens = tokens.view(1, -1)
        table, gradient = random(1, vocab, HIDDEN).requires_grad_(), random(2, 1, tokens.shape[1], HIDDEN)
        F.embedding(tokens, table).backward(gradient)
        weight = nn.Parameter(padded(table.detach(), 0, group, 1e6))
        result = VocabParallelEmbedding(weight, len(weight) * group.rank, Split(group, False, "plain"))(tokens)
        result.backward(gradient)
        found[vocab, "rows"] = distance(result.detach(), F.embedding(tokens, table.detach()))
        found[vocab, "gradient"] = (weight.grad - padded(table.grad, 0, group, 0.0)).abs().max().item()
    return found


LOGITS = {
    "ordinary": lambda logits: logits,
    "large": lambda logits: 1e4 * logits,  # exp() of it overflows
    "shifted up": lambda logits: logits + 1e4,
    "shifted down": lambda logits: logits - 1e4,
    "one stands out": lambda logits: torch.where(logits == logits.amax(-1, keepdim=True), logits + 1e4, logits),
}


def ranks_cross_entropy():
    """Against F.cross_entropy, with every id as a target and rubbish in the logits of the padding; as multiples of the
    tolerance, which in bfloat16 is half of the last bit of a probability."""
    group, found = tp_mesh().tp, {}
    for vocab in VOCABULARIES:
        targets = torch.arange(2 * vocab).view(2, -1) % vocab
        for (name, change), dtype in itertools.product(LOGITS.items(), (torch.float64, torch.bfloat16)):
            whole = change(random(1, *targets.shape, vocab)).to(dtype).requires_grad_()
            logits, wide = padded(whole.detach(), -1, group, 1e6).clone(), torch.promote_types(dtype, torch.float32)
            before = logits.clone()
            expected = F.cross_entropy(whole.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")
            total = vocab_parallel_cross_entropy_sum(logits.requires_grad_(), targets, vocab, group)
            (expected * 0.3).backward()
            (total * 0.3).backward()
            key, tolerance = (vocab, name, str(dtype)), 1e-12 if dtype == torch.float64 else 2.0**-9
            off = abs(total.item() - expected.item()) / max(1.0, abs(expected.item()))
            found[(*key, "loss")] = off / tolerance
            found[(*key, "gradient")] = (
                logits.grad - padded(whole.grad, -1, group, 0.0)
            ).abs().max().item() / tolerance
            found[(*key, "types")] = 0 if total.dtype == wide and logits.grad.dtype == dtype else float("inf")
            found[(*key, "logits are untouched")] = 0 if torch.equal(logits.detach(), before) else float("inf")
    return found


# ---- all of them in one world ----------------------------------------------------------------------------------------

LIMITS = {ranks_conjugates: 1e-15, ranks_mlp: 1e-13, ranks_embedding: 1e-15, ranks_cross_entropy: 1}


def ranks_all():
    return {function.__name__: function() for function in LIMITS}


observed = functools.cache(functools.partial(run_ranks, function=ranks_all))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("function", LIMITS)
def test_equals_dense_mathematics(world, function):
    for rank in observed(world):
        found = rank[function.__name__]
        assert found and not {key: value for key, value in found.items() if not value <= LIMITS[function]}
