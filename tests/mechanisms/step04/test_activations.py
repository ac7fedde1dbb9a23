"""Which activations a rank keeps, to the byte, in every form; and that the loss works in one copy of the logits."""

import itertools
from dataclasses import replace

import pytest
import torch

from common.measure.saved_tensors import SavedTensors
from common.model_config import ModelConfig
from step01_single_gpu.memory_meter import MemoryMeter
from step04_tensor_parallel import vocab_parallel
from step04_tensor_parallel.cost import Way, block_activations, loss_bytes
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import BATCH, FORMS, MODEL, SEQ, decoder, tp_mesh

KINDS = list(itertools.product(FORMS, (torch.float32, torch.bfloat16)))


def model_of(world: int) -> ModelConfig:
    """On four ranks, two share a K/V head."""
    return MODEL if world < 4 else replace(MODEL, kv_heads=world // 2)


def kept(form: tuple, world: int, dtype: torch.dtype) -> int:
    """The lesson's formula for the block, and what the ends of the model and its loss keep."""
    sequence_parallel, mode = form
    size, tokens = dtype.itemsize, BATCH * SEQ
    mine = tokens // world if sequence_parallel else tokens
    tables = 2 * SEQ * MODEL.head_width * 4  # cos and sin
    embedding = tokens * (8 + 1)  # which row of mine, and whether it is mine at all
    norm = mine * (MODEL.hidden * (4 + size) + 4)
    head = (tokens if mode == "plain" else mine) * MODEL.hidden * size  # its input, in mode plain gathered
    block = sum(block_activations(model_of(world), BATCH, SEQ, dtype, world, Way(*form)).values())
    return tables + embedding + block + norm + head + loss_bytes(tokens, MODEL.vocab, world)


def ranks_saved() -> list[int]:
    mesh, result = tp_mesh(), []
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    for form, dtype in KINDS:
        model = decoder(mesh, model_of(mesh.tp.size), form, dtype)
        with SavedTensors(model) as saved:
            loss = vocab_parallel.vocab_parallel_cross_entropy_sum(model(tokens), tokens, MODEL.vocab, mesh.tp)
        assert loss.requires_grad, "the graph is alive"
        result.append(saved.bytes)
    return result


def check_saved(ranks: list[list[int]]) -> None:
    expected = [kept(form, len(ranks), dtype) for form, dtype in KINDS]
    for found in ranks:
        assert dict(zip(KINDS, found, strict=True)) == dict(zip(KINDS, expected))


@pytest.mark.parametrize("world", [2, 4])
def test_saved_activations_are_predicted_to_the_byte(world):
    check_saved(run_ranks(world, ranks_saved))


# ---- the loss --------------------------------------------------------------------------------------------------------

MOSTLY_LOGITS = ModelConfig(vocab=12_001, hidden=8, layers=1, heads=4, kv_heads=4, ffn=8, tie_embeddings=False)
MARK = 123_457  # bytes of an allocation between forward and backward


def ranks_loss_memory():
    """Of a model that is nearly all vocabulary: what the forward allocates at most, what is left of it when the
    backward begins, and what is alive in the backward at most, as multiples of a rank's logits in float32."""
    mesh, result = tp_mesh(), []
    tokens = torch.arange(384).view(2, 192)
    for form, dtype in KINDS:
        model = decoder(mesh, MOSTLY_LOGITS, form, dtype)
        with MemoryMeter("cpu").measure() as measured:
            loss = vocab_parallel.vocab_parallel_cross_entropy_sum(model(tokens), tokens, MOSTLY_LOGITS.vocab, mesh.tp)
            torch.empty(MARK, dtype=torch.uint8)
            loss.backward()
        mark = next(index for index, event in enumerate(measured.allocations) if event.bytes == MARK)
        alive = list(itertools.accumulate((event.bytes for event in measured.allocations), initial=0))
        unit = 4 * tokens.numel() * -(-MOSTLY_LOGITS.vocab // mesh.tp.size)
        result.append([each / unit for each in (max(alive[: mark + 1]), alive[mark], max(alive[mark + 2 :]))])
    return result


def check_loss_memory(ranks: list[list]) -> None:
    """The logits and one copy of them in float32; then the copy alone; its gradient takes its place, in bfloat16 that
    is a tensor of half the size. A fifth is for whatever else the model allocates."""
    for (forward, between, backward), (form, dtype) in itertools.chain(*(zip(rank, KINDS) for rank in ranks)):
        half = dtype.itemsize / 4
        assert 1 + half <= forward < 1.2 + half, (form, dtype)
        assert 1 <= between < 1.2, (form, dtype)
        assert 1 <= backward < (1.2 if dtype == torch.float32 else 1.7), (form, dtype)


@pytest.mark.parametrize("world", [2, 4])
def test_the_loss_works_in_one_copy_of_a_ranks_logits(world):
    check_loss_memory(run_ranks(world, ranks_loss_memory))
