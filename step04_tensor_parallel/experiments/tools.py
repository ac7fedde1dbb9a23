"""What the experiments of this step share: a shape, the ways to divide it, and its forward and loss in pieces."""

import torch

from common.drawing.figures import SERIES
from common.experiments.training_step import Training, checked
from common.process_groups import Mesh
from step04_tensor_parallel import train
from step04_tensor_parallel.cost import Way
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
COLOURS = dict(zip(("no SP", "SP, plain", "SP, overlap"), SERIES))


def way_of(flags: dict) -> Way:
    """The same flags, as `cost.py` knows them."""
    return Way(flags.get("sequence_parallel", True), flags["tp_mode"], flags.get("recompute") == "full")


def training(mesh: Mesh, flags: dict) -> Training:
    """On a rank: train.py's step with these flags."""
    return Training(train, *checked(mesh, **flags))


def logits_and_targets(run: Training) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's forward of the first micro-batch."""
    model, zero, _ = run.parts
    zero.gather()
    tokens, targets = run.batches.micro_batch(0, 0, run.config.micro_batch, run.mesh.dp)
    return model(tokens), targets


def loss(run: Training, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over its tokens."""
    return vocab_parallel_cross_entropy_sum(logits, targets, run.config.model_config.vocab, run.mesh.tp)
