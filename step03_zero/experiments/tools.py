"""What the experiments of this step share: its model in numbers, and a training step that can be looked into."""

from collections.abc import Callable

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.measure.allocator import live_bytes
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Degrees, Mesh, build_mesh
from common.reductions import gradient_norm
from step01_single_gpu.mixed_precision import Optimizer, clip_factor
from step01_single_gpu.recompute import apply_recompute
from step02_data_parallel.experiments.tools import BUCKET_MB, MODEL
from step03_zero.experiments.predictions import Model
from step03_zero.zero import Zero

STAGES = (0, 1, 2, 3)
MB = 1e6
PARTS = ("parameters", "gradients", "optimizer")
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}  # Okabe and Ito's palette
SHAPE = MODEL | {"seq_len": 64, "micro_batch": 1, "bucket_mb": BUCKET_MB}


def units_of(flags: dict) -> Model:
    """The units of stage 3 for these flags, from the shape of the model alone."""
    model = Decoder(TrainConfig(**flags).model_config)
    groups = {"embedding": 0} | {f"layers.{index}.": 0 for index in model.layers} | {"": 0}
    for name, parameter in model.named_parameters():
        groups[next(prefix for prefix in groups if name.startswith(prefix))] += parameter.numel()
    return Model(tuple(groups.values()), model.config.tie_embeddings)


class Run:
    """train.py's model, gradients and optimizer on these ranks, step by step, without its record."""

    def __init__(self, mesh: Mesh, **flags):
        config = TrainConfig(device="cpu", **flags)
        config.resolve_and_check(mesh.world.size)
        self.config, self.mesh = config, build_mesh(Degrees.of(config), mesh.device, config.model_config.kv_heads)
        self.batches = load_batches(config, mesh)
        self.model = Decoder(config.model_config)
        apply_recompute(self.model, config.recompute)
        self.zero = Zero(self.model, config, self.mesh)
        self.optimizer, self.summed = Optimizer(self.zero.shards, config), []

    def loss_share(self, step: int, micro_batch: int) -> torch.Tensor:
        """The forward of one micro-batch: this rank's share of the mean loss."""
        place = (self.mesh.dp.rank, self.mesh.dp.size)
        tokens, targets = self.batches.micro_batch(step, micro_batch, self.config.micro_batch, *place)
        return cross_entropy_sum(self.model(tokens), targets) / self.batches.target_tokens

    def accumulate(self, number: int = 0, observe: Callable[[str], None] = lambda moment: None) -> None:
        """Forward and backward of all micro-batches of a step."""
        observe("gather")
        self.zero.gather()
        accumulation = self.config.accumulation_steps
        for index in range(accumulation):
            observe("forward")
            share = self.loss_share(number, index)
            observe("backward")
            with self.zero.no_sync(index < accumulation - 1):
                share.backward()

    def step(self, number: int, observe: Callable[[str], None] = lambda moment: None) -> dict[str, int]:
        """One step. Calls `observe` at its moments. The bytes held: optimizer state after it, the rest before it."""
        self.accumulate(number, observe)
        observe("finish")
        self.summed = summed = self.zero.finish()
        bytes_held = {
            "parameters": self.parameter_bytes(),
            "gradients": self.gradient_bytes(),
        }
        observe("optimizer")
        norm = gradient_norm(self.zero.shards, summed, self.mesh.world).item()
        self.optimizer.step(summed, self.config.learning_rate(number), clip_factor(norm, self.config.clip))
        observe("end")
        states = [value for state in self.optimizer.inner.state.values() for value in state.values() if value.dim()]
        parameters = {shard.untyped_storage().data_ptr() for shard in self.zero.shards}
        masters = [each for each in self.optimizer.masters if each.untyped_storage().data_ptr() not in parameters]
        return bytes_held | {"optimizer": live_bytes([*states, *masters])}

    def parameter_bytes(self) -> int:
        """Bytes of parameters that lie in this rank's memory now: whole units, and shards that are not part of one."""
        return live_bytes([tensor for unit in self.zero.units for tensor in (unit.weights, unit.shard)])

    def gradient_bytes(self) -> int:
        """The same of gradients: whole buckets, shards, and what is about to be added to a shard."""
        tensors = [unit.bucket.flat for unit in self.zero.units if unit.bucket is not None]
        tensors += [unit.reduced for unit in self.zero.units if unit.reduced is not None]
        return live_bytes(tensors + self.summed)
