"""What one layer looks like on one rank: the table and the picture of `--shapes`."""

from collections.abc import Callable

from common.drawing.figures import figure_path
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step08_5d.experiments.tools import FIVE_D, STEP, Run
from step08_5d.shapes import Watch, describe, legend
from step08_5d.shapes_picture import draw_shapes

FLAGS = STEP | FIVE_D | {"experts": 8, "dtype": "bfloat16"}


def shapes(quick: bool) -> None:
    """One layer of the default model in five dimensions on 8 ranks: every tensor, its formula, and what is sent."""
    text, *drawn = on_ranks(8, look, title="shapes")[0]
    print(text)
    print(f"  figure: {draw_shapes(*drawn, figure_path('shapes'))}")


def look(mesh: Mesh, done: Callable) -> tuple:
    """On a rank: what `--shapes` would print, and what it would draw."""
    run, seen = Run(mesh, **FLAGS), []
    Watch(run.pipeline.stages[0], run.config, lambda *found: seen.extend(found))
    run.gradients()
    return describe(*seen, run.mesh), seen[0], legend(*seen), run.config
