"""Which activations a rank keeps, to the byte, in every form; and the loss: in one copy of the logits, and right.

Memory is looked at on four ranks, and on two by the tests of the mutants, before they break something.
"""

import itertools
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from common.config import TrainConfig
from common.group import Group
from common.measure.saved_tensors import SavedTensors
from common.model import Decoder
from common.model_config import LatentShape, ModelConfig
from common.process_groups import Degrees, Mesh, build_mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.running.memory_meter import MemoryMeter
from step04_tensor_parallel import vocab_parallel
from step04_tensor_parallel.apply_tensor_parallel import apply_tensor_parallel
from step04_tensor_parallel.cost import Way, block_activations
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from tests.harness.ranks import run_ranks

MODEL = ModelConfig(vocab=250, hidden=32, layers=1, heads=8, kv_heads=4, ffn=48, tie_embeddings=False)
BATCH, SEQ = 3, 16
FORMS = [(True, "plain"), (True, "overlap"), (True, "chunked"), (False, "plain"), (False, "overlap")]


def tp_mesh() -> Mesh:
    return build_mesh(Degrees(tp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"))


def decoder(mesh: Mesh, model_config: ModelConfig, form: tuple, dtype=torch.float32) -> Decoder:
    sequence_parallel, mode = form
    config = TrainConfig(tp=mesh.tp.size, sequence_parallel=sequence_parallel, tp_mode=mode)
    config.model_config = model_config  # instead of a preset's
    model = Decoder(model_config)
    apply_tensor_parallel(model, config, mesh)
    materialise(model, dtype, mesh.device, random_values(0))
    return model


def stream(mesh: Mesh, form: tuple, dtype=torch.float32) -> torch.Tensor:
    """What enters a block of `MODEL`: hidden states, under sequence parallelism of this rank's part of the sequence."""
    return torch.randn(BATCH, SEQ // mesh.tp.size if form[0] else SEQ, MODEL.hidden).to(dtype).requires_grad_()


DTYPES = torch.float32, torch.bfloat16
KINDS = list(itertools.product(FORMS, DTYPES))
LATENT = LatentShape(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
LATENTS = {"none": None, "queries": LATENT, "keys": replace(LATENT, q_rank=0, value_dim=12)}


def model_of(world: int, latent: str) -> ModelConfig:
    """On four ranks, two share a K/V head; of latent attention, each head has its own."""
    if LATENTS[latent]:
        return replace(MODEL, kv_heads=MODEL.heads, latent=LATENTS[latent])
    return MODEL if world < 4 else replace(MODEL, kv_heads=world // 2)


def kept(form: tuple, world: int, dtype: torch.dtype, latent: str) -> int:
    """The lesson's formula for the block, and what the ends of the model and its loss keep."""
    model = model_of(world, latent)
    sequence_parallel, mode = form
    size, tokens = dtype.itemsize, BATCH * SEQ
    mine = tokens // world if sequence_parallel else tokens
    tables = 2 * SEQ * model.rotary_width * 4  # cos and sin
    embedding = tokens * (8 + 1)  # which row of mine, and whether it is mine at all
    norm = mine * (MODEL.hidden * (4 + size) + 4)
    head = (tokens if mode == "plain" else mine) * MODEL.hidden * size  # its input, in mode plain gathered
    block = sum(block_activations(model, BATCH, SEQ, dtype, world, Way(*form)).values())
    loss = tokens * (-(-MODEL.vocab // world) * 4 + 8 + 1)  # probabilities, the target's column, and whose it is
    return tables + embedding + block + norm + head + loss


def ranks_saved() -> list[int]:
    mesh, result = tp_mesh(), []
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    for form, dtype, latent in itertools.product(FORMS, DTYPES, LATENTS):
        model = decoder(mesh, model_of(mesh.tp.size, latent), form, dtype)
        with SavedTensors(model) as saved:
            loss = vocab_parallel.vocab_parallel_cross_entropy_sum(model(tokens), tokens, MODEL.vocab, mesh.tp)
        assert loss.requires_grad, "the graph is alive"
        result.append(saved.bytes)
    return result


def check_saved(ranks: list[list[int]]) -> None:
    kinds = list(itertools.product(FORMS, DTYPES, LATENTS))
    expected = [kept(form, len(ranks), dtype, latent) for form, dtype, latent in kinds]
    for found in ranks:
        assert dict(zip(kinds, found, strict=True)) == dict(zip(kinds, expected))


def test_saved_activations_are_predicted_to_the_byte():
    check_saved(run_ranks(4, ranks_saved))


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


def test_the_loss_works_in_one_copy_of_a_ranks_logits():
    check_loss_memory(run_ranks(4, ranks_loss_memory))


# ---- the loss beside dense mathematics -------------------------------------------------------------------------------

VOCABULARIES = (12, 10, 5, 2, 1)  # on 4 ranks: divisible, padded, one rank and three ranks of nothing but padding
LOGITS = {
    "ordinary": lambda logits: logits,
    "large": lambda logits: 1e4 * logits,  # exp() of it overflows
    "shifted up": lambda logits: logits + 1e4,
    "one stands out": lambda logits: torch.where(logits == logits.amax(-1, keepdim=True), logits + 1e4, logits),
}


def padded(whole: torch.Tensor, group: Group, value: float) -> torch.Tensor:
    """This rank's part of a tensor with one column per token id; those that pad it are `value`."""
    padding = whole.new_full((*whole.shape[:-1], -whole.shape[-1] % group.size), value)
    return torch.cat((whole, padding), -1).chunk(group.size, -1)[group.rank].clone()


def ranks_losses() -> dict[tuple, tuple]:
    """Beside F.cross_entropy, with every id as a target and rubbish in the logits of the padding."""
    group, found = tp_mesh().tp, {}
    for vocab, name, dtype in itertools.product(VOCABULARIES, LOGITS, (torch.float64, torch.bfloat16)):
        targets, wide = torch.arange(2 * vocab).view(2, -1) % vocab, torch.promote_types(dtype, torch.float32)
        whole = torch.randn(*targets.shape, vocab, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        whole = LOGITS[name](whole).to(dtype).requires_grad_()
        logits = padded(whole.detach(), group, 1e6)
        before = logits.clone()
        expected = F.cross_entropy(whole.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")
        total = vocab_parallel_cross_entropy_sum(logits.requires_grad_(), targets, vocab, group)
        (expected * 0.3).backward()
        (total * 0.3).backward()
        ours, theirs = (total, logits.grad, logits), (expected, padded(whole.grad, group, 0.0), before)
        found[vocab, name, dtype] = [each.detach() for each in ours], [each.detach() for each in theirs]
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_dense_mathematics(world):
    """In bfloat16 to half of the last bit of a probability."""
    for case, pair in itertools.chain(*(found.items() for found in run_ranks(world, ranks_losses))):
        for ours, theirs in zip(*pair, strict=True):
            near = 2.0**-9 if torch.bfloat16 in case else 1e-12
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near, msg=partial("{}: {}".format, case))
