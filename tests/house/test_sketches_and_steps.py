"""Sketches beside the real functions of their steps, on the same numbers."""

import torch
import torch.distributed as dist

from common.group import Group
from common.parameter import ParameterSpec
from step02_data_parallel import sketch as step02
from step02_data_parallel.data_parallel import DataParallel
from step03_zero import sketch as step03
from step03_zero.unit import Unit
from step04_tensor_parallel import sketch as step04
from step04_tensor_parallel.operators import gather_sequence, reduce_scatter_sequence
from step06_context_parallel import sketch as step06
from step06_context_parallel.attention_block import KERNELS
from step06_context_parallel.ring_attention import ring_attention
from step07_expert_parallel import sketch as step07
from step07_expert_parallel.expert_parallel import TokenDispatcher
from step07_expert_parallel.moe import Choices
from tests.harness.observing import place
from tests.harness.ranks import run_ranks


def passes(group: Group) -> None:
    """Forward and backward of sketches 4, 6 and 7."""
    random = torch.Generator().manual_seed(group.rank)

    def draw(*size):
        return torch.randn(size, generator=random, dtype=torch.float64).requires_grad_()

    def check(step, y, dy, inputs, *ours):
        for each, expected in zip(ours, [y, *torch.autograd.grad(y, inputs, dy)], strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12, msg=lambda why: f"sketch {step}: {why}")

    x, scale, w1, w2, dy = draw(3, 8), draw(8), draw(8, 5), draw(5, 8), draw(3, 8)
    y = reduce_scatter_sequence(torch.relu(gather_sequence((x * scale)[None], group) @ w1) @ w2, group)[0]
    sketch_y, hidden = step04.forward(x, scale, w1, w2)
    dx, dscale, dw1, dw2 = step04.backward(dy, x, hidden, scale, w1, w2)
    _, my_dscale = torch.autograd.grad(y, (x, scale), dy, retain_graph=True)
    dist.all_reduce(my_dscale)
    torch.testing.assert_close(dscale, my_dscale)  # which the step sums with the other weights, once
    check(4, y, dy, (x, w1, w2), sketch_y, dx, dw1, dw2)

    q, k, v, dout = (draw(8, step06.WIDTH) for _ in range(4))
    y = ring_attention(*(each[None, None] for each in (q, k, v)), group, kernels=KERNELS["naive"])[0, 0]
    with torch.no_grad():
        out, lse = step06.forward(q, k, v)
        gradients = step06.backward(dout, q, k, v, out, lse)
    check(6, y, dout, (q, k, v), out, *gradients)

    experts, width, hidden = step07.EXPERTS, 4, step07.HIDDEN
    up, down = (experts // group.size, width, hidden), (experts // group.size, hidden, width)
    x, router, ups, downs, dy = (draw(*size) for size in ((16, width), (width, experts), up, down, (16, width)))
    best, chosen = (x @ router).topk(2)
    choices = Choices(chosen, experts, some_dropped=False)
    dispatcher = TokenDispatcher(choices.counts, group)
    rows, counts = dispatcher.arrive(dispatcher.dispatch(x[choices.tokens]))
    rows = torch.cat([torch.relu(rows[of] @ up) @ down for of, up, down in zip(counts.rows, ups, downs)])
    weighted = dispatcher.back(rows) * best.softmax(-1).flatten()[choices.order, None]
    y = torch.zeros_like(x).index_add(0, choices.tokens, weighted)
    with torch.no_grad():
        sketch_y, kept = step07.forward(x, router, ups, downs)
        gradients = step07.backward(dy, router, ups, downs, kept)
    check(7, y, dy, (x, router, ups, downs), sketch_y, *gradients)


def sums_and_units(group: Group) -> None:
    """The sums of sketch 2, and the gathers and sums of sketch 3."""
    width, layers = step02.WIDTH, step02.LAYERS
    weights = torch.randn(layers, width, width, dtype=torch.float64) / 8  # the same on every rank
    x, dy = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(group.rank), dtype=torch.float64)
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for index, each in enumerate(parameters):
        each.spec = ParameterSpec(f"{index}", (width, width), ((0, width), (0, width)), None)

    parallel = DataParallel(parameters, group, bucket_mb=0.1)
    assert 1 < len(parallel.buckets) < layers
    y = x
    for parameter in parameters:
        y = torch.relu(y @ parameter)
    with parallel.backward(last=True):
        y.backward(dy)
    gradients = step02.backward(weights, step02.forward(weights, x), dy)
    torch.testing.assert_close(gradients, torch.stack(parallel.finish()), rtol=1e-12, atol=1e-12)

    unit = Unit(parameters[:1], 3, group, Group("alone", (group.rank,), 0))
    mine, mine_only = weights[0].chunk(group.size)[group.rank], gradients[0] * (group.rank + 1)
    unit.shard.copy_(mine.flatten())
    unit.fetch().wait()
    assert torch.equal(step03.gather(mine), parameters[0].data)
    unit.make_bucket().add(parameters[0], mine_only)
    unit.reduce_scatter()
    unit.complete()
    summed = step03.reduce_scatter(mine_only)
    torch.testing.assert_close(summed.flatten(), unit.reduced, rtol=1e-12, atol=1e-12)


def compare_with_steps() -> None:
    """Sketches beside the real functions, on this rank."""
    rank, ranks = place()
    group = Group("group", tuple(range(ranks)), rank, dist.group.WORLD, "gloo")
    passes(group)
    sums_and_units(group)


def test_sketches_do_what_the_steps_do():
    run_ranks(2, compare_with_steps)
