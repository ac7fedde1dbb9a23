"""FlashAttention beyond `test_kernels`: other tiles, extreme scores, sums over long sequences."""

import itertools
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

from step08_5d.gpu_ladder.traffic import BytesMoved
from step08_5d.kernels import flash_attention as forward
from step08_5d.kernels import flash_attention_backward as backward
from step08_5d.kernels.flash_attention import attend
from step08_5d.kernels.flash_attention_backward import attend_backward
from step08_5d.kernels.merge import merge_reference
from tests.mechanisms.step08.kernels.case import DEVICE, Maker
from tests.mechanisms.step08.kernels.cases import BLOCKS, KERNELS
from tests.mechanisms.step08.kernels.compare import (
    DTYPES,
    TOLERANCE,
    assert_same,
    difference,
    needs_triton,
    on_cpu,
    random,
    use_tiles,
)

pytestmark = needs_triton
CASE = KERNELS["block of attention"].case


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    if "gpu" not in request.keywords:
        use_tiles(monkeypatch)


@pytest.mark.parametrize("size", BLOCKS[1:-1], ids=str)
def test_tiles_with_more_keys_than_queries(size, monkeypatch):
    """The causal edge of one runs through two tiles of queries; in `test_kernels`, of keys."""
    use_tiles(monkeypatch, 16, 32)
    assert_same(CASE(Maker(torch.float64), *size))


@pytest.mark.parametrize("share", [4, 3, 1])
def test_programs_that_divide_the_heads_of_a_group(share, monkeypatch):
    """Seven heads: 4 and 3, 3 and 3 and 1, each alone; one and two tiles of keys."""
    monkeypatch.setattr(backward, "heads_of_program", lambda *_: share)
    for dtype, *size in ((torch.float64, 1, 14, 2, 17, 8), (torch.bfloat16, 2, 7, 1, 9, 8)):
        assert_same(KERNELS["attention on a rank of tp 4"].case(Maker(dtype), *size))


def test_there_are_programs_enough():
    """About two for each multiprocessor, or as many as there are heads; and no more sums than the docstring says."""
    with mock.patch.object(backward, "processors", lambda device: 132):
        share = {case: backward.heads_of_program(*case, None) for case in itertools.product(range(1, 33), range(400))}
    for (group, programs), each in share.items():
        parts = -(-group // each)
        assert 1 <= each <= group and (each == group or parts * programs <= 5.25 * 132)
        assert each == 1 or parts * programs >= 1.75 * 132 and (each == group or programs < 1.75 * 132)
    # Llama 3 8B with 4,096 tokens in tiles of 128; on a rank of tp 2, 4 and 8
    assert [share[4, 32 * heads] for heads in (8, 4, 2, 1)] == [4, 2, 1, 1]


def test_scores_in_the_hundreds():
    """Their exponentials would overflow, and the largest score so far grows many times."""
    case = CASE(Maker(torch.float64), 40, 40, 16, 1, True, 20.0)
    case.slack = 1e4  # dq and dk are differences of near equals
    assert_same(case)


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


def test_eager_bytes_of_merging():
    shape, dtypes = (2, 8, 512, 64), (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    with torch.device("meta"), BytesMoved() as moved:
        so_far, *others = (torch.empty(shape[: 4 - i % 2], dtype=dtype) for i, dtype in enumerate(dtypes))
        merge_reference(so_far, *others)
    assert round(moved.total / so_far.numel()) == 27


def products_of_tiles(causal: bool, monkeypatch) -> list[int]:
    """How many products of tiles the forward and the backward make of 96 queries and keys."""
    count, inputs = Counter(), [random(1, 2, 96, 16, dtype=torch.float64, seed=seed) for seed in range(4)]
    for module in (forward, backward):
        counted = partial(count_call, count, module.__name__, module.multiply_add)
        monkeypatch.setattr(module, "multiply_add", counted)
    *qkv, gradient = inputs
    out, lse = attend(*qkv, causal)
    attend_backward(gradient, *qkv, out, lse, causal)
    monkeypatch.undo()
    return [count[module.__name__] for module in (forward, backward)]


def count_call(count: Counter, name: str, function, *arguments):
    count[name] += 1
    return function(*arguments)


@on_cpu  # the interpreter runs products one by one
@pytest.mark.parametrize("rows, columns", [(16, 16), (32, 16), (16, 32)])
def test_tiles_that_no_query_sees_are_skipped(rows, columns, monkeypatch):
    """In both directions: of tiles below or on the diagonal, as many products as of each without the mask."""
    visible = sum(column < row + rows for row in range(0, 96, rows) for column in range(0, 96, columns))
    counts = []
    for causal in (True, False):
        use_tiles(monkeypatch, rows, columns)
        counts.append(products_of_tiles(causal, monkeypatch))
    for some, every in zip(*counts, strict=True):
        assert some * (96 // rows) * (96 // columns) == every * visible and every > 0


def test_heads_that_are_too_wide():
    with pytest.raises(ValueError, match="width 256 at most, not 288"):
        attend(*CASE(Maker(torch.float64), 4, 4, 288, 1, True).inputs[:3], True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_tiles(dtype, width):
    """In the sizes that are used; and two runs agree bit for bit."""
    case = CASE(Maker(dtype), 777, 777, width, 1, True)
    assert_same(case, bounds={each: 10 * bound for each, bound in TOLERANCE.items()})
    q, k, v, gradient = case.inputs
    out, lse = attend(q, k, v, True)
    first, second = (attend_backward(gradient, q, k, v, out, lse, True) for _ in range(2))
    assert all(map(torch.equal, first, second))
