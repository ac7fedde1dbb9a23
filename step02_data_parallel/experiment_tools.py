"""What the experiments share: the model they run, training runs on local ranks, tables, figures."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

from common import wire
from common.config import TrainConfig
from common.local_ranks import train_quietly
from common.model import Decoder
from common.process_groups import Mesh
from step01_single_gpu.experiment_tools import compared, table
from step02_data_parallel.train import train

figures = Path(__file__).resolve().parent / "figures"  # where finish_figure writes
MODES = ("naive", "overlap", "bucket")

# 5.3 million parameters in 57 tensors: 21 MB of gradients
MODEL = {"layers": 6, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 4, "data": "synthetic", "warmup": 1}
BUCKET_MB = 2.5  # for this model what 25 MB are for one ten times its size


def against(title: str, unit: str, rows: Iterable[tuple[str, float, float]], digits: str = ",.0f") -> None:
    """Print a table of predicted, measured, and their ratio."""
    cells = []
    for name, predicted, measured in rows:
        cells.append((name, *compared(predicted if abs(predicted) > 1e-9 else 0.0, measured, digits)))
    table(title, (unit, "predicted", "measured", "ratio"), cells)


def tensor_sizes() -> tuple[list[int], list[float]]:
    """Bytes of each parameter's gradient of `MODEL`, in forward order, and what its backward costs."""
    names, parameters = zip(*Decoder(TrainConfig(**MODEL).model_config).named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(p.numel()) for name, p in zip(names, parameters)]
    return [4 * parameter.numel() for parameter in parameters], costs


def run_jobs(mesh: Mesh, done: Callable, jobs: list[tuple[str, dict]], folder: str) -> list[dict[str, int]]:
    """On a rank: one training run of step 2 after another, each into folder/name; what the kernel counted meanwhile."""
    counted = []

    def together() -> None:
        if mesh.world.size > 1:
            dist.barrier()

    for name, flags in jobs:
        together()
        before = [wire.sent_by_me(), wire.loopback()]
        together()  # everybody has read, before anybody sends
        train_quietly(train, **flags, run_dir=f"{folder}/{name}")
        together()
        numbers = [(new or 0) - (old or 0) for new, old in zip([wire.sent_by_me(), wire.loopback()], before)]
        counted.append(dict(zip(("sockets", "loopback"), numbers)))
        done()
    return counted


def new_figure(columns: int = 1, width: float = 6.5):
    """A figure and its axes (a list of them for several columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in [axes] if columns == 1 else axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def figure_path(name: str) -> Path:
    """Where the figure of this name is to be written."""
    figures.mkdir(parents=True, exist_ok=True)
    return figures / f"{name}.png"


def finish_figure(name: str, figure=None) -> None:
    """Save `figure` unless that is done, and shrink the file: 64 colours are enough for lines and bars."""
    from PIL import Image

    path = figure_path(name)
    if figure is not None:
        figure.savefig(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"  figure: {figures.name}/{name}.png")
