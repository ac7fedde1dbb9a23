"""The operators of tensor parallelism against dense mathematics: values, gradients, and who holds what."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.model_config import ModelConfig
from common.process_groups import Group
from step04_tensor_parallel import operators, ring
from step04_tensor_parallel.tensor_parallel import Split
from step04_tensor_parallel.vocab_parallel import embed, vocab_parallel_cross_entropy_sum
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import FORMS, decoder, tp_mesh

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


def assert_all_below(limit: float, ranks: list[dict]) -> None:
    wrong = {(rank, key): value for rank, found in enumerate(ranks) for key, value in found.items() if value > limit}
    assert ranks[0] and not wrong


@pytest.fixture(params=[2, 3, 4])
def world(request):
    return request.param


# ---- f, f*, g, g* ----------------------------------------------------------------------------------------------------


def ranks_conjugates():
    """Of each operator: result and gradient against dense mathematics, and the two inner products of its adjoint."""
    group, distances, products = tp_mesh().tp, {}, {}
    size, rank = group.size, group.rank
    parts = [random(seed, size, BATCH, PART, HIDDEN).unbind() for seed in (1, 2)]
    wholes = [random(seed, size, BATCH, PART * size, HIDDEN).unbind() for seed in (3, 4)]
    equal = [[random(seed, BATCH, PART * size, HIDDEN)] * size for seed in (5, 6)]
    cases = {  # every rank's x and gradient of y; what this rank should get from them; the partner
        "f": (equal[0], wholes[0], lambda x: x[rank], sum, "f_star"),
        "f_star": (wholes[0], equal[1], sum, lambda y: y[rank], "f"),
        "g": (parts[0], wholes[0], lambda x: torch.cat(x, 1), lambda y: mine(sum(y), group, 1), "g_star"),
        "g_star": (wholes[1], parts[1], lambda x: mine(sum(x), group, 1), lambda y: torch.cat(y, 1), "g"),
    }
    for name, (xs, ys, forward, backward, partner) in cases.items():
        x, y = xs[rank].clone().requires_grad_(), ys[rank].clone()
        result = getattr(operators, name)(x, group)
        result.backward(y)
        distances |= {
            (name, "forward"): distance(result.detach(), forward(xs)),
            (name, "backward"): distance(x.grad, backward(ys)),
            (name, "backward is the partner's forward"): distance(x.grad, getattr(operators, partner)(y, group)),
            (name, "its arguments are untouched"): distance(x.detach(), xs[rank]) + distance(y, ys[rank]),
        }
        products[name] = (y * result.detach()).sum().item(), (x.grad * x.detach()).sum().item()
    return distances, products


def test_conjugate_operators(world):
    ranks = run_ranks(world, ranks_conjugates)
    assert_all_below(1e-15, [distances for distances, _ in ranks])
    # <y, A x> = <A' y, x>, summed over ranks; where x of f or y of f* is one vector with copies, it counts once
    for name, copies_of_y, copies_of_x in (("f", 1, world), ("f_star", world, 1), ("g", 1, 1), ("g_star", 1, 1)):
        left, right = (sum(each) for each in zip(*(products[name] for _, products in ranks)))
        assert left / copies_of_y == pytest.approx(right / copies_of_x, rel=1e-12), name


# ---- column- and row-parallel layers ---------------------------------------------------------------------------------


def linear(weight: torch.Tensor) -> nn.Linear:
    """Without bias; weight (out, in)."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def ranks_worked_example():
    """X (4 tokens, 2) times W, whose columns are (10, 20) and (30, 40)."""
    group = tp_mesh().tp
    x = torch.tensor([[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]])
    weight = torch.tensor([[10.0, 20.0], [30.0, 40.0]])  # as nn.Linear stores it: (out, in)
    found = {}
    for sequence_parallel, mode in FORMS:
        split = Split(group, sequence_parallel, mode)
        entering = mine(x, group, 1) if sequence_parallel else x
        (column,) = split.column(entering, [linear(mine(weight, group, 0))])
        row = split.row(linear(mine(weight, group, 1)).weight, mine(x, group, 2))
        found[sequence_parallel, mode] = column[0].tolist(), row[0].tolist()
    return found


def test_worked_example_of_the_playbook():
    y = [[20, 40], [80, 180], [140, 320], [200, 460]]
    for rank, found in enumerate(run_ranks(2, ranks_worked_example)):
        for (sequence_parallel, mode), (column, row) in found.items():
            case = rank, sequence_parallel, mode
            assert column == [[tokens[rank]] for tokens in y], case  # side by side they are Y
            assert row == (y[2 * rank : 2 * rank + 2] if sequence_parallel else y), case


def ranks_mlp():
    """A column-, then a row-parallel layer, and something nonlinear between and after: all gradients, in every form."""
    group, found = tp_mesh().tp, {}
    width = 5 * group.size
    first, second, third = random(1, width, HIDDEN), random(2, width, HIDDEN), random(3, HIDDEN, width)
    for batch in (1, BATCH):
        x, out = random(4, batch, PART * group.size, HIDDEN), random(5, batch, PART * group.size, HIDDEN)
        whole = [each.clone().requires_grad_() for each in (x, first, second, third)]
        y = F.linear(F.silu(F.linear(whole[0], whole[1])) * F.linear(whole[0], whole[2]), whole[3])
        (y.sin() * out).sum().backward()
        for form in FORMS:
            sequence_parallel, mode = form
            layers = [linear(mine(weight, group, 0)) for weight in (first, second)]
            row = linear(mine(third, group, 1))
            split = Split(group, sequence_parallel, mode)

            def part(tensor, cut=sequence_parallel):
                return mine(tensor, group, 1) if cut else tensor

            entering = part(x).clone().requires_grad_()
            gate, up = split.column(entering, layers)
            result = split.row(row.weight, F.silu(gate) * up)
            (result.sin() * part(out)).sum().backward()
            found |= {
                (batch, form, "y"): distance(result.detach(), part(y.detach())),
                (batch, form, "dx"): distance(entering.grad, part(whole[0].grad)),
                (batch, form, "gate"): distance(layers[0].weight.grad, mine(whole[1].grad, group, 0)),
                (batch, form, "up"): distance(layers[1].weight.grad, mine(whole[2].grad, group, 0)),
                (batch, form, "down"): distance(row.weight.grad, mine(whole[3].grad, group, 1)),
            }
    return found


def test_column_then_row_equals_dense_layers(world):
    assert_all_below(1e-13, run_ranks(world, ranks_mlp))


def ranks_ring():
    """The two rings against the same things in two steps."""
    group, found = tp_mesh().tp, {}
    for batch, part in ((1, 1), (1, 5), (BATCH, PART)):
        x = random(1, group.size, batch, part, HIDDEN)[group.rank]
        weights = [random(10 * group.rank + i, width, HIDDEN) for i, width in enumerate((6, 2, 1))]
        together = ring.gather_and_multiply(x, weights, group)
        for i, (weight, result) in enumerate(zip(weights, together, strict=True)):
            expected = F.linear(operators.gather_sequence(x, group), weight)
            found[batch, part, "gather", i] = distance(result, expected)
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)  # as a norm's output may come
        found[batch, part, "not contiguous"] = distance(
            ring.gather_and_multiply(strided, weights, group)[0], together[0]
        )
        x = random(2, group.size, batch, part * group.size, 5)[group.rank]
        weight = random(20 + group.rank, HIDDEN, 5)
        expected = operators.scatter_sequence(F.linear(x, weight), group)
        found[batch, part, "scatter"] = distance(ring.multiply_and_scatter(x, weight, group), expected)
    return found


def test_rings(world):
    assert_all_below(1e-14, run_ranks(world, ranks_ring))


# ---- the vocabulary --------------------------------------------------------------------------------------------------

VOCABULARIES = (12, 10, 5, 2, 1)  # on 4 ranks: divisible, padded, one rank and three ranks of nothing but padding


def rows_of(vocab: int, group: Group) -> tuple[int, int, int]:
    """[first, last) of this rank's rows, and the size of the padded vocabulary."""
    rows = -(-vocab // group.size)
    return rows * group.rank, rows * (group.rank + 1), rows * group.size


def padded(whole: torch.Tensor, axis: int, size: int, value: float) -> torch.Tensor:
    shape = list(whole.shape)
    shape[axis] = size - shape[axis]
    return torch.cat((whole, whole.new_full(shape, value)), axis)


def ranks_embedding():
    """All ids, so those at the borders of the shards too: summands and gradients of the rows."""
    group, found = tp_mesh().tp, {}
    for vocab in VOCABULARIES:
        tokens = torch.cat((torch.arange(vocab), torch.arange(vocab).flip(0), torch.zeros(3, dtype=torch.int64)))
        tokens = tokens.view(1, -1)
        table, gradient = random(1, vocab, HIDDEN).requires_grad_(), random(2, 1, tokens.shape[1], HIDDEN)
        F.embedding(tokens, table).backward(gradient)
        first, last, size = rows_of(vocab, group)
        embedding = nn.Embedding(1, 1)
        embedding.weight = nn.Parameter(padded(table.detach(), 0, size, 1e6)[first:last])
        result = operators.f_star(embed(embedding, tokens, first), group)
        result.backward(gradient)
        found[vocab, "rows"] = distance(result.detach(), F.embedding(tokens, table.detach()))
        expected = padded(table.grad, 0, size, 0.0)[first:last]
        found[vocab, "gradient"] = (embedding.weight.grad - expected).abs().max().item()
    return found


def test_vocab_parallel_embedding(world):
    assert_all_below(1e-15, run_ranks(world, ranks_embedding))


LOGITS = {
    "ordinary": lambda logits: logits,
    "large": lambda logits: 1e4 * logits,  # exp() of it overflows
    "shifted up": lambda logits: logits + 1e4,
    "shifted down": lambda logits: logits - 1e4,
    "one stands out": lambda logits: torch.where(logits == logits.amax(-1, keepdim=True), logits + 1e4, logits),
}


def ranks_cross_entropy():
    """Against F.cross_entropy, with every id as a target and rubbish in the logits of the padding."""
    group, found = tp_mesh().tp, {}
    for vocab in VOCABULARIES:
        targets = torch.arange(2 * vocab).view(2, -1) % vocab
        first, last, size = rows_of(vocab, group)
        for name, change in LOGITS.items():
            for dtype in (torch.float64, torch.bfloat16):
                whole = change(random(1, *targets.shape, vocab)).to(dtype).requires_grad_()
                logits = padded(whole.detach(), -1, size, 1e6)[..., first:last].clone().requires_grad_()
                wide = torch.promote_types(dtype, torch.float32)
                expected = F.cross_entropy(whole.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")
                total = vocab_parallel_cross_entropy_sum(logits, targets, vocab, group)
                before = logits.detach().clone()
                (expected * 0.3).backward()
                (total * 0.3).backward()
                gradient = padded(whole.grad, -1, size, 0.0)[..., first:last]
                key = vocab, name, str(dtype)
                found |= {
                    (*key, "loss"): abs(total.item() - expected.item()) / max(1.0, abs(expected.item())),
                    (*key, "gradient"): (logits.grad - gradient).abs().max().item(),
                    (*key, "types"): float(total.dtype != wide or logits.grad.dtype != dtype),
                    (*key, "logits are untouched"): float(not torch.equal(logits.detach(), before)),
                }
    return found


def test_vocab_parallel_cross_entropy(world):
    ranks = run_ranks(world, ranks_cross_entropy)
    for exact, limit in ((True, 1e-12), (False, 2.0**-9)):  # half of the last bit of a probability in bfloat16
        assert_all_below(limit, [{k: v for k, v in r.items() if ("torch.float64" in k) == exact} for r in ranks])


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that anything computes or allocates."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                Largest.elements = max(Largest.elements, each.numel())
        return result


def ranks_largest_tensor():
    """A model that is nearly all vocabulary: its largest tensors are logits."""
    mesh, found = tp_mesh(), {}
    model_config = ModelConfig(vocab=1003, hidden=8, layers=1, heads=4, kv_heads=4, ffn=8, tie_embeddings=False)
    tokens = torch.arange(48).view(2, 24) % 1003
    for form in FORMS:
        model = decoder(mesh, model_config, form)
        Largest.elements = 0
        with Largest():
            loss = vocab_parallel_cross_entropy_sum(model(tokens), tokens, 1003, mesh.tp)
            loss.backward()
        found[form] = Largest.elements
    return found


def check_largest_tensor(ranks: list[dict]) -> None:
    for rank in ranks:
        assert set(rank.values()) == {48 * -(-1003 // len(ranks))}, "a rank's columns of the logits"


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_ever_holds_full_logits(world):
    check_largest_tensor(run_ranks(world, ranks_largest_tensor))
