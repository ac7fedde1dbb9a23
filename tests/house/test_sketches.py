"""Every sketch arrives on several ranks where it arrives on one, and where autograd arrives."""

import ast
import importlib
import itertools
import re

import pytest
import torch

from tests.harness.observing import place
from tests.harness.ranks import ROOT, RankFailure, run_ranks, run_script

FOLDERS = sorted(path.parent.name for path in ROOT.glob("step*/sketch.py"))
SKETCHES = {int(folder[4:6]): importlib.import_module(f"{folder}.sketch") for folder in FOLDERS}
RANKS = [(step, ranks) for step in range(2, 9) for ranks in (2, 4)] + [(8, 8), (8, 16)]
# Each dimension of sketch 8 alone: dp, pp, cp, tp and ep, on two ranks
DIVISIONS = [(2, 1, 1, 1, 2), (1, 2, 1, 1, 1), (1, 1, 2, 1, 2), (1, 1, 1, 2, 1)]
FEW = 4, True  # micro-batches of sketch 1, which has one rank only, and recomputation
MARKED = re.compile(r"^( *)# --- write this yourself ---\n(.*?)^\1# --- until here ---\n", re.MULTILINE | re.DOTALL)


def train(*steps: int) -> dict[int, tuple]:
    """Losses and weights of sketches on this rank."""
    return {step: SKETCHES[step].train(*(FEW if step == 1 else place()), torch.float64)[:2] for step in steps}


def divide() -> list[tuple]:
    """Losses and weights of sketch 8 on this rank, in each of DIVISIONS."""
    results = []
    for degrees in DIVISIONS:
        SKETCHES[8].DEGREES[2] = degrees
        results.append(train(8)[8])
    return results


def begin(*steps: int) -> dict[int, tuple]:
    """The weights that sketches begin with on one rank, and the samples and targets, which they draw last."""
    randn, drawn, found = torch.randn, [], {}
    torch.randn = lambda *size, **options: drawn.append(randn(*size, **options)) or drawn[-1].clone()
    for step in steps:
        SKETCHES[step].STEPS = 0
        weights = SKETCHES[step].train(*(FEW if step == 1 else place()), torch.float64)[1]  # before the first step
        given = [torch.tensor(SKETCHES[4].X).double(), torch.tensor(SKETCHES[4].TARGET).double()]
        found[step] = joined(step, [weights]), *(given if step == 4 else drawn[-1])
    return found


@pytest.fixture(scope="module")
def worlds():
    """What every rank returns, by number of ranks: one world for all sketches."""
    steps = {1: range(1, 9), 2: range(2, 9), 4: range(2, 9), 8: [8], 16: [8]}
    return {ranks: run_ranks(ranks, train, *steps[ranks]) for ranks in steps}


# How a sketch divides each of its weights: along an axis, or not at all, and every rank has a copy
DIVIDED = {2: [None] * 9, 3: [0] * 9, 4: [None, 1, 0], 6: [None] * 9, 7: [None, None, 0, 0]}


def whole(pieces: list[torch.Tensor], axis: int | None) -> torch.Tensor:
    """A weight, of which every rank has a piece or a copy."""
    assert axis is not None or all(torch.equal(piece, pieces[0]) for piece in pieces), "a copy of a weight drifts"
    return pieces[0] if axis is None else torch.cat(pieces, dim=axis)


def joined(step: int, parts: list, degrees: tuple | None = None) -> list[torch.Tensor]:
    """The whole weights, of which every rank returned a part or a copy."""
    if step in (1, 5):  # layers or stages
        return [weight for part in parts for layer in part for weight in (layer if step == 1 else [layer])]
    if step < 8:
        return [whole(list(pieces), axis) for pieces, axis in zip(zip(*parts), DIVIDED[step])]
    dp, pp, cp, tp, ep = degrees or SKETCHES[8].DEGREES[len(parts)]
    stages = [[] for _ in range(pp)]  # the ranks of each stage, in ascending order
    for rank, part in enumerate(parts):
        stages[rank // (cp * tp) % pp].append(part)
    return [torch.cat(layers) for layers in zip(*(_stage(part, tp, ep) for part in stages))]


def _stage(parts: list, tp: int, ep: int) -> list[torch.Tensor]:
    """The weights of a stage in sketch 8: heads are divided by each row of tp, experts by each row of ep."""
    qkv, out, router, up, down = (list(pieces) for pieces in zip(*parts))

    def rows(pieces: list[torch.Tensor], size: int, axis: int) -> torch.Tensor:
        return whole([torch.cat(pieces[i : i + size], dim=axis) for i in range(0, len(pieces), size)], None)

    return [rows(qkv, tp, 2), rows(out, tp, 1), whole(router, None), rows(up, ep, 1), rows(down, ep, 1)]


def agree(losses: list[float], weights: list[torch.Tensor], others: list[float], other_weights: list[torch.Tensor]):
    assert losses == pytest.approx(others, rel=1e-12, abs=0)
    assert all(after < before for before, after in itertools.pairwise(losses)), "a loss that rises looks like a bug"
    assert len(weights) == len(other_weights)
    for weight, other in zip(weights, other_weights):
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step, ranks", RANKS)
def test_several_ranks_do_what_one_does(worlds, step, ranks):
    results = [rank[step] for rank in worlds[ranks]]
    assert all(losses == results[0][0] for losses, _ in results), "ranks disagree about the loss"
    losses, weights = worlds[1][0][step]
    agree(results[0][0], joined(step, [part for _, part in results]), losses, joined(step, [weights]))


def test_each_dimension_of_sketch_8_does_what_one_rank_does(worlds):
    losses, weights = worlds[1][0][8]
    for degrees, results in zip(DIVISIONS, zip(*run_ranks(2, divide))):
        assert results[0][0] == results[1][0], "ranks disagree about the loss"
        agree(results[0][0], joined(8, [part for _, part in results], degrees), losses, joined(8, [weights]))


def two_matrices(weights, x):
    for up, down in zip(weights[::2], weights[1::2]):
        x = x + torch.relu(x @ up) @ down
    return x


def chain(weights, x):
    for weight in weights:
        x = torch.relu(x @ weight)
    return x


def tensor_parallel(weights, x):
    scale, w1, w2 = weights
    return torch.relu(x * scale @ w1) @ w2


def attention(weights, x):
    q, k, v = (x @ weight[None] for weight in weights)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def through_experts(x, router, ups, downs):
    """Every token through all experts, most of them with a gate of 0."""
    best, chosen = (x @ router).topk(2)
    gates = x.new_zeros(len(x), len(ups)).scatter(1, chosen, best.softmax(-1))
    return x + torch.einsum("te,etw->tw", gates, torch.relu(x @ ups) @ downs)


def mixture(weights, x):
    first, router, ups, downs = weights
    return through_experts(x @ first, router, ups, downs)


def five_dimensions(weights, sequences):
    return torch.stack([transformer(weights, x) for x in sequences])


def transformer(weights, x):
    """Layers of causal attention and of experts, of one sequence."""
    for qkv, out, *experts in zip(*weights):
        q, k, v = torch.einsum("tw,nhwd->nhtd", x, qkv)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = through_experts(x + torch.einsum("htd,hdw->tw", heads, out), *experts)
    return x


MODELS = {
    1: two_matrices,
    2: chain,
    3: chain,
    4: tensor_parallel,
    5: chain,
    6: attention,
    7: mixture,
    8: five_dimensions,
}


def descend(model, weights, samples, targets, steps: int, learning_rate: float):
    """Losses and final weights with gradients from autograd, on one process."""
    weights = [weight.detach().clone().requires_grad_() for weight in weights]
    losses = []
    for _ in range(steps):
        squares = (model(weights, samples) - targets).square()
        loss = squares.sum() / 2 if model is tensor_parallel else squares.mean()
        losses.append(loss.item())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.data -= learning_rate * gradient
    return losses, weights


@pytest.fixture(scope="module")
def beginnings():
    return run_ranks(1, begin, *MODELS)[0]


@pytest.mark.parametrize("step", MODELS)
def test_gradients_are_those_of_autograd(worlds, beginnings, step):
    sketch, (losses, weights) = SKETCHES[step], worlds[1][0][step]
    expected = descend(MODELS[step], *beginnings[step], sketch.STEPS, sketch.LEARNING_RATE)
    agree(losses, joined(step, [weights]), expected[0], [weight.detach() for weight in expected[1]])


def test_one_process_in_every_way():
    """Step 1: micro-batches and recomputation change no number, and master weights change those of narrow types."""
    sketch = SKETCHES[1]
    losses, masters, most = sketch.train(1, False, torch.float64)
    numbers = sketch.LAYERS * sketch.SAMPLES * (sketch.WIDTH + sketch.HIDDEN)
    assert most == numbers
    for micro_batches, recompute in ((2, False), (4, False), (1, True), (4, True)):
        others, other_masters, most = sketch.train(micro_batches, recompute, torch.float64)
        agree(others, joined(1, [other_masters]), losses, joined(1, [masters]))
        one_hidden = sketch.SAMPLES * (sketch.LAYERS * sketch.WIDTH + sketch.HIDDEN)
        assert most == (one_hidden if recompute else numbers) / micro_batches
    narrow, masters, _ = sketch.train(4, True, torch.bfloat16)
    wide, *_ = sketch.train(4, True, torch.float32)
    assert narrow != wide and narrow == pytest.approx(wide, rel=1e-2) and masters[0][0].dtype == torch.float32


def test_numbers_of_the_picture_in_lesson_4():
    x, w1, w2 = (torch.tensor(each) for each in ([[1.0, 2]], SKETCHES[4].W1, SKETCHES[4].W2))
    results = []
    for mine in (slice(0, 2), slice(2, 4)):  # what rank 0 and rank 1 do with the first token, without any message
        before_relu = x @ w1[:, mine]
        dhidden = (torch.ones(1, 2) @ w2[mine].T) * (before_relu > 0)
        summand, dx = before_relu.relu() @ w2[mine], dhidden @ w1[:, mine].T
        results.append([each[0].tolist() for each in (before_relu, summand, dhidden, dx)])
    assert results == [[[3, -2], [3, 0], [1, 0], [1, 1]], [[1, 3], [2, 4], [3, 1], [-2, 4]]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sketch_4_prints_the_numbers_of_the_picture(ranks):
    done = run_script("step04_tensor_parallel/sketch.py", ranks=ranks)
    assert "y [5.0, 4.0], dy [2.0, 1.0], dx [-2.0, 8.0]" in done.stdout, done.stderr


def hang() -> None:
    SKETCHES[5].SCHEDULE = SKETCHES[5].HANGS
    train(5)


def test_the_second_order_of_sketch_5_hangs():
    with pytest.raises(RankFailure, match="2 of 2 ranks failed .*timeout") as failed:
        run_ranks(2, hang, timeout=2)
    assert all("in receive" in failure for failure in failed.value.failures.values())


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sketch_fits_on_a_projector(folder):
    """It imports nothing of ours, and what a reader is to write can be cut out."""
    text = (ROOT / folder / "sketch.py").read_text()
    assert 40 <= len(text.splitlines()) <= (180 if folder == "step08_5d" else 112)  # which has all dimensions
    imported = re.findall(r"^(?:import|from) ([\w.]+)", text, re.MULTILINE)
    assert {name.split(".")[0] for name in imported} <= {"os", "torch"}
    assert MARKED.search(text) and text.count("# ---") == 2 * len(MARKED.findall(text))
    ast.parse(MARKED.sub(r"\1raise NotImplementedError\n", text))
