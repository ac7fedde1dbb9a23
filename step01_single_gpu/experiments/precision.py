"""Experiments on precision: bytes a parameter, why master weights, why a loss scale, curves on top of each other."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.drawing.curves import plot
from common.drawing.figures import figure_path
from common.drawing.tables import compared, print_table
from common.measure.allocator import live_bytes
from common.record.compare import compare, read_run, table
from step01_single_gpu.cost import states
from step01_single_gpu.experiments.tools import HEADER, Run, train_in
from step01_single_gpu.mixed_precision import LossScaler, Optimizer

TINY = {"seq_len": 64, "micro_batch": 2, "global_batch": 2}


def bytes_per_parameter(quick: bool) -> None:
    """Live tensors when all gradients of a step are there, with the moments of an earlier step."""
    rows = []
    for dtype in ("float32", "bfloat16", "float64"):
        run = Run(TrainConfig(dtype=dtype, **TINY))
        run.step()
        run.accumulate()
        count = count_parameters(run.config.model_config).total
        held = live_bytes([*run.state(), *run.gradients.sums.values()]) - live_bytes([run.tokens, run.targets])
        predicted = sum(states(run.config.model_config, run.config.torch_dtype).values())
        rows.append((f"ours, {dtype}", *compared(predicted / count, held / count, ".3f")))
    for float32_sums in (False, True):
        held, count = _playbook_loop(float32_sums)
        name = f"playbook's bfloat16 {'with' if float32_sums else 'without'} float32 accumulation"
        rows.append((name, *compared(20 if float32_sums else 16, held / count, ".3f")))
    print_table("Bytes a parameter when the backward ends", HEADER, rows)


def _playbook_loop(float32_sums: bool) -> tuple[int, int]:
    """Bytes held and parameters of the recipe that keeps its bfloat16 gradients in .grad."""
    run = Run(TrainConfig(dtype="bfloat16", **TINY))
    run.step()
    for parameter in run.parameters:
        parameter._post_accumulate_grad_hooks.clear()
    run.accumulate()
    narrow = [parameter.grad for parameter in run.parameters]
    sums = [gradient.float() for gradient in narrow] if float32_sums else []
    held = live_bytes([*run.state(), *narrow, *sums]) - live_bytes([run.tokens, run.targets])
    return held, sum(parameter.numel() for parameter in run.parameters)


def master_weights(quick: bool) -> None:
    """bfloat16 has 8 bits of mantissa: next to 1.0 an update of 0.001 is rounded away, every time."""
    steps, rows = 10 if quick else 30, []
    for name in ("with master weights", "without"):
        run = Run(TrainConfig(dtype="bfloat16", lr=1e-3, **TINY))
        if name == "without":
            run.optimizer = _NarrowOptimizer(run.parameters, run.config)
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

    def __init__(self, parameters, config):
        super().__init__(parameters, config)
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
    reference = Run(TrainConfig(**TINY))
    reference.accumulate()
    exact, rows = reference.gradients.finish(), []
    for micro_batches, exponent in ((1, 0), (256, 0), (4096, 0), (4096, 8), (4096, 16)):
        run = Run(TrainConfig(dtype="float16", **TINY))
        run.scaler.scale = 2.0**exponent / micro_batches  # its loss is a share of the mean over all micro-batches
        run.accumulate()
        pairs = list(zip(run.gradients.finish(), exact))
        lost = sum(((new == 0) & (old != 0)).sum().item() for new, old in pairs)
        there = sum((old != 0).sum().item() for _, old in pairs)
        error = sum((new / run.scaler.scale - old).square().sum() for new, old in pairs).sqrt()
        error /= sum(old.square().sum() for _, old in pairs).sqrt()
        rows.append((f"1 of {micro_batches} micro-batches, scale 2^{exponent}", f"{lost / there:.2%}", f"{error:.1e}"))
    title = "float16 gradients of one micro-batch against float32"
    print_table(title, ("", "flushed to zero", "relative error"), rows)

    run = Run(TrainConfig(dtype="float16", **TINY))
    run.scaler.scale = 2.0**22
    first, rows = run.parameters[0].detach().clone(), []
    for step in range(8):
        scale = run.scaler.scale
        _, norm, taken = run.step()
        changed = not torch.equal(first, run.parameters[0])
        rows.append((step, f"2^{scale.hex().partition('p')[2].lstrip('+')}", f"{norm:.3f}", taken, changed))
    print_table(
        "float16 from a scale that overflows", ("step", "scale", "gradient norm", "taken", "weights moved"), rows
    )
    scaler = LossScaler(torch.float16, interval=3)
    scales = []
    for norm in (1.0, 1.0, 1.0, float("inf"), 1.0):
        scaler.accept(norm)
        scales.append(scaler.scale / 2**16)
    print(f"  growth after 3 good steps, then an overflow: {scales} x 2^16")


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
