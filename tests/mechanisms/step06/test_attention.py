"""Attention in the blocks of all ranks: outputs and gradients against one plain attention to the whole sequence."""

import itertools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from common.config import CP_SPLITS
from common.group import Group
from common.model import fused_attention
from step06_context_parallel import attention_block, cost, sequence_layouts
from step06_context_parallel.attention_block import KERNELS, AttentionGradients, MergedAttention
from step06_context_parallel.context_parallel import take_part
from step06_context_parallel.sequence_layouts import Documents, SequenceLayout
from step06_context_parallel.ulysses_attention import ulysses_attention
from tests.harness.observing import configure

SEQ, NAMES = 48, ("out", "dq", "dk", "dv")
DRAW = random.Random(0)
DOCUMENTS = [
    None,
    ((0,), tuple(range(SEQ))),
    ((0, 8, 20, 36), (0, 6, 12, 13, 24)),  # they begin where a rank's part or chunk does; one has a single token
    *(tuple((0, *sorted(DRAW.sample(range(1, SEQ), each))) for each in counts) for counts in ((1, 3), (16, 0))),
]


class OnCuda(torch.Tensor):
    """Says that a GPU has it."""

    is_cuda = True


EXTREME = 20.0  # for scores of hundreds: exponentials would overflow, ranks whose keys lose have no weight


def visible_pairs(samples: int, causal: bool, documents: Documents | None) -> torch.Tensor:
    """Which query may see which key, (samples, 1, SEQ, SEQ)."""
    positions = torch.arange(SEQ)
    visible = ((positions[None, :] <= positions[:, None]) | torch.tensor(not causal)).repeat(samples, 1, 1, 1)
    for sample, starts in enumerate(documents or ()):
        number = torch.bucketize(positions, torch.tensor(starts), right=True)
        visible[sample] &= number[:, None] == number[None, :]
    return visible


def whole_attention(q, k, v, causal: bool, documents: Documents | None):
    """Softmax over all scores at once, in the type of its inputs."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible_pairs(len(q), causal, documents), -torch.inf).softmax(-1) @ v


def expected(tensors: list[torch.Tensor], causal: bool, documents: Documents | None) -> list[torch.Tensor]:
    """Output and gradients of the whole attention in float64."""
    *qkv, gradient = (each.double() for each in tensors)
    for each in qkv:
        each.requires_grad_()
    out = whole_attention(*qkv, causal, documents)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def blocks_of_all_ranks(tensors: list[torch.Tensor], layout: SequenceLayout, attention: str) -> list[torch.Tensor]:
    """Output and gradients of the whole sequence, from the blocks of every rank in turn, without messages."""
    q, k, v, gradient = tensors
    found = [torch.zeros_like(each, dtype=torch.float64) for each in (q, q, k, v)]
    held = [torch.from_numpy(layout.positions(rank)).to(q.device) for rank in range(layout.ranks)]
    for rank, mine in enumerate(held):
        merged, plan = MergedAttention(q[:, :, mine], KERNELS[attention]), layout.plan(rank)
        parts = [(block, held[source]) for source, blocks in enumerate(plan.blocks) for block in blocks]
        for block, theirs in parts:
            merged.add(block, k[:, :, theirs], v[:, :, theirs])
        out = merged.out.to(q.dtype)
        gradients = AttentionGradients(gradient[:, :, mine], merged.q, out, merged.lse, merged.kernels)
        for block, theirs in parts:
            sums = [torch.zeros_like(k[:, :, theirs], dtype=merged.lse.dtype) for _ in range(2)]
            gradients.add(block, k[:, :, theirs], v[:, :, theirs], *sums)
            for total, part in zip(found[2:], sums, strict=True):
                total[:, :, theirs] += part
        found[0][:, :, mine], found[1][:, :, mine] = out.double(), gradients.dq.double()
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, EXTREME], ids=str)
def test_blocks_are_the_whole_attention(device, dtype):
    """As the kernels of a device compute them; heads are as wide as CUDA's FlashAttention wants them.

    With extreme scores gradients of q and k nearly vanish: they are differences of large numbers.
    """
    scale, dtype = (EXTREME, torch.float64) if dtype == EXTREME else (1, dtype)
    generator, limits = torch.Generator().manual_seed(0), dict.fromkeys(NAMES, 16 * torch.finfo(dtype).eps)
    made = [torch.randn(2, heads, SEQ, 16, generator=generator).to(dtype) for heads in (6, 2, 2, 6)]
    made[:2] = (each * scale for each in made[:2])
    if scale == EXTREME:
        limits = {"out": 1e-12, "dq": 1e-6, "dk": 1e-6, "dv": 1e-12}
    for causal, documents in itertools.product((True, False), DOCUMENTS):
        whole = expected(made, causal, documents)
        for split, attention in itertools.product(CP_SPLITS, KERNELS):
            layout = SequenceLayout(split, SEQ, 4, documents, causal)
            found = blocks_of_all_ranks([each.to(device) for each in made], layout, attention)
            for name, ours, theirs in zip(NAMES, found, whole, strict=True):
                difference = ((ours.cpu() - theirs).norm() / theirs.norm()).item()
                assert difference < limits[name], (layout, attention, name, difference)


def test_no_pair_is_computed_in_vain_and_no_key_travels_too_far():
    """Between two ranks there is one block at most, where no documents are masked: the formula has its pairs."""
    assert sequence_layouts.SPLITS == CP_SPLITS, "the flag has other values than the mechanism"
    for split, ranks, causal, documents in itertools.product(CP_SPLITS, (1, 2, 3, 4, 6), (True, False), DOCUMENTS):
        layout = SequenceLayout(split, SEQ, ranks, documents, causal)
        held, needed = [layout.positions(rank) for rank in range(ranks)], torch.zeros(ranks, ranks)
        visible = visible_pairs(len(documents or "1"), causal, documents)[:, 0]
        for rank, source in itertools.product(range(ranks), repeat=2):
            expected, hop = visible[:, held[rank]][:, :, held[source]].sum().item(), (rank - source) % ranks
            pairs = [block.pairs for block in layout.plan(rank).blocks[source]]
            assert sum(pairs) == expected and all(pairs), layout
            assert documents or len(pairs) == (expected > 0), layout
            assert documents or not causal or cost.hop_pairs(split, rank, hop, SEQ, ranks) == expected, layout
            needed[source, hop] = expected
        furthest = tuple(int(hops.nonzero()[-1]) for hops in needed)
        assert all(layout.plan(rank).reach == furthest for rank in range(ranks)), layout


def test_order_of_tokens_is_the_same_for_all_documents():
    """Micro-batches have other documents, and no new order, which would have to be copied to the device."""
    q, k, v = (torch.randn(2, 2, SEQ, 16) for _ in range(3))
    sequence_layouts.rank_order.cache_clear()
    for documents in DOCUMENTS:
        ulysses_attention(q, k, v, Group("cp", (0,), 0), documents=documents)
    assert sequence_layouts.rank_order.cache_info()[:2] == (len(DOCUMENTS) - 1, 1)  # hits and misses


def test_documents_begin_after_the_end_of_another():
    """The first one begins at 0. What ends with the sequence has no follower in it; two ends in a row are a document of
    one token. All ranks know the documents of the whole sequence.
    """
    tokens = torch.tensor([[5, 0, 0, 7, 8, 0, 9, 9, 1], [1, 2, 3, 4, 5, 6, 7, 0, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0]])
    config = configure(6, "--seq-len 8 --cp 2 --device cpu --mask-documents", 2)
    for rank in range(2):
        mesh = SimpleNamespace(cp=SimpleNamespace(size=2, rank=rank), device=torch.device("cpu"))
        *_, documents = take_part(tokens[:, :-1], tokens[:, 1:], config, mesh, end=0)
        assert documents == ((0, 2, 3, 6), (0,), (0, 1))


@pytest.mark.parametrize(
    "capability, dtype, width, taken",
    [
        ((8, 0), torch.float16, 64, True),
        ((9, 0), torch.bfloat16, 256, True),
        ((7, 5), torch.float16, 64, False),  # a T4: FlashAttention begins with Ampere
        ((9, 0), torch.float32, 64, False),
        ((9, 0), torch.float16, 12, False),
        ((9, 0), torch.float16, 264, False),
    ],
)
def test_where_a_gpu_has_flash_attention(capability, dtype, width, taken):
    """Elsewhere blocks are computed with stored scores; and one rank's attention finds a kernel for its types."""
    q, k, v = (torch.randn(1, heads, 5, width).to(dtype).as_subclass(OnCuda) for heads in (4, 2, 2))
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert attention_block._has_kernel(q) == taken
        with mock.patch.object(F, "scaled_dot_product_attention") as kernel:
            fused_attention(q, k, v)
    heads = kernel.call_args.args[1].shape[1]  # of keys: only FlashAttention groups queries by them
    assert heads == (4 if capability < (8, 0) or dtype == torch.float32 else 2)
