"""Which activations a rank keeps, to the byte, with and without sequence parallelism and in every mode."""

import itertools

import pytest
import torch

from common.model import rope_tables
from common.model_config import ModelConfig
from step01_single_gpu.memory_model.prediction import SavedTensors, saved_activations, total_bytes
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import BATCH, FORMS, MODEL, SEQ, decoder, stream, tp_mesh


def kept_by_block(model: ModelConfig, form: tuple, world: int, dtype: torch.dtype) -> int:
    """Bytes of activations that one rank keeps of one block, with fused attention."""
    sequence_parallel, mode = form
    size, wide, tokens = dtype.itemsize, max(4, dtype.itemsize), BATCH * SEQ
    mine = tokens // world if sequence_parallel else tokens  # tokens of the stream
    gathered = tokens if mode == "plain" else mine  # of what was communicated: plain keeps it
    norm = mine * model.hidden * wide + mine * wide + mine * model.hidden * size  # input, its 1/rms, normalised
    column_input = gathered * model.hidden * size
    heads, kv_heads = model.heads // world, max(1, model.kv_heads // world)
    attention = tokens * (2 * heads + 2 * kv_heads) * model.head_width * size  # q, output, k, v
    attention += tokens * heads * wide  # log-sum-exp
    mlp = 4 * tokens * model.ffn // world * size  # gate, silu(gate), up, their product
    return 2 * norm + 2 * column_input + attention + mlp


def kept_by_model(model: ModelConfig, form: tuple, world: int, dtype: torch.dtype) -> int:
    """The same of the whole model and its loss."""
    sequence_parallel, mode = form
    size, wide, tokens = dtype.itemsize, max(4, dtype.itemsize), BATCH * SEQ
    mine = tokens // world if sequence_parallel else tokens
    gathered = tokens if mode == "plain" else mine
    embedding = 2 * SEQ * model.head_width * wide  # cos and sin
    norm = mine * model.hidden * wide + mine * wide + mine * model.hidden * size
    head = gathered * model.hidden * size
    loss = tokens * -(-model.vocab // world) * wide  # probabilities
    places = 2 * tokens * (8 + 1)  # in embedding and loss: which row of mine, and whether it is mine at all
    return model.layers * kept_by_block(model, form, world, dtype) + embedding + norm + head + loss + places


def ranks_saved():
    mesh, result = tp_mesh(), {}
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    for form, dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16)):
        model, x = decoder(mesh, MODEL, form, dtype), stream(mesh, MODEL, form, dtype)
        rope = rope_tables(MODEL, torch.arange(SEQ), dtype)
        with SavedTensors(model) as block:
            y = model.layers["0"](x, rope)
        tables = sum(table.untyped_storage().nbytes() for table in rope)  # shared by all blocks
        with SavedTensors(model) as whole:
            loss = vocab_parallel_cross_entropy_sum(model(tokens), tokens, MODEL.vocab, mesh.tp)
        result[form, str(dtype).removeprefix("torch.")] = block.bytes - tables, whole.bytes
        assert y.requires_grad and loss.requires_grad, "the graphs are alive"
    return result


def check_saved(ranks: list[dict]) -> None:
    for rank in ranks:
        for (form, dtype), (block, whole) in rank.items():
            kind = getattr(torch, dtype)
            assert block == kept_by_block(MODEL, form, len(ranks), kind), (form, dtype)
            assert whole == kept_by_model(MODEL, form, len(ranks), kind), (form, dtype)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_saved_activations_are_predicted_to_the_byte(world):
    check_saved(run_ranks(world, ranks_saved))


def test_sequence_parallelism_divides_all_of_it():
    """The playbook's 34/t; without it norms and the inputs of blocks stay whole (its 10 + 24/t), as in mode plain do
    the gathered inputs. Step 1's formula is that of one rank."""
    dense = saved_activations(MODEL, BATCH, SEQ, torch.float32)
    whole = total_bytes(saved for saved in dense if saved.name.startswith("layers.0."))
    stream_bytes = BATCH * SEQ * MODEL.hidden * 4
    norms = 2 * (2 * stream_bytes + BATCH * SEQ * 4)
    for world in (1, 2, 4):
        kept = {form: kept_by_block(MODEL, form, world, torch.float32) for form in FORMS}
        assert kept[True, "overlap"] == kept[True, "chunked"] == whole // world
        assert kept[True, "plain"] == whole // world + 2 * (stream_bytes - stream_bytes // world)
        undivided = norms + 2 * stream_bytes
        assert kept[False, "plain"] == kept[False, "overlap"] == undivided + (whole - undivided) // world
