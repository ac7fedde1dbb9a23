"""What the experiments of this step share: its schedules, and a model whose stages are alike."""

from common.drawing.figures import figure_path
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, Timeline
from step05_pipeline.schedules.timeline import draw

# In the order of the lesson; all of the catalogue are in it
ORDER = ("naive", "afab", "1f1b", "interleaved", "breadth-first", "llama3", "zb-h1", "zb-h2", "zbv")
ORDER += ("dualpipe", "dualpipev")

# Eight layers that are alike and a head that is small beside them: stages of the same length
SHAPE = {"layers": 8, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 256, "data": "synthetic"}
SHAPE |= {"seq_len": 32, "micro_batch": 1, "warmup": 1}


def pipeline_of(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> tuple[Schedule, Costs]:
    """A schedule and the costs with which schedules can be compared: those of a p-th of the model are F = I = W = 1."""
    schedule = build_schedule(name, ranks, micro_batches, chunks)
    unit = schedule.ranks / schedule.stages
    return schedule, Costs(F=unit, I=unit, W=unit)


def draw_figure(timelines: dict[str, Timeline], name: str, unit: str, end: float = 0) -> None:
    """Draw timelines as NAME.png in the folder of this step's figures, and print where."""
    print(f"  figure: {draw(timelines, figure_path(name), unit, end)}")
