"""What the experiments of this step share: train.py's own step with one batch for looking inside, and colours."""

import json
from pathlib import Path

import torch

from common.config import TrainConfig
from common.experiments.local_ranks import train_quietly
from common.experiments.training_step import Training
from common.process_groups import Degrees, build_mesh
from common.tracing.tracer import Tracer
from step01_single_gpu import train

MIB = 2**20
HEADER = ("", "predicted", "measured", "ratio")
MODES = {"none": "#8C2D31", "selective": "#C44E52", "full": "#E8A0A2"}  # of recomputation: shades of activations


class OneBatch:
    """In place of a corpus: the same random sequences in every step."""

    def __init__(self, config: TrainConfig, device: torch.device):
        shape, generator = (config.global_batch, config.seq_len), torch.Generator().manual_seed(1)
        ids = torch.randint(config.model_config.vocab, (2, *shape), generator=generator).to(device)
        self.tokens, self.targets = ids  # each (global_batch, seq)
        self.target_tokens = self.targets.numel()

    def micro_batch(self, step: int, index: int, size: int, device=None) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(index * size, (index + 1) * size)
        return self.tokens[rows], self.targets[rows]


class OneProcess(Training):
    """train.py's step on one random batch, in one process: see `Training` for what it can do."""

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu"):
        mesh = build_mesh(Degrees(), torch.device(device))
        super().__init__(train, config, mesh, OneBatch(config, mesh.device))
        self.model, self.gradient_sums, _ = self.parts
        self.parameters, self.scaler = self.optimizer.parameters, self.optimizer.scaler

    def step(self, tracer: Tracer | None = None) -> tuple[float, float, bool]:
        """Take a step at the full learning rate. Returns loss, gradient norm, and whether the update was applied."""
        numbers = self.take(self.config.warmup, tracer)
        return numbers["loss"], numbers["grad_norm"], self.scaler.accept(numbers["grad_norm"])

    def state(self) -> list[torch.Tensor]:
        """Return what is alive between two steps."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.parameters, *self.optimizer.masters, *moments, self.batches.tokens]


def train_in(folder: str | Path, **flags) -> list[dict]:
    """Run train.py's own train() in this process. Returns the lines of its metrics.jsonl."""
    train_quietly(train.train, **flags, run_dir=str(folder))
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
