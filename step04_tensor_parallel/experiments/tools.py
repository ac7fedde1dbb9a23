"""What the experiments of this step share: a shape, the ways to divide it, and a step that can be looked into."""

import functools
from collections.abc import Callable

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.drawing.figures import SERIES
from common.process_groups import Degrees, Mesh, build_mesh
from common.tracing.tracer import Tracer
from step01_single_gpu.clipping import gradient_norm
from step04_tensor_parallel.experiments.predictions import Way
from step04_tensor_parallel.partial_sums import sum_extra_groups
from step04_tensor_parallel.train import build
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum

# Grouped queries (8 heads share 4 K/V heads), so that tp 4 leaves one K/V head to each rank
SHAPE = {"layers": 2, "hidden": 256, "ffn": 768, "heads": 8, "kv_heads": 4, "data": "synthetic", "warmup": 1}
SHAPE |= {"seq_len": 128, "micro_batch": 2, "global_batch": 2}

WAYS = {  # name: flags
    "no SP, plain": {"sequence_parallel": False, "tp_mode": "plain"},
    "no SP, overlap": {"sequence_parallel": False, "tp_mode": "overlap"},
    "SP, plain": {"tp_mode": "plain"},
    "SP, overlap": {"tp_mode": "overlap"},
    "SP, chunked": {"tp_mode": "chunked"},
}
RECOMPUTED = {
    f"{name}, full recomputation": WAYS[name] | {"recompute": "full"} for name in ("no SP, plain", "SP, overlap")
}


def way_of(flags: dict) -> Way:
    """The same flags, as the predictions know them."""
    return Way(flags.get("sequence_parallel", True), flags["tp_mode"], flags.get("recompute") == "full")


COLOURS = dict(zip(("no SP", "SP, plain", "SP, overlap"), SERIES))
mesh_of = functools.cache(build_mesh)  # all cases of one layout use the same groups


class Run:
    """train.py's model and gradients on these ranks, without its record and its update."""

    def __init__(self, mesh: Mesh, **flags):
        self.config = config = TrainConfig(device="cpu", **flags)
        config.resolve_and_check(mesh.world.size)
        self.mesh = mesh_of(Degrees.of(config), mesh.device, config.model_config.kv_heads)
        self.batches = load_batches(config, self.mesh)
        self.model, self.zero, optimizer = build(config, self.mesh)
        self.shards = optimizer.parameters

    def logits_and_targets(self, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's forward of one micro-batch."""
        place = (self.mesh.dp.rank, self.mesh.dp.size)
        tokens, targets = self.batches.micro_batch(0, index, self.config.micro_batch, *place)
        return self.model(tokens), targets

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This micro-batch's share of the mean."""
        vocab = self.config.model_config.vocab
        return vocab_parallel_cross_entropy_sum(logits, targets, vocab, self.mesh.tp) / self.batches.target_tokens

    def gradients(self) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches: the finished gradients, one for each of `shards`."""
        phase, accumulation = Tracer(None, self.mesh, None).phase, self.config.accumulation_steps
        self.zero.gather()
        for index in range(accumulation):
            with phase("forward"):
                share = self.loss(*self.logits_and_targets(index))
            with phase("backward"), self.zero.backward(last=index == accumulation - 1):
                share.backward()
        with phase("optimizer"):
            gradients = self.zero.finish()
            sum_extra_groups(self.shards, gradients, self.mesh)
            gradient_norm(self.shards, gradients, self.mesh.world)
        return gradients


def on_every_case(mesh: Mesh, done: Callable, function: Callable, cases: list[dict]) -> list:
    """On a rank: `function(run)` for a `Run` with each of the flags in `cases`."""
    results = []
    for flags in cases:
        results.append(function(Run(mesh, **flags)))
        done()
    return results
