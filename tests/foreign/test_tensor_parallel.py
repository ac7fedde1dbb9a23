"""Tensor parallelism by a table: Llama of transformers is cut like ours, and what cannot be cut is named."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.group import Group
from common.weights.initialisation import values_from
from step03_zero.zero import Zero
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.partial_sums import sum_extra_groups
from step04_tensor_parallel.tensor_parallel import (
    Cut,
    Cuts,
    cut_layers,
    cut_vocabulary,
    share_the_rest,
)
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from tests.foreign import models
from tests.foreign.models import PRELOAD  # noqa: F401 (of the fork server)
from tests.harness.ranks import run_ranks

COLUMNS, ROWS = Cut(0), Cut(1)


def cuts() -> Cuts:
    """Of transformers' Llama, whose attention calls the width of a head `head_dim`."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    heads = Cut(0, "head_dim")
    return {
        LlamaAttention: {"q_proj": heads, "k_proj": heads, "v_proj": heads, "o_proj": Cut(1, "head_dim")},
        LlamaMLP: {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
    }


def worst_error(mode: str) -> float:
    """On two ranks that share every layer: of a step's gradients, sharded with stage 3's units over one rank."""
    tp = Group.of(dist.group.WORLD, "tp")
    alone = Group("shard", (tp.rank,), 0)
    mesh = SimpleNamespace(device=torch.device("cpu"), shard=alone, replica=alone, tp=tp)
    expected = models.gradients(models.llama(), models.tokens())
    model, split = models.llama(), Split(tp, sequence_parallel=False, mode=mode)
    values = values_from({name: each.detach().clone() for name, each in model.named_parameters()} | padded(model))
    cut_layers(model, cuts(), split)
    cut_vocabulary(model, "model.embed_tokens", "lm_head", models.VOCAB, split)
    share_the_rest(model, split)
    zero = Zero(model, models.regions_of(model), values, mesh, 1, dtype=torch.float64)
    rows = models.tokens()
    zero.gather()
    logits = model(rows[:, :-1], use_cache=False).logits
    loss = vocab_parallel_cross_entropy_sum(logits, rows[:, 1:], models.VOCAB, tp) / rows[:, 1:].numel()
    with zero.backward(last=True):
        loss.backward()
    found = zero.finish()
    sum_extra_groups(zero.shards, found, mesh)
    errors = []
    for shard, gradient in zip(zero.shards, found, strict=True):
        for box, part in shard.spec.boxes(gradient):
            whole = expected[shard.spec.name]
            inside = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(box, whole.shape))
            part = part[tuple(slice(each.stop - each.start) for each in inside)]
            errors.append((part - whole[inside]).abs().max().item())
    return max(errors)


def padded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Both ends, with a row of zeros that makes the vocabulary even."""
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: nn.functional.pad(model.get_parameter(name).detach(), (0, 0, 0, 1)) for name in ends}


@pytest.mark.parametrize("mode", ["plain", "overlap"])
def test_llama_is_cut_by_a_table(mode):
    assert max(run_ranks(2, worst_error, mode)) < 1e-12


@pytest.mark.parametrize(
    "kind, table, ranks, sequence_parallel, line",
    [
        (
            "gpt2",
            {"GPT2MLP": {"c_fc": COLUMNS}},
            2,
            False,
            r"h\.0\.mlp\.c_fc\.weight: only an .* and this is a Conv1D with",
        ),
        (
            "llama",
            {"LlamaMLP": {"up_proj": COLUMNS}},
            5,
            False,
            "5 ranks cannot divide 24 units of 1",
        ),
        ("llama", {"LlamaAttention": {"k_proj": Cut(0, "head_dim")}}, 4, False, "4 ranks cannot divide 2 units of 4"),
        ("llama", {"LlamaMLP": {"up_proj": COLUMNS}}, 2, True, "LlamaMLP takes its sequence's length from its input"),
    ],
)
def test_what_cannot_be_cut_is_named(kind, table, ranks, sequence_parallel, line):
    model = models.MODELS[kind]()
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    split = Split(Group("tp", tuple(range(ranks)), 0), sequence_parallel, "plain")
    with pytest.raises(ValueError, match=line):
        cut_layers(model, {kinds[name]: layers for name, layers in table.items()}, split)
