"""Rotation of q and k in one launch: kernel against the model's `rotate`."""

import pytest
import torch

from common.model import rope_tables, rotate
from common.model_config import ModelConfig
from step08_5d.kernels.rotary import rotary
from tests.mechanisms.step08.kernels.compare import (
    DEVICE,
    DTYPES,
    assert_same,
    eager_bytes,
    needs_triton,
    random,
)

# batch, query heads, key heads, seq, width of a head
SHAPES = {
    "grouped": (2, 4, 2, 5, 8),
    "one key head": (1, 3, 1, 7, 12),
    "one token": (1, 2, 2, 1, 2),
    "no token": (2, 2, 2, 0, 8),
}


def tables(seq: int, width: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    config = ModelConfig(vocab=8, hidden=width, layers=1, heads=1, kv_heads=1, ffn=8, tie_embeddings=True)
    return rope_tables(
        config, torch.arange(seq, device=DEVICE) * 3 + 1, dtype
    )  # as a rank of a split sequence has them


def inputs_of(batch, heads, kv_heads, seq, width, dtype=torch.float64) -> list[torch.Tensor]:
    """q and k as the model has them: views of (batch, seq, heads * width)."""
    flat = [random(batch, seq, each, width, dtype=dtype, seed=each) for each in (heads, kv_heads)]
    return [each.transpose(1, 2) for each in flat]


def test_eager_bytes():
    cos_sin = [torch.empty(64, 16, device="meta") for _ in range(2)]
    found = eager_bytes(rotate, [(1, 32, 64, 16)] * 2, *cos_sin)
    assert [each // (2 * 32 * 64 * 16) for each in found] == [36, 46]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_as_reference(shape, dtype):
    assert_same(rotary, rotate, inputs_of(*shape, dtype=dtype), *tables(shape[3], shape[4], dtype))


@needs_triton
def test_strides():
    q, k = inputs_of(*SHAPES["grouped"])
    cos, sin = tables(5, 8)
    turned, _ = rotary(q, k, cos, sin)
    assert turned.stride() == q.stride()  # the heads of a token stay side by side
    qkv = random(2, 5, 8 * 8).unflatten(-1, (8, 8)).transpose(1, 2)  # one linear layer for q, k and v: q has gaps
    for inputs in ((q.contiguous(), k), (qkv[:, :4], qkv[:, 4:6]), (q, k.mT.contiguous().mT)):
        assert_same(rotary, rotate, [each.detach() for each in inputs], cos, sin)


@needs_triton
def test_the_backward_turns_back():
    q, k = [each.requires_grad_() for each in inputs_of(*SHAPES["grouped"])]
    turned = rotary(q, k, *tables(5, 8))
    back = torch.autograd.grad(turned, (q, k), [each.detach() for each in turned])
    assert all((mine - each).abs().max() < 1e-14 for mine, each in zip(back, (q, k), strict=True))
