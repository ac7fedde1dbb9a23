"""A pipeline, in any order, of a model that has never heard of one: its stages are cut by hand."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.group import Group
from common.parameter import attach_specs
from common.weights.initialisation import values_from
from step03_zero.zero import Zero
from step04_tensor_parallel.partial_sums import sum_extra_groups
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.stages import mark_shared_parameters
from step05_pipeline.weight_gradients import defer_linear_layers, defer_weight_gradients
from step07_expert_parallel.overlap import OverlappedPipeline
from tests.foreign import models
from tests.foreign.models import PRELOAD  # noqa: F401 (of the fork server)
from tests.harness.ranks import run_ranks


class Stage(nn.Module):
    """Some blocks of GPT-2 or Llama, with the embedding if they are the first ones, and the head if the last."""

    def __init__(self, model: nn.Module, first: int, last: int):
        super().__init__()
        before, blocks, after = models.parts_of(model)
        self.before = nn.ModuleList(before if first == 0 else [])
        self.blocks = nn.ModuleList(blocks[first:last])
        self.after = nn.ModuleList(after if last == len(blocks) else [])
        self.rotary = getattr(model.base_model, "rotary_emb", None)  # has no weights

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        if len(self.before):
            x = sum(embedding(each) for embedding, each in zip(self.before, (x, positions)))
        options = {"position_embeddings": self.rotary(x, positions)} if self.rotary else {}
        for block in self.blocks:
            x = block(x, **options)
        for module in self.after:
            x = module(x)
        return x

    def regions(self) -> list[list[nn.Module]]:
        parts = [list(self.before), *([block] for block in self.blocks), list(self.after)]
        return [part for part in parts if part]


CASES = [  # model, schedule, stages of ZeRO, whether blocks recompute by their own means
    ("gpt2", "1f1b", 1, False),
    ("gpt2", "1f1b", 2, True),
    ("gpt2", "zbv", 1, False),
    ("gpt2", "dualpipe", 0, False),
    ("llama", "dualpipe, overlapped", 0, False),
    ("llama", "1f1b", 3, False),
    ("llama", "zb-h1", 1, False),
    ("llama", "interleaved", 2, True),
]
KINDS = Pipeline, OverlappedPipeline  # the second one runs pairs in turns
LAYERS = {"gpt2": {"n_layer": 4}, "llama": {"num_hidden_layers": 4}}


def groups_of(world: Group, pp: int) -> SimpleNamespace:
    """Ranks in a row are a pipeline; those at the same place of several pipelines read other samples."""
    grid, mine = torch.arange(world.size).view(-1, pp), {}
    columns = grid.T.tolist()
    wanted = {"activations": grid.tolist(), "gradients": grid.tolist(), "shard": columns}
    for name, rows in wanted.items():
        for ranks in rows:
            handle = dist.new_group(ranks)
            if world.rank in ranks:
                mine[name] = Group.of(handle, name)
    alone = Group("replica", (world.rank,), 0)
    return SimpleNamespace(device=torch.device("cpu"), replica=alone, **mine)


def linked(mesh: SimpleNamespace, schedule, tied: bool) -> SimpleNamespace:
    """The same with the groups of the ranks that share parameters. Two ranks of a pipeline share all that is shared."""
    both = mesh.activations if len({schedule.placement[0][0], schedule.placement[0][-1]}) > 1 else mesh.replica
    return SimpleNamespace(**vars(mesh), embed=both if tied else None, mirror=mesh.activations)


def worst_errors(world: int) -> dict[tuple, float]:
    """Of every case, the largest error of a gradient."""
    everyone, result = Group.of(dist.group.WORLD, "world"), {}
    mesh = groups_of(everyone, 2)
    for case in CASES:
        name, kind, stage, recompute = case
        expected = models.gradients(models.MODELS[name](**LAYERS[name]), models.tokens())
        rows = models.tokens().chunk(mesh.shard.size)[mesh.shard.rank].split(1)
        schedule, kind = build_schedule(kind.split(",")[0], 2, len(rows)), KINDS["overlapped" in kind]
        groups, new = linked(mesh, schedule, name == "gpt2"), partial(build, name, recompute)
        result[case] = error_of(new, kind, schedule, groups, rows, stage, expected)
    return result


def build(name: str, recompute: bool) -> nn.Module:
    model = models.MODELS[name](**LAYERS[name])
    attach_specs(model)  # with the names in the whole model
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def error_of(build, kind, schedule, mesh, rows, zero_stage, expected) -> float:
    model, rank = build(), mesh.activations.rank
    parts = models.parts_of(model)
    tied = [model.lm_head.weight.spec.name] if model.lm_head.weight is parts.before[0].weight else []
    each = len(parts.blocks) // schedule.stages
    stages = []
    for chunk in range(schedule.chunks(rank)):
        number = schedule.stage_of(rank, chunk)[1]
        stages.append(Stage(build(), number * each, (number + 1) * each))
        if schedule.splits_backward:
            defer_linear_layers(stages[-1])
    mark_shared_parameters(stages, schedule, rank, tied)
    values = values_from({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    zeros = [Zero(stage, stage.regions(), values, mesh, zero_stage, dtype=torch.float64) for stage in stages]
    like = torch.empty(1, models.LENGTH, 16, dtype=torch.float64)
    pipeline = kind(schedule, stages, zeros, mesh.activations, mesh.gradients, like)

    def forward(stage: nn.Module, index: int, x: Tensor | None) -> Tensor:
        y = stage(rows[index][:, :-1] if x is None else x)
        return models.share(y, rows[index][:, 1:]) if len(stage.after) else y

    pipeline.run(forward)
    shards, gradients = [shard for zero in zeros for shard in zero.shards], pipeline.finish()
    sum_extra_groups(shards, gradients, mesh)
    errors = []
    for shard, gradient in zip(shards, gradients, strict=True):
        for box, part in shard.spec.boxes(gradient):
            whole = expected[shard.spec.name][tuple(slice(*each) for each in box)]
            errors.append((part - whole).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_trains_as_one_process(world):
    for errors in run_ranks(world, worst_errors, world):
        assert len(errors) == len(CASES)
        assert max(errors.values()) < 1e-12, errors


class EndsInTanh(nn.Module):
    """Its backward reads what the forward has returned."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


def gradient_of_tanh(micro_batches: int) -> Tensor:
    world = Group.of(dist.group.WORLD, "activations")
    other = Group.of(dist.new_group([0, 1]), "gradients")
    alone = Group("shard", (world.rank,), 0)
    mesh, stage = SimpleNamespace(device=torch.device("cpu"), shard=alone, replica=alone), EndsInTanh()
    values = values_from({"weight": torch.eye(8, dtype=torch.float64)})
    zero = Zero(stage, [[stage]], values, mesh, 1, dtype=torch.float64)
    schedule = build_schedule("1f1b", 2, micro_batches)
    pipeline = Pipeline(schedule, [stage], [zero], world, other, torch.empty(4, 8, dtype=torch.float64))
    pipeline.run(lambda stage, index, x: last(stage(inputs(index) if x is None else x), world.rank))
    return pipeline.finish()[0].view(8, 8)


def inputs(index: int) -> Tensor:
    return torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8) * (index + 1)


def last(y: Tensor, rank: int) -> Tensor:
    return y.square().sum() if rank == 1 else y


def test_what_a_stage_returns_may_be_needed_by_its_backward():
    found = run_ranks(2, gradient_of_tanh, 4)
    both = [EndsInTanh(), EndsInTanh()]
    sum(both[1](both[0](inputs(index))).square().sum() for index in range(4)).backward()
    for gradient, stage in zip(found, both, strict=True):
        torch.testing.assert_close(gradient, stage.weight.grad, rtol=1e-12, atol=1e-14)


def test_a_bias_does_not_keep_a_linear_layer_from_deferring():
    layer, x = nn.Linear(4, 3, dtype=torch.float64), torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    layer(x).square().sum().backward()
    expected = {name: each.grad for name, each in layer.named_parameters()}
    model = nn.Sequential(layer)
    defer_linear_layers(model)
    model.zero_grad()
    with defer_weight_gradients([layer.weight]) as store:
        model(x).square().sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, expected["bias"])
    ((weight, gradient),) = store.compute()
    assert weight is layer.weight
    torch.testing.assert_close(gradient, expected["weight"])


def test_stages_of_a_rank_must_not_hold_the_same_tensor():
    model, schedule = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), build_schedule("zbv", 2, 4)
    model[1].weight = model[0].weight
    attach_specs(model)
    with pytest.raises(ValueError, match=r"^two stages of a rank hold the same 0\.weight"):
        mark_shared_parameters(list(model), schedule, 0, ["0.weight"])


def test_a_message_of_another_shape_is_an_error():
    """Gloo would fill a part of a larger one, and say nothing."""
    group, schedule = Group("pipeline", (0, 1), 0), build_schedule("1f1b", 2, 1)
    pipeline = Pipeline(schedule, [nn.Identity()], [], group, group, torch.empty(2, 4))
    with pytest.raises(ValueError, match=r"shape \(1, 4\), but the pipeline's `like` is .* shape \(2, 4\)$"):
        pipeline.run(lambda stage, index, x: torch.ones(1, 4))
