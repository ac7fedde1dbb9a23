"""What sketches 2 and 3 sum and gather is what the real classes do."""

import torch
import torch.distributed as dist

from common.parameter import ParameterSpec
from common.process_groups import Group
from step02_data_parallel import sketch as step02
from step02_data_parallel.data_parallel import DataParallel
from step03_zero import sketch as step03
from step03_zero.unit import Unit
from tests.harness.ranks import run_ranks


def sums_and_units() -> None:
    """On this rank: the sums of sketch 2, and the gathers and sums of sketch 3, beside those of the real classes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = Group("group", tuple(range(ranks)), rank, dist.group.WORLD, "gloo")
    width, layers = step02.WIDTH, step02.LAYERS
    weights = torch.randn(layers, width, width, dtype=torch.float64) / 8  # the same on every rank
    x, dy = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
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

    unit = Unit(parameters[:1], 3, group, Group("alone", (rank,), 0))
    mine, mine_only = weights[0].chunk(ranks)[rank], gradients[0] * (rank + 1)
    unit.shard.copy_(mine.flatten())
    unit.fetch().wait()
    assert torch.equal(step03.gather(mine), parameters[0].data)
    unit.make_bucket().add(parameters[0], mine_only)
    unit.reduce_scatter()
    unit.complete()
    summed = step03.reduce_scatter(mine_only)
    torch.testing.assert_close(summed.flatten(), unit.reduced, rtol=1e-12, atol=1e-12)


def test_sketches_send_what_the_steps_send():
    run_ranks(2, sums_and_units)
