"""Attention over several ranks in a model that is not ours: transformers' Llama, unchanged.

No configuration, model or mesh of ours takes part. In every variant the shares of all ranks add up to the loss and the
gradients of one process that uses transformers' own attention.
"""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import collectives
from common.group import Group
from step06_context_parallel.all_gather_attention import all_gather_attention
from step06_context_parallel.attention_block import KERNELS
from step06_context_parallel.ring_attention import ring_attention
from step06_context_parallel.sequence_layouts import token_positions
from step06_context_parallel.ulysses_attention import ulysses_attention
from tests.foreign import models
from tests.foreign.models import LENGTH, PRELOAD  # noqa: F401 (of the fork server)
from tests.harness.ranks import run_ranks

DOCUMENTS = (0, 5), (0, 8), (0,), (0, 1, 2, 12)  # where they begin in each sample
VARIANTS = {
    "ring": (ring_attention, {}),
    "ring, contiguous": (ring_attention, {"split": "contiguous"}),
    "ring, striped, stored scores": (ring_attention, {"split": "striped", "kernels": KERNELS["naive"]}),
    "ring, documents": (ring_attention, {"documents": DOCUMENTS}),
    "all-gather": (all_gather_attention, {}),
    "all-gather, striped, documents": (all_gather_attention, {"split": "striped", "documents": DOCUMENTS}),
    "ulysses": (ulysses_attention, {}),
    "ulysses, contiguous, documents": (ulysses_attention, {"split": "contiguous", "documents": DOCUMENTS}),
}


def trained(model: nn.Module, rows: Tensor, positions: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """The share of the loss that the tokens at these positions have, and the gradients of this share."""
    logits = model(rows[:, positions], position_ids=positions[None], attention_mask=mask, use_cache=False).logits
    loss = models.share(logits, rows[:, positions + 1])
    names, parameters = zip(*model.named_parameters())
    return {"loss": loss.detach(), **dict(zip(names, torch.autograd.grad(loss, parameters)))}


@functools.cache
def expected(documents: bool) -> dict[str, Tensor]:
    """What one process finds, with attention as transformers has it and a mask of its own."""
    positions, rows = torch.arange(LENGTH), models.tokens()
    begun = torch.stack([torch.bucketize(positions, torch.tensor(each), right=True) for each in DOCUMENTS])
    visible = (positions[:, None] >= positions) & (begun[:, :, None] == begun[:, None, :] if documents else True)
    mask = visible.expand(len(rows), LENGTH, LENGTH)[:, None]
    return trained(models.llama(attn_implementation="sdpa"), rows, positions, mask)


def ranks_train() -> dict[str, dict[str, Tensor]]:
    """This rank's share in every variant, and where pairs of ranks read different samples."""
    from transformers import AttentionInterface

    world, found, core, ran = Group.of(name="everybody"), {}, None, []

    def attend(module, q, k, v, mask, **options):
        ran.append(module.layer_idx)
        return core(q, k, v).transpose(1, 2), None

    AttentionInterface.register("sharded", attend)
    model, rows = models.llama(attn_implementation="sharded"), models.tokens()

    def share(function, group: Group, rows: Tensor, split: str = "zigzag", **options) -> dict[str, Tensor]:
        nonlocal core
        core = functools.partial(function, group=group, split=split, **options)
        ran.clear()
        return trained(model, rows, token_positions(split, LENGTH, group.size, group.rank))

    for name, (function, options) in VARIANTS.items():
        found[name] = share(function, world, rows, **options)
        assert ran == [0, 1, 2], f"{name}: attention ran in these layers: {ran}"
    model.gradient_checkpointing_enable()
    found["ring, recomputed"] = share(ring_attention, world, rows)
    assert ran == [0, 1, 2, 2, 1, 0], f"attention ran in these layers: {ran}"
    model.gradient_checkpointing_disable()
    both_ways(world)
    check_groups(world)
    if world.size == 4:
        handles = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        mine = world.rank % 2
        pair = Group.of(handles[mine], "pair")
        assert (pair.ranks, pair.rank, pair.size) == ((mine, mine + 2), world.rank // 2, 2), pair
        with pytest.raises(ValueError, match=f"^rank {world.rank} is not in the process group that is to be 'theirs'$"):
            Group.of(handles[1 - mine], "theirs")
        for function in (ring_attention, all_gather_attention, ulysses_attention):
            found[f"pairs, {function.__name__}"] = share(function, pair, rows[mine::2])
        with collectives.record() as calls:
            share(ring_attention, pair, rows[mine::2])
        assert {(call.group, call.peer) for call in calls} == {("pair", pair.ranks[1 - pair.rank])}
    return found


def check_groups(world: Group) -> None:
    """A group of one rank needs no communicator. NCCL, where there is any, takes the tensors on GPUs."""
    alone = Group.of(dist.new_group([world.rank], use_local_synchronization=True))
    assert (alone.ranks, alone.size, alone.handle) == ((world.rank,), 1, None), alone
    assert world.backend == "gloo", world
    for backends, backend in {"cpu:gloo,cuda:nccl": "nccl", "cuda:nccl": "nccl", "cpu:gloo": "gloo"}.items():
        with mock.patch.object(dist, "get_backend_config", lambda handle, backends=backends: backends):
            assert Group.of().backend == backend, backends


def both_ways(group: Group) -> None:
    """Without a causal mask every query sees every key, on all ranks."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, LENGTH, 8, dtype=torch.float64, generator=random) for heads in (4, 2, 2))
    whole = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    mine = token_positions("zigzag", LENGTH, group.size, group.rank)
    for function in (ring_attention, all_gather_attention, ulysses_attention):
        out = function(*(each[:, :, mine] for each in (q, k, v)), group, causal=False)
        torch.testing.assert_close(out, whole[:, :, mine], rtol=1e-10, atol=1e-10, msg=function.__name__)


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest error of any tensor, relative to the largest element of that tensor."""
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted)


@pytest.mark.parametrize("world", [2, 4])
def test_shares_of_all_ranks_are_one_process(world):
    ranks = run_ranks(world, ranks_train)
    assert len(ranks[0]) == len(VARIANTS) + 1 + 3 * (world == 4)
    for name in ranks[0]:
        total = {key: sum(rank[name][key] for rank in ranks) for key in ranks[0][name]}
        error = difference(total, expected("documents" in name))
        assert error < 1e-10, f"{name}: {error}"
    assert difference(expected(True), expected(False)) > 1e-3, "a mask of documents matters"


def drawn(heads: int = 4, tokens: int = 6, width: int = 8, batch: int = 2, dtype=torch.float32) -> Tensor:
    return torch.zeros(batch, heads, tokens, width, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ((drawn(), drawn(2), drawn(2, width=12)), {}, r"they are .*, \(2, 2, 6, 8\), \(2, 2, 6, 12\)$"),
        ((drawn(), drawn(2, 12), drawn(2, 12)), {}, "q, k and v must be "),  # keys of a cache
        ((drawn(), drawn(3), drawn(3)), {}, "3 heads of keys and values do not divide 4 heads of queries"),
        ((drawn(), drawn(), drawn(dtype=torch.bfloat16)), {}, "must have one type; .*float32 and torch.bfloat16$"),
        ((drawn(tokens=5),) * 3, {}, "^zigzag on 2 ranks: 4 parts do not divide 10 tokens$"),
        ((drawn(),) * 3, {"split": "zig-zag"}, "^split 'zig-zag' is none of "),
        ((drawn(),) * 3, {"documents": ((0,),)}, "^documents of 1 samples, where q, k and v have 2$"),
        ((drawn(),) * 3, {"documents": ([0, 4], [2, 4])}, "^documents begin at 0, and then at increasing "),
        ((drawn(),) * 3, {"documents": ((0, 4), (0, 4, 4))}, "^documents begin at 0, and then at increasing "),
    ],
)
@pytest.mark.parametrize("function", [ring_attention, all_gather_attention, ulysses_attention])
def test_what_does_not_fit_is_refused_before_anything_is_sent(function, tensors, options, words):
    with pytest.raises(ValueError, match=words):
        function(*tensors, Group("unconnected", (0, 1), 0), **options)


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(2, 3, 3), (3, 4, 4), (4, 6, 2), (6, 12, 4)])
def test_heads_that_ulysses_cannot_divide(ranks, heads, kv_heads):
    with pytest.raises(ValueError, match=f"^Ulysses: {ranks} ranks cannot divide {heads} heads of q and {kv_heads} of"):
        ulysses_attention(*map(drawn, (heads, kv_heads, kv_heads)), Group("unconnected", tuple(range(ranks)), 0))


def test_a_program_without_process_group():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        Group.of()
