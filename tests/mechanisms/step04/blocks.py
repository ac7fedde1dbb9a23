"""What the tests of step 4 share: divided models, what enters them, and the log of their collectives."""

import os

import torch

from common.collectives import Call
from common.config import TrainConfig
from common.initialisation import materialise, random_values
from common.model import Decoder
from common.model_config import ModelConfig
from common.process_groups import Degrees, Mesh, build_mesh
from step01_single_gpu.recompute import apply_recompute
from step04_tensor_parallel.tensor_parallel import apply_tensor_parallel

MODEL = ModelConfig(vocab=250, hidden=32, layers=1, heads=8, kv_heads=4, ffn=48, tie_embeddings=False)
BATCH, SEQ = 3, 16
FORMS = [(True, "plain"), (True, "overlap"), (True, "chunked"), (False, "plain"), (False, "overlap")]


def log_of(calls: list[Call]) -> list[tuple]:
    return [(call.op, call.group, call.elements, call.dtype, call.bytes) for call in calls]


def tp_mesh() -> Mesh:
    return build_mesh(Degrees(tp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"))


def decoder(mesh: Mesh, model_config: ModelConfig, form: tuple, dtype=torch.float32, recompute="none") -> Decoder:
    sequence_parallel, mode = form
    config = TrainConfig(tp=mesh.tp.size, sequence_parallel=sequence_parallel, tp_mode=mode)
    config.model_config = model_config  # instead of a preset's
    model = Decoder(model_config)
    apply_tensor_parallel(model, config, mesh)
    apply_recompute(model, recompute)
    materialise(model, dtype, mesh.device, random_values(0))
    return model


def stream(mesh: Mesh, model_config: ModelConfig, form: tuple, dtype=torch.float32, seq=SEQ) -> torch.Tensor:
    """What enters a block: hidden states, under sequence parallelism of this rank's part of the sequence."""
    seq = seq // mesh.tp.size if form[0] else seq
    return torch.randn(BATCH, seq, model_config.hidden).to(dtype).requires_grad_()
