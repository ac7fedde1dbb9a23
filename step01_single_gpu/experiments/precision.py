"""Experiments on precision: why master weights, why a loss scale, curves on top of each other."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from common.compare import compare, read_run, table
from common.config import TrainConfig
from common.drawing.curves import plot
from common.drawing.figures import figure_path
from common.drawing.tables import print_table
from step01_single_gpu.experiments.tools import OneProcess, train_in
from step01_single_gpu.mixed_precision import Optimizer

TINY = {"seq_len": 64, "micro_batch": 2, "global_batch": 2}


def master_weights(quick: bool) -> None:
    """bfloat16 has 8 bits of mantissa: next to 1.0 an update of 0.001 is rounded away, every time."""
    steps, rows = 10 if quick else 30, []
    for name in ("with master weights", "without"):
        run = OneProcess(TrainConfig(dtype="bfloat16", lr=1e-3, **TINY))
        if name == "without":
            run.optimizer = _NarrowOptimizer(run.parameters, torch.bfloat16)
            run.parts = *run.parts[:2], run.optimizer
        before = [parameter.detach().clone() for parameter in run.parameters]
        losses = [run.step()[0] for _ in range(steps)]
        cells = []
        for is_norm in (True, False):
            pairs = [(p, old) for p, old in zip(run.parameters, before) if (p.dim() == 1) == is_norm]
            moved = sum((p != old).sum().item() for p, old in pairs)
            cells.append(f"{moved:,} of {sum(old.numel() for _, old in pairs):,}")
        rows.append((name, *cells, f"{losses[0]:.3f}", f"{losses[-1]:.3f}"))
    title = f"bfloat16, AdamW, lr 0.001, the same batch {steps} times: elements that changed"
    print_table(title, ("", "norm weights", "matrix weights", "first loss", "last loss"), rows)


class _NarrowOptimizer(Optimizer):
    """AdamW on the bfloat16 weights themselves."""

    def __init__(self, parameters, dtype):
        super().__init__(parameters, dtype)
        self.narrow = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)

    def step(self, gradients, lr, factor, skip=None):
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = (gradient * factor).to(parameter.dtype)
        for group in self.narrow.param_groups:
            group["lr"] = lr
        self.narrow.step()
        self.narrow.zero_grad()


def loss_scaling(quick: bool) -> None:
    """float16 ends at 6e-8: small gradients become 0 unless the loss is scaled up. Overflow: skip, and halve."""
    exact, rows = OneProcess(TrainConfig(**TINY)).gradients(), []
    for micro_batches, exponent in ((1, 0), (256, 0), (4096, 0), (4096, 8), (4096, 16)):
        run = OneProcess(TrainConfig(dtype="float16", **TINY))
        run.scaler.scale = 2.0**exponent / micro_batches  # its loss is a share of the mean over all micro-batches
        pairs = list(zip(run.gradients(), exact))
        lost = sum(((new == 0) & (old != 0)).sum().item() for new, old in pairs)
        there = sum((old != 0).sum().item() for _, old in pairs)
        error = sum((new / run.scaler.scale - old).square().sum() for new, old in pairs).sqrt()
        error /= sum(old.square().sum() for _, old in pairs).sqrt()
        rows.append((f"1 of {micro_batches} micro-batches, scale 2^{exponent}", f"{lost / there:.2%}", f"{error:.1e}"))
    title = "float16 gradients of one micro-batch against float32"
    print_table(title, ("", "flushed to zero", "relative error"), rows)


VARIANTS = {
    "micro-batches of 2": {},
    "micro-batches of 8": {"micro_batch": 8},
    "micro-batches of 1": {"micro_batch": 1},
    "naive attention, selective": {"attention": "naive", "recompute": "selective"},
    "full recomputation": {"recompute": "full"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}


def curves(quick: bool) -> None:
    """The default run with other micro-batches, with recomputation and in narrow types, against itself."""
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in VARIANTS.items():
            train_in(Path(folder, name), steps=10 if quick else 40, **flags)
        rows = compare([read_run(Path(folder, name)) for name in VARIANTS])
    rows = [replace(row, name=name) for row, name in zip(rows, VARIANTS)]
    print(f"\n{table(rows)}")
    plot(rows, figure_path("curves"))
    print(f"  figure: {figure_path('curves')}")
