"""Attention alone: outputs and gradients of every mode and split against one plain attention to the whole sequence."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from common.config import CP_MODES, CP_SPLITS
from common.process_groups import Degrees, Group, build_mesh
from step06_context_parallel.all_gather_attention import AllGatherAttention
from step06_context_parallel.attention_block import AttentionGradients, MergedAttention
from step06_context_parallel.layouts import Documents, Layout
from step06_context_parallel.ring_attention import RingAttention
from step06_context_parallel.ulysses_attention import ulysses_attention
from tests.harness.ranks import run_ranks
from tests.parity.pairwise import pairwise

BATCH, SEQ, WIDTH, HEADS = 2, 24, 6, 12
KV_HEADS = {2: (12, 4, 1), 3: (12, 6, 1), 4: (12, 4, 2, 1)}  # by ranks: MHA, GQA, MQA; some are fewer than ranks
EXTREME = 20.0  # scores in the hundreds
KINDS = {  # by ranks: types, and the scale of q and k
    2: [*((each, 1.0) for each in (torch.float32, torch.bfloat16, torch.float16)), (torch.float64, EXTREME)],
    3: [(torch.float64, 1.0)],
    4: [(torch.float64, 1.0)],
}
DOCUMENTS = (
    None,
    ((0, 5, 6, 17), (0, 20)),
    ((0,), (0, 6, 8, 12, 13, 18)),  # they begin where a rank's part or chunk does; one has a single token
    ((0,), tuple(range(SEQ))),
)
CAUSAL, FUSED = (True, False), (True, False)
NAMES = "out", "dq", "dk", "dv"


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


def inputs(kv_heads: int, dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, the same on all ranks; scores are of the order of `scale` squared."""
    random, shapes = torch.Generator().manual_seed(kv_heads), [HEADS, kv_heads, kv_heads, HEADS]
    made = [torch.randn(BATCH, heads, SEQ, WIDTH, generator=random, dtype=torch.float64) for heads in shapes]
    return [each.mul(scale if index < 2 else 1).to(dtype) for index, each in enumerate(made)]


def expected(tensors: list[torch.Tensor], causal: bool, documents: Documents | None) -> list[torch.Tensor]:
    """Output and gradients of the whole attention in float64."""
    *qkv, gradient = (each.double() for each in tensors)
    for each in qkv:
        each.requires_grad_()
    out = whole_attention(*qkv, causal, documents)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def on_this_rank(mode: str, tensors: list[torch.Tensor], layout: Layout, cp: Group, fused: bool) -> list[torch.Tensor]:
    """Output and gradients of this rank's part of the sequence."""
    mine = torch.from_numpy(layout.positions(cp.rank))
    *qkv, gradient = (each[:, :, mine] for each in tensors)
    for each in qkv:
        each.requires_grad_()
    if mode == "ulysses":
        out = ulysses_attention(*qkv, layout, cp, fused)
    else:
        function = RingAttention if mode == "ring" else AllGatherAttention
        out = function.apply(*qkv, layout.plan(cp.rank), cp, fused)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def differences(found: list[torch.Tensor], whole: list[torch.Tensor]) -> dict[str, float]:
    """||a-b|| / ||b|| of the output and of each gradient; infinite if anything in `found` is not finite."""
    pairs = zip(NAMES, found, whole, strict=True)
    ratios = {name: (ours.double() - theirs).norm() / theirs.norm() for name, ours, theirs in pairs}
    return {name: ratio.nan_to_num(torch.inf).item() for name, ratio in ratios.items()}


def ranks_compare(cases: list[tuple]) -> list[dict[str, float]]:
    """The differences of this rank in each case: (mode and split, K/V heads, causal, documents, fused), type, scale."""
    cp, wholes, found = build_mesh(Degrees(cp=dist.get_world_size()), torch.device("cpu")).cp, {}, []
    for case in cases:
        ((mode, split), kv_heads, causal, documents, fused), dtype, scale = case
        layout, tensors = Layout(split, SEQ, cp.size, documents, causal), inputs(kv_heads, dtype, scale)
        key = kv_heads, causal, documents, dtype, scale
        if key not in wholes:
            wholes[key] = expected(tensors, causal, documents)
        results, mine = on_this_rank(mode, tensors, layout, cp, fused), torch.from_numpy(layout.positions(cp.rank))
        assert all(each.dtype == dtype for each in results), case
        found.append(differences(results, [each[:, :, mine] for each in wholes[key]]))
    return found


def cases_of(world: int) -> list[tuple]:
    """All of them with TEST_ALL=1, else all pairs: of a mode with a split, and that with every other choice."""
    ways = list(itertools.product(CP_MODES, CP_SPLITS))
    choices = {"way": ways, "kv_heads": KV_HEADS[world], "causal": CAUSAL, "documents": DOCUMENTS, "fused": FUSED}
    all_pairs = [tuple(case.values()) for case in pairwise(choices)]
    found = itertools.product(*choices.values()) if os.environ.get("TEST_ALL") else all_pairs
    return [(case, *kind) for case in found for kind in KINDS[world]]


def bound(name: str, fused: bool, dtype: torch.dtype, scale: float) -> float:
    """In float64 differences are rounding, which is 2e-15. In narrow types, what takes more units of rounding is not
    the ring: float32 adds up as many terms, and the naive core rounds scores, probabilities and the gradients of each
    query head. Exponentials of scores in the hundreds would overflow, and ranks whose keys lose have a weight of 0 in
    the sum. Gradients of q and k nearly vanish there, since every query sees just one key, so they are the difference
    of large numbers.
    """
    if scale == EXTREME:
        return 1e-6 if name in ("dq", "dk") else 1e4 * torch.finfo(dtype).eps
    if dtype == torch.float64:
        return 1e-13
    return (4 if name == "out" or fused and dtype != torch.float32 else 16) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("world", KINDS)
def test_equals_the_whole_attention(world):
    cases = cases_of(world)
    for rank, found in enumerate(run_ranks(world, ranks_compare, cases, timeout=600)):
        for case, several in zip(cases, found, strict=True):
            for name, difference in several.items():
                limit = bound(name, case[0][-1], *case[1:])
                assert difference < limit, f"rank {rank} of {world}, {case}: {name} differs by {difference}"


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_are_the_whole_attention(device, dtype):
    """As the kernels of a device compute them; heads are as wide as CUDA's FlashAttention wants them."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(BATCH, heads, 48, 16, generator=random).to(dtype) for heads in (6, 2, 2, 6)]
    for split, documents, fused in itertools.product(CP_SPLITS, DOCUMENTS[:3], FUSED):
        found = blocks_of_all_ranks([each.to(device) for each in made], Layout(split, 48, 4, documents), fused)
        wrong = differences([each.cpu() for each in found], expected(made, True, documents))
        assert max(wrong.values()) < 16 * torch.finfo(dtype).eps, (split, documents, fused, wrong)
