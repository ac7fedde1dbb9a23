"""Attention in the blocks of all ranks: outputs and gradients against one plain attention to the whole sequence."""

import itertools

import pytest
import torch

from common.config import CP_SPLITS
from step06_context_parallel.attention_block import AttentionGradients, MergedAttention
from step06_context_parallel.layouts import Documents, Layout

SEQ, NAMES = 48, ("out", "dq", "dk", "dv")
DOCUMENTS = (
    None,
    ((0, 5, 6, 17), (0, 20)),
    ((0,), (0, 6, 8, 12, 13, 36)),  # they begin where a rank's part or chunk does; one has a single token
    ((0,), tuple(range(SEQ))),
)
EXTREME = 20.0  # for scores of hundreds: exponentials would overflow, ranks whose keys lose have no weight


def whole_attention(q, k, v, causal: bool, documents: Documents | None):
    """Softmax over all scores at once, in the type of its inputs."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    samples, positions = q.shape[0], torch.arange(q.shape[2])
    hidden = (positions[None, :] > positions[:, None]) & torch.tensor(causal)
    hidden = hidden.repeat(samples, 1, 1, 1)
    for sample, starts in enumerate(documents or ()):
        number = torch.bucketize(positions, torch.tensor(starts), right=True)
        hidden[sample] |= number[:, None] != number[None, :]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def expected(tensors: list[torch.Tensor], causal: bool, documents: Documents | None) -> list[torch.Tensor]:
    """Output and gradients of the whole attention in float64."""
    *qkv, gradient = (each.double() for each in tensors)
    for each in qkv:
        each.requires_grad_()
    out = whole_attention(*qkv, causal, documents)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def blocks_of_all_ranks(tensors: list[torch.Tensor], layout: Layout, fused: bool) -> list[torch.Tensor]:
    """Output and gradients of the whole sequence, from the blocks of every rank in turn, without messages."""
    q, k, v, gradient = tensors
    found = [torch.zeros_like(each, dtype=torch.float64) for each in (q, q, k, v)]
    held = [torch.from_numpy(layout.positions(rank)).to(q.device) for rank in range(layout.ranks)]
    for rank, mine in enumerate(held):
        merged, plan = MergedAttention(q[:, :, mine], fused), layout.plan(rank)
        parts = [(block, held[source]) for source, blocks in enumerate(plan.blocks) for block in blocks]
        for block, theirs in parts:
            merged.add(block, k[:, :, theirs], v[:, :, theirs])
        out = merged.out.to(q.dtype)
        gradients = AttentionGradients(gradient[:, :, mine], merged.q, out, merged.lse, fused)
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
    random, limits = torch.Generator().manual_seed(0), dict.fromkeys(NAMES, 16 * torch.finfo(dtype).eps)
    made = [torch.randn(2, heads, SEQ, 16, generator=random).to(dtype) for heads in (6, 2, 2, 6)]
    made[:2] = (each * scale for each in made[:2])
    if scale == EXTREME:
        limits = {"out": 1e-12, "dq": 1e-6, "dk": 1e-6, "dv": 1e-12}
    for causal, documents in itertools.product((True, False), DOCUMENTS):
        whole = expected(made, causal, documents)
        for split, fused in itertools.product(CP_SPLITS, (True, False)):
            layout = Layout(split, SEQ, 4, documents, causal)
            found = blocks_of_all_ranks([each.to(device) for each in made], layout, fused)
            for name, ours, theirs in zip(NAMES, found, whole, strict=True):
                difference = ((ours.cpu() - theirs).norm() / theirs.norm()).item()
                assert difference < limits[name], (layout, fused, name, difference)
