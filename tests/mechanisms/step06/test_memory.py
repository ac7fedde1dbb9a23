"""What a rank keeps for the backward, and what it holds of other ranks."""

import itertools

import pytest
import torch

from common.config import CP_MODES, CP_SPLITS
from common.measure.saved_tensors import SavedTensors
from common.model import Decoder, rope_tables
from common.process_groups import Degrees, Mesh, build_mesh
from common.weights.initialisation import materialise, random_values
from step06_context_parallel import cost
from step06_context_parallel.context_parallel import apply_context_parallel
from step06_context_parallel.experiments.memory import peaks
from step06_context_parallel.experiments.tools import SHAPE as LAYER
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

BATCH, SEQ = 3, 48
SHAPE = f"--hidden 64 --layers 1 --heads 8 --kv-heads 4 --ffn 48 --vocab 256 --seq-len {SEQ} --device cpu"
TYPES = torch.float32, torch.bfloat16


def ranks_measure() -> tuple[dict, dict]:
    return ranks_saved(), ranks_peak()


@pytest.fixture(scope="module", params=[2, 4])
def measured(request) -> list[tuple[dict, dict]]:
    return run_ranks(request.param, ranks_measure)


def ranks_saved() -> dict[tuple, int]:
    """Bytes that a layer keeps, in every mode, split and type."""
    world, result = torch.distributed.get_world_size(), {}
    for mode, split, dtype in itertools.product(CP_MODES, CP_SPLITS, TYPES):
        config = configure(6, f"{SHAPE} --cp {world} --cp-mode {mode} --cp-split {split}")
        mesh, model = mesh_of(config), Decoder(config.model_config)
        apply_context_parallel(model, config, mesh)
        materialise(model, dtype, mesh.device, random_values(0))
        x = torch.randn(BATCH, SEQ // world, 64).to(dtype).requires_grad_()
        rope = rope_tables(config.model_config, torch.arange(SEQ // world), dtype)
        with SavedTensors(model) as layer:
            y = model.layers["0"](x, rope)
        assert y.requires_grad, "the graph is alive"
        result[mode, split, dtype] = layer.bytes - sum(table.untyped_storage().nbytes() for table in rope)
    return result


def test_activations_are_divided(measured):
    """Of a part of the tokens all that step 1 keeps, to the byte: keys and values of others are fetched again."""
    world, model = len(measured), configure(6, SHAPE, 1).model_config
    for found, _ in measured:
        for (mode, split, dtype), kept in found.items():
            whole = SEQ if mode == "ulysses" else 0
            predicted = cost.kept(model, BATCH, SEQ // world, dtype, whole)
            assert kept == predicted + 8 * whole, (mode, split, dtype)


MODES = "ring", "allgather"


def ranks_peak() -> dict[str, dict[str, int]]:
    world = torch.distributed.get_world_size()
    return {mode: peaks_of(mode, build_mesh(Degrees(cp=world), torch.device("cpu"))) for mode in MODES}


def peaks_of(mode: str, mesh: Mesh) -> dict[str, int]:
    """Bytes that the forward and the backward of a layer allocate at most, with 64 tokens on each rank."""
    world = mesh.world.size
    flags = {"micro_batch": 1, "global_batch": 1, "seq_len": 64 * world, "cp": world, "cp_mode": mode}
    return peaks(mesh, LAYER | flags)


def check_peak(ranks: list[dict]) -> None:
    """What the fullest rank allocates beyond one rank alone with as many tokens."""
    world, part, queries = len(ranks), 64 * 4 * 32, 64 * 8 * 32  # tokens, heads, width
    alone = peaks_of("ring", build_mesh(Degrees(), torch.device("cpu")))
    for mode in MODES:
        for phase, predicted in cost.buffers(mode, world, part, 4, 4).items():
            if (mode, phase) == ("allgather", "backward"):
                scattering = cost.while_scattering(world, part, queries, 4, 4)
                predicted = max(predicted, scattering - alone[phase])
            found = max(rank[mode][phase] for rank in ranks) - alone[phase]
            assert found == pytest.approx(predicted, rel=0.01), (mode, phase)


def test_the_ring_holds_two_parts_at_a_time(measured):
    check_peak([peak for _, peak in measured])
