"""The playbook's figure of an 8 B model under each kind of parallelism, with its formulas corrected."""

from typing import NamedTuple

from common.counts import count_parameters
from common.drawing.tables import print_table
from common.presets import PRESETS
from step01_single_gpu.memory_model import gpt

MODEL, N, GIB = PRESETS["llama3-8b"], 8, 2**30
LENGTHS = (1024, 4096, 16384)


class Column(NamedTuple):
    """One of the playbook's columns.

    parameters: of a rank, which has gradients and optimizer state of as many.
    divisor: of the activations.
    published: GiB of activations in the playbook's bars by mode, where they differ from the corrected ones.
    """

    name: str
    parameters: float
    divisor: int
    published: dict[str, tuple[float, ...]]

    def activations(self, mode: str, seq: int) -> float:
        """GiB by the formula of the playbook's text, for one sequence: 34 s h L (selective) or 2 s h L (full)."""
        return gpt.text_activations(gpt.from_model(MODEL), 1, seq, mode) / self.divisor / GIB


def ways() -> list[Column]:
    """The six columns. Of a pipeline, the first stage counts: it holds the embedding, and most micro-batches."""
    count = count_parameters(MODEL)
    mlps, layer = MODEL.layers * count.dense_mlp, count.attention + count.dense_mlp + 2 * MODEL.hidden
    first_stage = MODEL.layers // N * layer + count.embedding
    return [
        Column("one GPU", count.total, 1, {}),
        Column("DP 8, ZeRO-3", count.total / N, 1, {}),
        Column("TP 8 with SP", count.total / N, N, {"selective": (1.625, 6.5, 26.0), "full": (0.25, 1.0, 4.0)}),
        Column("PP 8", first_stage, 1, {}),  # in 1F1B it keeps 8 micro-batches of an eighth of the layers
        Column("CP 8", count.total, N, {"selective": (0.066, 0.265, 1.06), "full": (0.004, 0.015, 0.062)}),
        Column("EP 8", count.total - mlps + mlps / N, 1, {}),
    ]


def memory_8b(quick: bool) -> None:
    """PREDICTED: GiB of an 8 B model on a rank, in the playbook's six columns, two rows and three lengths."""
    rows = []
    for mode in ("selective", "full"):
        for way in ways():
            cells = [f"{12 * way.parameters / GIB:.2f}"]
            for place, seq in enumerate(LENGTHS):
                published = way.published.get(mode)
                cells += [f"{way.activations(mode, seq):.3g}", f"{published[place]:.3g}" if published else "same"]
            rows.append((f"{mode}: {way.name}", *cells))
    header = ["", "states", *(cell for seq in LENGTHS for cell in (f"{seq // 1024}k tokens", "published"))]
    print_table("predicted: GiB of states (2 + 2 + 8 bytes per parameter) and of activations", header, rows)
