"""What the tests of step 4 share: divided models, and what enters them."""

import os

import torch

from common.config import TrainConfig
from common.model import Decoder
from common.model_config import ModelConfig
from common.process_groups import Degrees, Mesh, build_mesh
from common.weights.initialisation import materialise, random_values
from step04_tensor_parallel.tensor_parallel import apply_tensor_parallel

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
