"""DataParallel and ZeRO shard, gather and sum for a model that has never heard of them."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.group import Group
from common.parameter import attach_specs
from common.weights.initialisation import values_from
from step02_data_parallel.data_parallel import DataParallel
from step03_zero.by_layer import ZeroByLayer
from step03_zero.zero import Zero
from tests.foreign import models
from tests.foreign.models import PRELOAD  # noqa: F401 (of the fork server)
from tests.harness.ranks import run_ranks

RATE = 0.1
CASES = [(name, stage, copies) for name, stage, copies in itertools.product(models.MODELS, (1, 2, 3), (1, 2))]
CASES += [(name, 0, 4) for name in models.MODELS]  # every rank holds a copy


def expected_steps(name: str) -> list[dict[str, torch.Tensor]]:
    """The gradients of two steps of SGD in one process."""
    model, found = models.MODELS[name](), []
    for step in range(2):
        found.append(models.gradients(model, models.tokens(step)))
        for parameter in model.parameters():
            parameter.data -= RATE * parameter.grad
    return found


def my_rows(step: int, group: Group) -> tuple[torch.Tensor, ...]:
    """This rank's sequences, as two micro-batches, or as one."""
    return models.tokens(step).chunk(group.size)[group.rank].split(1)


def groups_of_copies(world: Group, copies: int) -> SimpleNamespace:
    """What `Zero` wants of a mesh: the ranks that hold a copy of the model together, and those with the same shard."""
    grid = torch.arange(world.size).view(copies, -1)
    mine = {}
    for name, rows in (("shard", grid.tolist()), ("replica", grid.T.tolist())):
        handles = [(tuple(ranks), dist.new_group(ranks)) for ranks in rows]
        mine[name] = next(Group.of(handle, name) for ranks, handle in handles if world.rank in ranks)
    return SimpleNamespace(device=torch.device("cpu"), **mine)


def worst_errors(world: int) -> dict[tuple, float]:
    """Of every case, the largest error of a gradient over two steps."""
    everyone, expected, result = (
        Group.of(dist.group.WORLD, "world"),
        {name: expected_steps(name) for name in models.MODELS},
        {},
    )
    meshes = {copies: groups_of_copies(everyone, min(copies, world)) for copies in (1, 2, 4)}
    for case in CASES:
        name, stage, copies = case
        model = models.MODELS[name]()
        values = values_from({key: each.detach().clone() for key, each in model.named_parameters()})
        kind = ZeroByLayer if stage == 3 else Zero
        zero = kind(
            model, models.regions_of(model), values, meshes[copies], stage, dtype=torch.float64, bucket_mb=0.005
        )
        errors = []
        for step in range(2):
            zero.gather()
            rows = my_rows(step, everyone)
            for index, row in enumerate(rows):
                loss = models.loss_of(model, row)
                with zero.backward(last=index == len(rows) - 1):
                    loss.backward()
            for shard, gradient in zip(zero.shards, zero.finish(), strict=True):
                for box, part in shard.spec.boxes(gradient):
                    whole = expected[name][step][shard.spec.name][tuple(slice(*each) for each in box)]
                    errors.append((part - whole).abs().max().item())
                shard -= RATE * gradient
        result[case] = max(errors)
    for name in models.MODELS:
        model = models.MODELS[name]()
        attach_specs(model)
        parallel = DataParallel(list(model.parameters()), everyone, bucket_mb=0.005)
        rows = my_rows(0, everyone)
        for index, row in enumerate(rows):
            loss = models.loss_of(model, row)
            with parallel.backward(last=index == len(rows) - 1):
                loss.backward()
        pairs = zip(model.named_parameters(), parallel.finish(), strict=True)
        result[name, "data"] = max((got - expected[name][0][key]).abs().max().item() for (key, _), got in pairs)
    return result


@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_trains_as_one_process(world):
    for errors in run_ranks(world, worst_errors, world):
        assert len(errors) == len(CASES) + len(models.MODELS)
        assert max(errors.values()) < 1e-12, errors


def test_what_is_in_no_region_is_named():
    """GPT-2 has two embeddings: without the second, nobody would gather it, and its gradient would be wrong."""
    model = models.gpt2()
    regions = models.regions_of(model)
    one = Group("alone", (0,), 0)
    mesh = SimpleNamespace(device=torch.device("cpu"), shard=one, replica=one)
    with pytest.raises(ValueError, match=r"^transformer\.wpe\.weight is in no region"):
        Zero(model, [[regions[0][0]], *regions[1:]], values_from({}), mesh, 1)


def alone() -> SimpleNamespace:
    one = Group("alone", (0,), 0)
    return SimpleNamespace(device=torch.device("cpu"), shard=one, replica=one)


def by_layer(model: nn.Module, regions: list[list[nn.Module]]) -> ZeroByLayer:
    values = values_from({name: each.detach().clone() for name, each in model.named_parameters()})
    return ZeroByLayer(model, regions, values, alone(), 3)


class Repeats(nn.Module):
    """One layer runs twice in a row."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(self.first(x))))))


def test_a_region_may_run_twice_in_a_row_and_weights_keep_their_type():
    model, x = Repeats(), torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    model(x).square().sum().backward()
    expected = {name: each.grad.flatten() for name, each in model.named_parameters()}
    zero = by_layer(model, [[model.first], [model.twice], [model.last]])
    for _ in range(2):
        zero.gather()
        with zero.backward(last=True):
            model(x).square().sum().backward()
        for shard, gradient in zip(zero.shards, zero.finish(), strict=True):
            torch.testing.assert_close(gradient, expected[shard.spec.name], rtol=1e-12, atol=1e-14)  # float64, too


def test_a_region_that_returns_several_tensors_is_named():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    pair = Pair(4, 4)
    zero = by_layer(pair, [[pair]])
    zero.gather()
    with pytest.raises(TypeError, match=r"must return one tensor, and Pair returns a tuple$"):
        pair(torch.ones(4))
