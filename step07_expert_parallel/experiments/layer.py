"""What several experiments of this step run on some ranks: one layer of experts, or a training step to look into."""

from collections.abc import Callable
from functools import partial

import torch

from common.config import TrainConfig
from common.experiments import training_step
from common.model import Decoder
from common.process_groups import Mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel import train
from step07_expert_parallel.apply_experts import apply_experts
from step07_expert_parallel.moe import MoE

# A token has as many numbers as it takes for headers of messages not to matter
SHAPE = {"step_name": "step07_expert_parallel", "layers": 1, "hidden": 128, "ffn": 128, "heads": 4, "kv_heads": 4}
SHAPE |= {"experts": 8, "top_k": 2, "expert_ffn": 64, "seq_len": 256, "micro_batch": 2}
SHAPE |= {"balance": "none", "data": "synthetic", "warmup": 1}


def checked(mesh: Mesh, **flags) -> tuple[TrainConfig, Mesh]:
    """The configuration with these flags on the ranks of `mesh`, and its groups. One micro-batch, unless they say."""
    ranks = mesh.world.size // (flags.get("tp", 1) * flags.get("pp", 1))
    return training_step.checked(mesh, **{"global_batch": flags["micro_batch"] * ranks} | flags)


class ExpertLayer:
    """One layer of experts on these ranks, with random tokens: a part of those that one process would have.

    Tokens have something in common (1 is added to all of their numbers), so that some experts are chosen more often.

    Args:
        kind: of the layer, a subclass of `MoE`.
        choose: what takes the place of `Router.choose`, if anything does; see `common.experiments.even_routing`.
    """

    def __init__(self, mesh: Mesh, kind: type = MoE, choose: Callable | None = None, **flags):
        self.config, self.mesh = checked(mesh, **flags)
        shape, dtype = self.config.model_config, self.config.torch_dtype
        with torch.device("meta"):
            model = Decoder(shape)
        apply_experts(model, self.config, self.mesh, LossScaler(dtype))
        built = model.layers["0"].mlp
        self.layer = kind(built.router, built.experts, built.shared, built.ep)
        if choose:
            built.router.choose = partial(choose, built.router)
        materialise(self.layer, dtype, mesh.device, random_values(self.config.seed))
        dp, tp = self.mesh.dp, self.mesh.tp
        size = 2, dp.size, self.config.micro_batch, self.config.seq_len, shape.hidden
        whole = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x, self.gradient = (each.to(dtype).chunk(tp.size, 1)[tp.rank].contiguous() for each in whole[:, dp.rank])
        self.x, self.y = (x + 1).requires_grad_(), None

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.x.shape[0] * self.x.shape[1]

    def forward(self) -> None:
        self.y = self.layer(self.x)

    def backward(self) -> None:
        self.x.grad = None
        self.y.backward(self.gradient)


class Training(training_step.Training):
    """What train.py builds on these ranks, and its `train_step`. Has `pipeline` beside what all steps have."""

    def __init__(self, mesh: Mesh, **flags):
        super().__init__(train, *checked(mesh, **flags))
        self.pipeline = self.parts[0]
