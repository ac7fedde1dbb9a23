"""Committed figures are those that their code draws today, as far as drawing them takes neither a clock nor training.

Whoever changes such a figure's code draws the figure again, and looks at it. Those that count bytes on several ranks
are drawn in `make test-all` only.
"""

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path

import matplotlib
import pytest
from PIL import Image, ImageChops, ImageFilter

from common.drawing import figures
from tests.harness.ranks import ROOT, run_command, torchrun

ALL = bool(os.environ.get("TEST_ALL"))
LADDER, NARROW, PLANNING = (f"step08_5d/{name}" for name in ("gpu_ladder", "narrow_numbers", "planning"))
# Of each: folder, the function that draws, and what it draws
CHEAP = [
    ("common", "common.drawing.groups.draw", "groups"),
    ("step05_pipeline", "step05_pipeline.experiments.schedules.schedules", "afab 1f1b interleaved zb-h1 zbv"),
    (LADDER, "step08_5d.gpu_ladder.formats.formats", "formats"),
    (LADDER, "step08_5d.gpu_ladder.roofline.roofline", "roofline"),
    (LADDER, "step08_5d.gpu_ladder.elu_over_n.elu_over_n", "elu_over_n"),
    (LADDER, "step08_5d.gpu_ladder.matmul._draw", "coalescing"),
    (NARROW, "step08_5d.narrow_numbers.experiments.pictures.formats", "formats"),
    ("step08_5d", "step08_5d.experiments.deepseek.deepseek", "deepseek"),
]
LONGER = [  # a second, or some seconds on up to eight ranks
    (LADDER, "step08_5d.gpu_ladder.fusion.fusion", "fusion"),
    (LADDER, "step08_5d.gpu_ladder.attention.attention", "attention_memory"),
    (NARROW, "step08_5d.narrow_numbers.experiments.products.outliers", "outliers"),
    (NARROW, "step08_5d.narrow_numbers.experiments.memory.memory", "memory"),
    (PLANNING, "step08_5d.planning.published.bars.draw", "bars"),
    ("step04_tensor_parallel", "step04_tensor_parallel.experiments.memory.activations", "activations"),
    ("step05_pipeline", "step05_pipeline.experiments.memory.activations", "tradeoff"),
    ("step06_context_parallel", "step06_context_parallel.experiments.longest.longest", "longest"),
    ("step07_expert_parallel", "step07_expert_parallel.experiments.memory.memory", "memory"),
    ("step08_5d", "step08_5d.experiments.dimensions.cost", "cost"),
]
# Folder and figures of commands, of which the last one writes FILE, the first figure, and others beside it
COMMANDS = {
    (PLANNING, "published published_others"): ("-m step08_5d.planning published --out FILE",),
    ("common", "rounding_or_a_bug"): (
        "-m step01_single_gpu.train --steps 30 --run-dir runs/bug/one",
        "-m step01_single_gpu.train --steps 30 --run-dir runs/bug/faster --lr 1.1e-3",
        "-m common.compare runs/bug/one runs/bug/faster --explain --plot FILE",
    ),
}
SHAPES = "step08_5d/train.py --pp 2 --cp 2 --tp 2 --experts 8 --ep 4 --zero 1 --dtype bfloat16 --steps 1 --shapes"
# Not drawn here: these show times or whole trainings
MEASURED = {
    "common": "curves",
    "step01_single_gpu": "curves first_steps recomputation",
    "step02_data_parallel": "nodes timelines",
    "step03_zero": "curves nodes timelines",
    "step04_tensor_parallel": "backward curves nodes timelines",
    "step05_pipeline": "slack",
    "step06_context_parallel": "overlap",
    "step07_expert_parallel": "dualpipe learning load overlap",
    "step08_5d": "curves placement step",
    NARROW: "divergence",
    PLANNING: "page",
}
# Pictures of an idea, which nothing in the repository draws
IDEAS = {
    "step01_single_gpu": "host toy",
    "step02_data_parallel": "ring_frames two_ranks",
    "step03_zero": "border gather_use_free holds",
    "step04_tensor_parallel": "sublayer toy toy_backward",
    "step05_pipeline": "circle deadlock filling toy",
    "step06_context_parallel": "balance ring_backward ring_frames ring_zigzag ulysses",
    "step07_expert_parallel": "dispatch dispatch_backward",
    "step08_5d": "grid overview",
}
DRAWN_WITH = "3.11"  # matplotlib; by another one letters are some pixels elsewhere


def same(drawn: Path, committed: Path, allowed: float = 2e-5) -> bool:
    """Whether two pictures show the same. With the version that drew the figures, a digit more would be seen; with
    another one, boxes, lines and colours are compared, and may be moved by a few pixels.

    Args:
        allowed: the share of pixels that may differ.
    """
    strict = matplotlib.__version__.startswith(f"{DRAWN_WITH}.")
    reach, allowed = (0, allowed) if strict else (4, 1e-2)
    with Image.open(drawn) as one, Image.open(committed) as other:
        pictures = one.convert("RGB"), other.convert("RGB")
    return pictures[0].size == pictures[1].size and all(
        lacking(*pair, reach) <= allowed for pair in (pictures, pictures[::-1])
    )


def lacking(picture: Image.Image, other: Image.Image, reach: int, tolerance: int = 40) -> float:
    """The share of pixels whose colour the other picture does not have within `reach` pixels of the same place."""
    darkest = brightest = other
    for _ in range(reach):
        darkest, brightest = darkest.filter(ImageFilter.MinFilter(3)), brightest.filter(ImageFilter.MaxFilter(3))
    below, above = ImageChops.subtract(darkest, picture), ImageChops.subtract(picture, brightest)
    off = functools.reduce(ImageChops.lighter, (*below.split(), *above.split()))
    return sum(off.histogram()[tolerance:]) / (off.width * off.height)


def check(folder: str, names: str, drawn: Path, **how) -> None:
    assert {path.stem for path in drawn.glob("*.png")} == set(names.split()), (folder, names)
    for name in names.split():
        committed = ROOT / folder / "figures" / f"{name}.png"
        assert same(drawn / committed.name, committed, **how), (
            f"{committed.relative_to(ROOT)} is not what its code draws"
        )


def draw(folder: str, function: str, names: str, into: Path, monkeypatch) -> None:
    module, _, name = function.rpartition(".")
    call = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(figures, "folder", into)
    given = {"quick": False, "path": into / f"{names}.png"}
    call(**{each: given[each] for each in inspect.signature(call).parameters if each in given})
    check(folder, names, into)


def test_every_figure_is_in_one_list():
    listed = [f"{folder}/{name}" for folder, _, names in CHEAP + LONGER for name in names.split()]
    listed += [f"{folder}/{name}" for folder, names in COMMANDS for name in names.split()]
    listed += [f"{folder}/{name}" for each in (MEASURED, IDEAS) for folder in each for name in each[folder].split()]
    found = [path for top in (ROOT / "common", *ROOT.glob("step*")) for path in top.rglob("figures/*.png")]
    found = [f"{path.parent.parent.relative_to(ROOT)}/{path.stem}" for path in found]
    assert sorted([*listed, "step08_5d/shapes"]) == sorted(found)


def test_figures_are_drawn_as_they_are(tmp_path, monkeypatch, capsys):
    for number, case in enumerate(CHEAP):
        draw(*case, tmp_path / str(number), monkeypatch)


def test_what_is_another_picture(tmp_path, monkeypatch):
    """A box in another colour always makes one; letters that have moved do so if the version is the same."""
    committed = ROOT / "step05_pipeline" / "figures" / "afab.png"
    with Image.open(committed) as image:
        picture = image.convert("RGB")
    ImageChops.offset(picture, 2, 1).save(tmp_path / "moved.png")
    picture.paste("black", (300, 100, 400, 160))
    picture.save(tmp_path / "boxed.png")
    for version, tolerant in ((f"{DRAWN_WITH}.0", False), ("3.9.0", True)):
        monkeypatch.setattr(matplotlib, "__version__", version)
        assert same(committed, committed) and not same(tmp_path / "boxed.png", committed)
        assert same(tmp_path / "moved.png", committed) == tolerant


@pytest.mark.skipif(not ALL, reason="takes seconds, on up to eight ranks: with TEST_ALL=1")
@pytest.mark.parametrize("case", LONGER, ids=lambda case: f"{case[0]}-{case[2]}")
def test_figures_that_take_longer(case, tmp_path, monkeypatch):
    draw(*case, tmp_path, monkeypatch)


@pytest.mark.skipif(not ALL, reason="takes seconds: with TEST_ALL=1")
@pytest.mark.parametrize("folder, names", COMMANDS)
def test_figures_of_commands(folder, names, tmp_path):
    file = tmp_path / "drawn" / f"{names.split()[0]}.png"
    for command in COMMANDS[folder, names]:
        words = command.replace("FILE", str(file)).split()
        run_command([sys.executable, *words], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    check(folder, names, file.parent, allowed=1e-4)  # numbers that are fitted, or learned, round differently elsewhere


@pytest.mark.skipif(not ALL, reason="starts 16 ranks: with TEST_ALL=1")
def test_the_shapes_of_a_layer(tmp_path):
    torchrun(16, *SHAPES.split(), "--run-dir", tmp_path)
    check("step08_5d", "shapes", tmp_path)
