"""Latent attention: what travels, how K and V come of it on other ranks, and the form that needs neither."""

import pytest
import torch

from common.costs.vocabulary import Message, added
from common.latent_attention import Expansion
from common.model import naive_attention
from common.model_config import LatentShape
from common.presets import PRESETS
from step04_tensor_parallel.cost import Way
from step04_tensor_parallel.cost import messages as tensor_messages
from step06_context_parallel import cost
from step06_context_parallel.expansion import OfLatents
from step08_5d.absorbed_attention import absorbed_attention
from tests.harness import accounting
from tests.harness.observing import configure
from tests.harness.ranks import run_ranks
from tests.parity.cases import ALL

SHAPE = LatentShape(q_rank=0, kv_rank=10, nope_dim=6, rope_dim=4, value_dim=5)


def made(heads: int = 3, batch: int = 2, seq: int = 7) -> tuple[torch.Tensor, ...]:
    """Queries, latents, rotated keys and the weight that expands, all of which want gradients."""
    shapes = (batch, heads, seq, SHAPE.key_width), (batch, 1, seq, SHAPE.kv_rank), (batch, 1, seq, SHAPE.rope_dim)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(each, generator=generator).double() for each in (*shapes, (heads * SHAPE.pair_width, 10))]
    return tuple(each.requires_grad_() for each in tensors)


def expanded(latent, key, weight):
    return Expansion(weight, SHAPE).arrange(latent.squeeze(1) @ weight.t(), key)


def test_the_absorbed_form_is_the_same_attention():
    q, latent, key, weight = made()
    whole = naive_attention(q, *expanded(latent, key, weight))
    absorbed = absorbed_attention(q, latent, key, Expansion(weight, SHAPE))
    for ours, theirs in zip(
        (absorbed, *torch.autograd.grad(absorbed.square().sum(), (q, latent, key, weight))),
        (whole, *torch.autograd.grad(whole.square().sum(), (q, latent, key, weight))),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    shape = PRESETS["deepseek-v3"].latent
    assert (2 * shape.kv_rank + shape.rope_dim, shape.key_width + shape.value_dim) == (1088, 320), "a pair of tokens"


def test_gradients_are_folded_as_autograd_would():
    """Those of two parts of a sequence, one after the other: the weight's is their sum."""
    _, latent, key, weight = made()
    k, v = expanded(latent, key, weight)
    gradients = [torch.randn_like(each) for each in (k, v)]
    expected = torch.autograd.grad((k, v), (latent, key, weight), gradients)
    keys, found = OfLatents(Expansion(weight.detach(), SHAPE)), []
    for part in (slice(0, 3), slice(3, 7)):
        kv = [each.detach()[:, :, part] for each in (latent, key)]
        for ours, theirs in zip(keys.expand(kv), (k, v), strict=True):
            torch.testing.assert_close(ours, theirs[:, :, part])
        found.append(keys.fold(kv, [each[:, :, part] for each in gradients]))
    found = [torch.cat(parts, dim=2) for parts in zip(*found, strict=True)]
    for ours, theirs in zip((*found, *keys.weight_gradients()), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_a_token_sends():
    """The numbers of the lesson: DeepSeek-V3, and V2-Lite with its 16 heads."""
    shape = PRESETS["deepseek-v3"].latent
    assert shape.shared_width == 576 and 128 * (shape.key_width + shape.value_dim) == 40960
    assert 16 * (shape.key_width + shape.value_dim) / shape.shared_width == pytest.approx(8.9, abs=0.02)


# ---- what ranks send -------------------------------------------------------------------------------------------------

MODEL = "--layers 2 --hidden 64 --heads 4 --kv-heads 4 --ffn 48 --vocab 256 --seq-len 32 --latent 24,16,8,4,10"
MODEL += " --steps 1 --global-batch 2 --micro-batch 2 --data synthetic --device cpu --peak-tflops 1"
TENSOR, CONTEXT = ["--tp 2"], ["--cp 2 --cp-split contiguous --recompute full"]
if ALL:
    TENSOR += ["--tp 2 --tp-mode plain", "--tp 2 --tp-mode chunked --recompute full"]
    TENSOR += ["--tp 2 --no-sequence-parallel", "--tp 2 --latent 0,16,8,4,10"]
    CONTEXT += ["--cp 2", "--cp 2 --cp-mode allgather"]


def ranks_train() -> list[list[tuple]]:
    """(phase, group, op, elements, bytes) of every call, in each case."""
    cases = [*((4, flags) for flags in TENSOR), *((6, flags) for flags in CONTEXT)]
    return [accounting.log(step, f"{MODEL} {flags}").rows for step, flags in cases]


def test_ranks_send_what_the_formulas_say():
    ranks = run_ranks(2, ranks_train)
    for flags, rows in zip(TENSOR, ranks[0], strict=False):
        config = configure(4, f"{MODEL} {flags}", 2)
        way = Way(config.sequence_parallel, config.tp_mode, config.recompute == "full")
        calls = [
            Message(row[1], row[2], row[4], 1) for row in rows if row[1] in ("tp", "world") and row[2] != "receive"
        ]
        assert added(calls) == added(tensor_messages(way, 2, config.model_config, 2, 32)), flags
    for index, flags in enumerate(CONTEXT, len(TENSOR)):
        config = configure(6, f"{MODEL} {flags}", 2)
        width = cost.pair_width(config.model_config) / 2
        size = cost.layer_bytes(config.cp_mode, config.cp_split, 2, 64, 0, width, 4, 4)
        if config.recompute == "full":
            size["backward"] += size["forward"]
        for phase, expected in size.items():
            rows = [row for rank in ranks for row in rank[index] if row[:2] == (phase, "cp")]
            assert sum(row[4] for row in rows) == 2 * 2 * expected, (flags, phase)  # layers, and ranks
