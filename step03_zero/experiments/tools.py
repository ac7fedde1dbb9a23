"""What the experiments of this step share: the sizes of its units, and train.py's step for looking inside."""

import contextlib
from collections.abc import Callable
from unittest import mock

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.experiments.runs import BUCKET_MB, MODEL
from common.measure.allocator import live_bytes
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh, mesh_of
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step03_zero.by_layer import ZeroByLayer
from step03_zero.experiments.predictions import Model
from step03_zero.train import build

STAGES = (0, 1, 2, 3)
MIB = 2**20
PARTS = ("parameters", "gradients", "optimizer state")
SHAPE = MODEL | {"seq_len": 64, "micro_batch": 1, "bucket_mb": BUCKET_MB}


def regions_of(model: Decoder) -> list[list[int]]:
    """Return the indices of the parameters of each region: the embedding, each layer, the final norm with the head."""
    regions = {}
    for index, (name, _) in enumerate(model.named_parameters()):
        part, _, rest = name.partition(".")
        key = rest.partition(".")[0] if part == "layers" else "embedding" if part == "embedding" else "norm and head"
        regions.setdefault(key, []).append(index)
    return list(regions.values())


def units_of(flags: dict) -> Model:
    """Return the sizes of stage 3's units for these flags, from the shape of the model alone."""
    model = Decoder(TrainConfig(**flags).model_config)
    elements = [parameter.numel() for parameter in model.parameters()]
    units = [sum(elements[index] for index in region) for region in regions_of(model)]
    return Model(tuple(units), model.config.tie_embeddings)


def prefetching(wanted: bool) -> contextlib.AbstractContextManager:
    """Return a context in which stage 3 prefetches, as it always does, or does not."""
    return (
        contextlib.nullcontext() if wanted else mock.patch.object(ZeroByLayer, "_prefetch", lambda zero, region: None)
    )


class Run:
    """Model, gradients and optimizer as train.py builds them on these ranks, step by step, without a run record."""

    def __init__(self, mesh: Mesh, **flags):
        config = TrainConfig(device="cpu", **flags)
        config.resolve_and_check(mesh.world.size)
        self.config, self.mesh = config, mesh_of(config, mesh.device)
        self.batches = load_batches(config, self.mesh)
        self.model, self.zero, self.optimizer = build(config, self.mesh)
        self.gradients: list[torch.Tensor] = []  # the summed ones; the optimizer empties the list

    def loss_share(self, step: int, micro_batch: int) -> torch.Tensor:
        """Run the forward of one micro-batch. Returns this rank's share of the mean loss."""
        place = (self.mesh.dp.rank, self.mesh.dp.size)
        tokens, targets = self.batches.micro_batch(step, micro_batch, self.config.micro_batch, *place)
        return cross_entropy_sum(self.model(tokens), targets) / self.batches.target_tokens

    def accumulate(self, step: int = 0, observe: Callable[[str], None] = lambda phase: None) -> None:
        """Run forward and backward of all micro-batches. Calls `observe` when each phase begins."""
        observe("forward")
        self.zero.gather()
        for index in range(self.config.accumulation_steps):
            share = self.loss_share(step, index)
            observe("backward")
            with self.zero.backward(last=index == self.config.accumulation_steps - 1):
                share.backward()

    def step(self, step: int, observe: Callable[[str], None] = lambda phase: None) -> dict[str, int]:
        """Take one optimizer step. Calls `observe` when each phase begins and, with "end", after the last.

        Returns the bytes that this rank holds: parameters and gradients before the update, optimizer state after it.
        """
        self.accumulate(step, observe)
        # `finish` takes these from the units one by one; whoever counts bytes meanwhile finds them here
        self.gradients = [unit.reduced for unit in self.zero.units if unit.reduced is not None]
        self.gradients = self.zero.finish()
        held = {"parameters": self.parameter_bytes(), "gradients": self.gradient_bytes()}
        observe("optimizer")
        norm = gradient_norm(self.optimizer.parameters, self.gradients, self.mesh.world)
        self.optimizer.step(self.gradients, self.config.learning_rate(step), clip_factor(norm, self.config.clip))
        observe("end")
        states = [value for state in self.optimizer.inner.state.values() for value in state.values() if value.dim()]
        parameters = {shard.untyped_storage().data_ptr() for shard in self.zero.shards}
        masters = [each for each in self.optimizer.masters if each.untyped_storage().data_ptr() not in parameters]
        return held | {"optimizer state": live_bytes([*states, *masters])}

    def parameter_bytes(self) -> int:
        """Return the bytes of parameters in this rank's memory: gathered units, and shards that are no part of one."""
        return live_bytes([tensor for unit in self.zero.units for tensor in (unit.weights, unit.shard)])

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients in this rank's memory: buckets, and summed shards."""
        tensors = [unit.bucket.flat for unit in self.zero.units if unit.bucket is not None]
        tensors += [unit.reduced for unit in self.zero.units if unit.reduced is not None]
        return live_bytes(tensors + self.gradients)


def on_every_case(mesh: Mesh, done: Callable, function: Callable[[Run], object], cases: list[dict]) -> list:
    """On a rank: return what `function` returns for a `Run` with each of the flags in `cases`."""
    results = []
    for flags in cases:
        results.append(function(Run(mesh, **flags)))
        done()
    return results
