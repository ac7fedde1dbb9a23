"""Training runs of experiments: several on the same local ranks, with their bytes and their curves."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from common import compare
from common.config import TrainConfig
from common.drawing import figures
from common.drawing.curves import plot
from common.experiments.local_ranks import on_ranks, train_quietly
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh
from common.weights.initialisation import materialise, random_values

# 5.3 million parameters in 57 tensors: 21 MB of gradients
MODEL = {"layers": 6, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 4, "data": "synthetic", "warmup": 1}
BUCKET_MB = 2.5  # suits this model as 25 MB suit one ten times its size


def tensor_sizes() -> tuple[list[int], list[float]]:
    """Return the bytes of each parameter's gradient of `MODEL`, in forward order, and what its backward costs."""
    names, parameters = zip(*Decoder(TrainConfig(**MODEL).model_config).named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(p.numel()) for name, p in zip(names, parameters)]
    return [4 * parameter.numel() for parameter in parameters], costs


def run_jobs(mesh: Mesh, done: Callable, jobs: list[tuple[str, dict]], folder: str, train: Callable) -> None:
    """On a rank: run one training after another, each into folder/name.

    Args:
        jobs: (name, flags) of each run.
        train: the function of a step's train.py.
    """
    for name, flags in jobs:
        train_quietly(train, **flags, run_dir=f"{folder}/{name}")
        done()


def reference_gradients(config: TrainConfig, batches) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter, by name, of one process that takes the whole global batch at once."""
    model = Decoder(config.model_config)
    materialise(model, config.torch_dtype, torch.device("cpu"), random_values(config.seed))
    tokens, targets = batches.micro_batch(0, 0, config.global_batch)
    (cross_entropy_sum(model(tokens), targets) / batches.target_tokens).backward()
    return {parameter.spec.name: parameter.grad for parameter in model.parameters()}


def overlay(train: Callable, variants: dict[str, tuple[int, dict]], quick: bool) -> None:
    """Train the default run in float32 and float64 in every variant: curves as a table and (float32) as a figure.

    Args:
        variants: (ranks, flags) of each, by name; the first is what the others are compared with.
    """
    runs = {"float32": 10 if quick else 40, "float64": 10}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({ranks for ranks, _ in variants.values()}):
            jobs = [
                (f"{dtype}/{name}", {"dtype": dtype, "steps": steps} | flags)
                for dtype, steps in runs.items()
                for name, (size, flags) in variants.items()
                if size == ranks
            ]
            on_ranks(ranks, run_jobs, jobs, folder, train, title="curves", jobs=len(jobs))
        for dtype, steps in runs.items():
            rows = compare.compare([compare.read_run(Path(folder, dtype, name)) for name in variants])
            print(f"\nthe default run in {dtype}, {steps} steps\n{compare.table(rows)}")
            if dtype == "float32":
                path = figures.figure_path("curves")
                plot(rows, path)
                print(f"  figure: {path}")
