"""FlashAttention against stored scores in float64: alone, and as a block of ring attention."""

import pytest
import torch

from common.model import naive_attention
from step06_context_parallel import attention_block
from step06_context_parallel.layouts import Layout
from step08_5d.gpu_ladder.traffic import BytesMoved
from step08_5d.kernels import flash_attention
from step08_5d.kernels.flash_attention import attend, attend_reference
from step08_5d.kernels.flash_attention_backward import (
    attend_backward,
    attend_backward_reference,
    flash_attention_core,
)
from step08_5d.kernels.merge import merge, merge_reference
from tests.mechanisms.step06.test_attention import blocks_of_all_ranks
from tests.mechanisms.step08.kernels.compare import DEVICE, DTYPES, difference, needs_triton, random

pytestmark = needs_triton
NAMES = "out", "log-sum-exp", "dq", "dk", "dv"
TILES = (32, 16), (16, 32)  # the causal edge of a tile of queries runs through two tiles of keys, and vice versa


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """A short sequence has several of them."""
    rows, columns = getattr(request, "param", TILES[0])
    sizes = {"ROWS": rows, "COLUMNS": columns, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(flash_attention, "tile_sizes", lambda q, kernel: sizes)


with_all_tiles = pytest.mark.parametrize("small_tiles", TILES, ids=str, indirect=True)


def inputs(n: int, m: int, width: int, dtype=torch.float64, kv_heads: int = 1, batch: int = 1, scale: float = 1.0):
    """q, k, v and the gradient of the output, laid out as a linear layer writes them: (batch, seq, heads, d)."""
    shapes = [(batch, length, heads, width) for length, heads in ((n, 2), (m, kv_heads), (m, kv_heads), (n, 2))]
    made = [random(*shape, seed=seed).transpose(1, 2) for seed, shape in enumerate(shapes)]
    return [each.mul(scale if index < 2 else 1).to(dtype) for index, each in enumerate(made)]


def errors(tensors, causal: bool) -> dict[str, float]:
    """The differences from the reference in float64, in units of the type's rounding."""
    q, k, v, gradient = tensors
    out, lse = attend(q, k, v, causal)
    found = out, lse, *attend_backward(gradient, q, k, v, out, lse, causal)
    assert all(each.dtype == q.dtype for each in (out, *found[2:]))
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    *qkv, gradient = (each.double() for each in tensors)
    out, lse = attend_reference(*qkv, causal)
    exact = out, lse, *attend_backward_reference(gradient, *qkv, out, lse, causal)
    compared = zip(NAMES, found, exact, strict=True)
    return {name: difference(a, b) / torch.finfo(a.dtype).eps for name, a, b in compared}


def assert_right(tensors, causal: bool, limits: dict[str, float] | float = 8) -> None:
    for name, error in errors(tensors, causal).items():
        limit = limits[name] if isinstance(limits, dict) else limits
        assert error < limit, f"{name}: {error} units"


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_stored_scores(dtype):
    assert_right(inputs(37, 37, 16, dtype), causal=True)


@with_all_tiles
@pytest.mark.parametrize(
    "n, m, width, kv_heads, causal",
    [(21, 50, 16, 1, False), (50, 16, 24, 2, False), (32, 32, 40, 2, True), (33, 33, 8, 1, True)],
)
def test_shapes(n, m, width, kv_heads, causal):
    """Fewer and more keys than queries, sequences that end at a tile's end or one behind it, widths to be padded."""
    assert_right(inputs(n, m, width, kv_heads=kv_heads), causal)


def test_a_single_token():
    q, k, v, gradient = inputs(1, 1, 16)
    out, lse = attend(q, k, v, True)
    dq, dk, dv = attend_backward(gradient, q, k, v, out, lse, True)
    assert torch.equal(out, v.expand_as(out))  # its only key has all the weight, whatever the score
    assert dq.abs().max() < 1e-15 and dk.abs().max() < 1e-15 and difference(dv, gradient.sum(1, keepdim=True)) < 1e-15


def test_sums_are_not_rounded_on_the_way():
    """A large number, and then many small ones: added to it in bfloat16, they would all be lost."""
    long = torch.full((1, 1, 512, 16), 0.05, device=DEVICE, dtype=torch.bfloat16)
    long[:, :, 0] = 256
    nothing, one, exact = torch.zeros_like(long), long[:, :, :1], long.double().sum(2, keepdim=True)
    out, _ = attend(nothing[:, :, :1], nothing, long, False)  # the mean of all values
    assert difference(out, exact / 512) < 8e-3
    out, lse = attend(nothing, nothing[:, :, :1], one, False)  # all queries see the same value
    *_, dv = attend_backward(long, nothing, nothing[:, :, :1], one, out, lse, False)
    assert difference(dv, exact) < 8e-3


def test_scores_in_the_hundreds():
    """Their exponentials would overflow, and the largest score so far grows many times."""
    tensors = inputs(40, 40, 16, scale=20.0)
    limits = dict.fromkeys(NAMES, 1e3) | {"dq": 1e5, "dk": 1e5}  # which are differences of near equals
    assert_right(tensors, True, limits)


def test_views_and_expanded_gradients():
    """Slices of a longer sequence, as ring attention makes them, and the gradient that `sum` sends back."""
    q, k, v, _ = inputs(60, 60, 16, batch=2)
    tensors = [each[:, :, 11:44] for each in (q, k, v)] + [torch.ones((), device=DEVICE).double().expand(2, 2, 33, 16)]
    assert_right(tensors, causal=True)


def test_as_the_block_of_ring_attention():
    """Two ranks with zigzag chunks, whose blocks are merged by step 6."""
    tensors, layout = inputs(36, 36, 16), Layout("zigzag", 36, 2)
    found = blocks_of_all_ranks(tensors, layout, fused=attention_block.Kernels(attend, attend_backward, merge))
    *qkv, gradient = tensors
    out, lse = attend_reference(*qkv, True)
    exact = out, *attend_backward_reference(gradient, *qkv, out, lse, True)
    assert max(map(difference, found, exact)) < 1e-14


def assert_merges(dtype: torch.dtype = torch.float64) -> None:
    """Two blocks of some rows in the middle, none of them for other rows: as the reference in float64 merges them."""
    wide = torch.promote_types(dtype, torch.float32)
    found = [torch.zeros(2, 50, 3, 24, dtype=wide, device=DEVICE).transpose(1, 2)]
    found.append(torch.full((2, 3, 50), -torch.inf, dtype=wide, device=DEVICE))
    exact = [each.to(torch.float64, copy=True) for each in found]
    for seed in (0, 2):
        out = random(2, 37, 3, 24, seed=seed).to(dtype).transpose(1, 2)
        lse = 9 * random(2, 3, 37, dtype=wide, seed=seed + 1)
        merge(*(each[:, :, 5:42] for each in found), out, lse)
        merge_reference(*(each[:, :, 5:42] for each in exact), out.double(), lse.double())
    (out, lse), (exact_out, exact_lse) = found, exact
    assert lse[:, :, :5].isneginf().all() and lse[:, :, 42:].isneginf().all()
    assert difference(out, exact_out) < 8 * torch.finfo(wide).eps
    assert difference(lse[:, :, 5:42], exact_lse[:, :, 5:42]) < 8 * torch.finfo(wide).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_of_blocks(dtype):
    assert_merges(dtype)


def test_eager_bytes_of_merging():
    shape, dtypes = (2, 8, 512, 64), (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    with torch.device("meta"):
        so_far, *others = (torch.empty(shape[: 4 - i % 2], dtype=dtype) for i, dtype in enumerate(dtypes))
        with BytesMoved() as moved:
            merge_reference(so_far, *others)
    assert round(moved.total / so_far.numel()) == 27


def test_core_of_the_model():
    *qkv, gradient = inputs(20, 20, 16)
    results = []
    for core in (flash_attention_core, naive_attention):
        leaves = [each.detach().requires_grad_() for each in qkv]
        out = core(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
    assert max(map(difference, *results)) < 1e-14


def test_heads_that_are_too_wide():
    with pytest.raises(ValueError, match="width 256 at most, not 288"):
        attend(*inputs(4, 4, 288)[:3], True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_tiles(dtype, width, monkeypatch):
    """In the sizes that are used; and two runs agree bit for bit, since no sum depends on who comes first."""
    monkeypatch.undo()
    tensors = inputs(777, 777, width, dtype)
    assert_right(tensors, causal=True, limits=64)
    out, lse = attend(*tensors[:3], True)
    first, second = (attend_backward(tensors[3], *tensors[:3], out, lse, True) for _ in range(2))
    assert all(map(torch.equal, first, second))
