"""What the experiments of this step share: train.py's own parts for looking inside a step, and colours."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from common.config import TrainConfig
from common.experiments.local_ranks import train_quietly
from common.model import cross_entropy_sum
from common.process_groups import Degrees, build_mesh
from common.reductions import gradient_norm
from step01_single_gpu.mixed_precision import LossScaler, clip_factor
from step01_single_gpu.train import build, train

MIB = 2**20
HEADER = ("", "predicted", "measured", "ratio")
MODES = {"none": "#8C2D31", "selective": "#C44E52", "full": "#E8A0A2"}  # of recomputation: shades of activations


class Run:
    """Model, gradients and optimizer as train.py builds them, with one random batch; one process, no run record."""

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu"):
        self.config, self.device = config, torch.device(device)
        self.mesh = build_mesh(Degrees(), self.device)
        self.model, self.gradients, self.optimizer = build(config, self.mesh)
        self.parameters, self.scaler = self.optimizer.parameters, LossScaler(config.torch_dtype)
        generator = torch.Generator().manual_seed(1)
        shape = (config.global_batch, config.seq_len)
        ids = torch.randint(config.model_config.vocab, (2, *shape), generator=generator).to(self.device)
        self.tokens, self.targets = ids  # each (global_batch, seq)

    def accumulate(self, phase: Callable = lambda name: contextlib.nullcontext()) -> float:
        """Run forward and backward of all micro-batches. Returns the mean loss of the global batch."""
        loss = 0.0
        for first in range(0, self.config.global_batch, self.config.micro_batch):
            rows = slice(first, first + self.config.micro_batch)
            with phase("forward"):
                share = cross_entropy_sum(self.model(self.tokens[rows]), self.targets[rows]) / self.tokens.numel()
            with phase("backward"):
                (share * self.scaler.scale).backward()
            loss += share.item()
        return loss

    def step(self, phase: Callable = lambda name: contextlib.nullcontext()) -> tuple[float, float, bool]:
        """Take one optimizer step. Returns mean loss, gradient norm, and whether the update was applied."""
        loss = self.accumulate(phase)
        with phase("optimizer"):
            gradients = self.gradients.finish()
            norm = gradient_norm(self.parameters, gradients, self.mesh.world) / self.scaler.scale
            factor = clip_factor(norm, self.config.clip) / self.scaler.scale
            self.optimizer.step(gradients, self.config.lr, factor, self.scaler.overflow(norm))
        norm = norm.item()
        taken = self.scaler.accept(norm)
        self.optimizer.updates += taken
        return loss, norm, taken

    def state(self) -> list[torch.Tensor]:
        """Return what is alive between two steps."""
        moments = [value for state in self.optimizer.inner.state.values() for value in state.values()]
        return [*self.parameters, *self.optimizer.masters, *moments, self.tokens, self.targets]


def train_in(folder: str | Path, **flags) -> list[dict]:
    """Run train.py's own train() in this process. Returns the lines of its metrics.jsonl."""
    train_quietly(train, **flags, run_dir=str(folder))
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
