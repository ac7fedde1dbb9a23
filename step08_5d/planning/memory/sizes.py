"""Bytes of the tensors with which a layer works, on a rank.

Letters: h hidden width, t tokens of a rank in a micro-batch, r = t / tp of them in the residual stream, w bytes of an
activation, wide bytes of a sum (at least float32).
"""

from functools import cache
from typing import NamedTuple

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step05_pipeline.schedules.catalogue import build_schedule
from step08_5d.cost import Layout


class LayerSizes(NamedTuple):
    """Bytes of what a layer works with on this rank."""

    narrow: bool  # activations are narrower than sums
    whole: float  # t h w: hidden states of all tokens of the rank's sequences, gathered over tp
    stream: float  # r h w: those of the residual stream
    wide: float  # the same in the type of sums
    queries: float  # t heads d / tp w
    keys: float  # the same of keys; of values
    statistics: float  # the attention's log-sum-exp
    gathered_keys: float  # ulysses: keys of all tokens, of this rank's part of the heads
    one: bool  # a single sequence: gathered parts of it need not be sorted
    w: int
    split: bool  # the backward comes in halves: inputs of matrices, and gradients of their outputs, stay for the second

    @property
    def as_gathered(self) -> float:
        """Hidden states of all tokens that are still in the buffer which the collective filled, not sorted."""
        return self.whole if self.one else 0.0

    def as_wide_as(self, part: float) -> "LayerSizes":
        """Return the sizes where hidden states have only this part of their width."""
        return self._replace(whole=part * self.whole, stream=part * self.stream, wide=part * self.wide)

    @classmethod
    def of(cls, model: ModelConfig, layout: Layout) -> "LayerSizes":
        w, high, _ = WIDTHS[layout.dtype]
        t, tp, d = layout.tokens, layout.tp, model.head_width
        keys = t * max(model.kv_heads, tp) * d / tp * w
        stream = t * model.hidden / tp
        shape = (t * model.hidden * w, stream * w, stream * high, t * model.heads * d / tp * w, keys)
        shape += (t * model.heads / tp * high,)
        copies = max(1, layout.cp // max(1, model.kv_heads // tp))  # ulysses: every rank needs a head
        return cls(w < high, *shape, keys * copies, layout.micro_batch == 1, w, splits_backward(layout.schedule))


def ulysses(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_mode == "ulysses"


@cache
def splits_backward(schedule: str) -> bool:
    """Whether gradients of weights come in a second half of the backward."""
    return build_schedule(schedule, ranks=2, micro_batches=4).splits_backward  # with any numbers
