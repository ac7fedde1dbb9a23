"""The playbook's figures of scaling, and the largest micro-batches in one of them, beside what the models say."""

import itertools

from common.drawing.tables import print_table
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.published import memory as published_memory
from step08_5d.planning.published import runs as published
from step08_5d.planning.published.memory import Holds
from step08_5d.planning.published.runs import H100, Fit, PublishedRun
from step08_5d.planning.time.profiles import Profile
from step08_5d.planning.time.speed import times

# Tokens per second and GPU in figures of the playbook, which no fit has seen; its size is not said, but 3B comes close
DEGREES = (2, 4, 8, 16, 32)
SCALING = {  # read off; m: micro-batches
    "pp_1f1b_scaling, m = pp - 1": (7400, 8000, 7900, 6700, 3700),
    "pp_1f1b_scaling, m = 32": (15300, 13900, 11600, 7900, 3700),
    "tp_scaling": (13923, 12421, 10903, 6246, 2146),
    "tp_sp_scaling": (14167, 13460, 10889, 6159, 3610),
}
LARGEST = {"tp_scaling": (3, 8, 12, 16, 20), "tp_sp_scaling": (4, 10, 20, 40, 100)}  # their micro-batches


def of_3b(figure: str) -> tuple[ModelConfig, list[Layout]]:
    """The model and the layouts of the bars of a figure. (Layouts have sequence parallelism, which sends as much.)"""
    hidden, layers, heads, ffn = published.SHAPES["3B"]
    result = []
    for index, degree in enumerate(DEGREES):
        layout = Layout(published.SEQ, pp=degree, micro_batches=degree - 1, dtype="bfloat16", nanotron=True)
        if figure in LARGEST:
            layout = layout._replace(pp=1, tp=degree, micro_batch=LARGEST[figure][index], micro_batches=1)
        elif figure.endswith("32"):
            layout = layout._replace(micro_batches=32)
        result.append(layout)
    return ModelConfig(published.VOCAB, hidden, layers, heads, heads, ffn, figure in LARGEST), result


def scaling(figure: str, profile: Profile) -> list[float]:
    """Return the tokens per second and GPU that the model predicts for the bars of a figure."""
    model, layouts = of_3b(figure)
    return [layout.tokens_per_gpu / times(model, layout, H100, profile).step for layout in layouts]


def largest(holds: Holds, memory: float = 80e9) -> list[int]:
    """Return the sequences of the largest micro-batch that should fit, for each degree of the figure tp_sp_scaling."""
    model, layouts = of_3b("tp_sp_scaling")

    def fits(layout: Layout, size: int) -> bool:
        run = PublishedRun("3B", 0, model, layout._replace(micro_batch=size), None, 0.0, 0.0)
        return published_memory.predicted(run, holds) <= memory

    return [next(size for size in itertools.count() if not fits(layout, size + 1)) for layout in layouts]


def print_scaling(fit: Fit, holds: Holds) -> None:
    """Figures of scaling, beside what the model says of them."""
    rows = []
    for figure, bars in SCALING.items():
        rows.append((figure, *(f"{value:,}" for value in bars)))
        rows.append(("  predicted", *(f"{value:,.0f}" for value in scaling(figure, fit.profile))))
    rows.append(("largest micro-batch of tp_sp_scaling", *LARGEST["tp_sp_scaling"]))
    rows.append(("  predicted for 80 GB", *largest(holds)))
    print_table("tokens/s of a GPU in the playbook's figures", ("pp or tp", *map(str, DEGREES)), rows)
