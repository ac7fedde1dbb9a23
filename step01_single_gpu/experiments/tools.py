"""What the experiments share: tables, figures, and the pieces of train.py for looking inside a step."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from common.config import TrainConfig
from common.initialisation import materialise, random_values
from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum
from common.model_config import ModelConfig
from common.process_groups import Group
from common.reductions import gradient_norm
from step01_single_gpu.mixed_precision import GradientSums, LossScaler, Optimizer, clip_factor
from step01_single_gpu.recompute import apply_recompute

figures = Path(__file__).resolve().parent.parent / "figures"  # where save_figure writes
MIB = 2**20


def table(title: str, header: Iterable[str], rows: Iterable[Iterable]) -> None:
    """Print rows under a header, columns as wide as their widest cell."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    print(f"\n{title}")
    for index, row in enumerate(rows):
        cells = (cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        print("  " + "  ".join(cells))
        if index == 0:
            print("  " + "  ".join("-" * width for width in widths))


def compared(predicted: float, measured: float, digits: str = ",.0f", scale: float = 1) -> tuple[str, str, str]:
    """The cells predicted, measured, ratio (measured over predicted)."""
    ratio = f"{measured / predicted:.4f}" if predicted else "-"
    return format(predicted / scale, digits), format(measured / scale, digits), ratio


def save_figure(figure, name: str) -> None:
    """Write NAME.png and say so."""
    import matplotlib.pyplot as plt

    figure.savefig(figure_path(name), dpi=100, bbox_inches="tight")
    plt.close(figure)


def figure_path(name: str) -> Path:
    """Where the figure of this name is to be written; says so."""
    figures.mkdir(parents=True, exist_ok=True)
    print(f"  figure: {figures.name}/{name}.png")
    return figures / f"{name}.png"


class Run:
    """Model, gradients and optimizer as train.py makes them, with one random batch; one process, no run record."""

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu"):
        self.config, self.device = config, torch.device(device)
        self.model = build(config.model_config, config, self.device)
        self.parameters = list(self.model.parameters())
        self.gradients = GradientSums(self.parameters)
        self.optimizer, self.scaler = Optimizer(self.parameters, config), LossScaler(config.torch_dtype)
        generator = torch.Generator().manual_seed(1)
        shape = (config.global_batch, config.seq_len)
        ids = torch.randint(config.model_config.vocab, (2, *shape), generator=generator).to(self.device)
        self.tokens, self.targets = ids  # each (global_batch, seq)

    def accumulate(self, phase: Callable = lambda name: contextlib.nullcontext()) -> float:
        """Forward and backward of all micro-batches; the mean loss of the global batch."""
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
        """One optimizer step: mean loss, gradient norm, and whether the step was taken."""
        loss = self.accumulate(phase)
        with phase("optimizer"):
            total = self.gradients.finish()
            norm = gradient_norm(self.parameters, total, Group("world", (0,), 0)).item() / self.scaler.scale
            factor = clip_factor(norm, self.config.clip) / self.scaler.scale
            taken = self.scaler.accept(norm)
            if taken:
                self.optimizer.step(total, self.config.lr, factor)
        return loss, norm, taken

    def state(self) -> list[torch.Tensor]:
        """What is alive between two steps."""
        moments = [value for state in self.optimizer.inner.state.values() for value in state.values()]
        return [*self.parameters, *self.optimizer.masters, *moments, self.tokens, self.targets]


def build(model_config: ModelConfig, config: TrainConfig, device: torch.device | str = "cpu") -> Decoder:
    """The model as train.py builds it."""
    model = Decoder(model_config, ATTENTION_CORES[config.attention])
    materialise(model, config.torch_dtype, torch.device(device), random_values(config.seed))
    apply_recompute(model, config.recompute)
    return model
