"""Bytes per parameter of published recipes and of ours, by component.

From the playbook's table (section "FP8 pretraining"): Transformer Engine; FP8-LM's level O3 (Peng et al.,
arXiv:2310.18313); DeepSeek-V3 (arXiv:2412.19437, section 3.3); Nanotron. Activations are not in it.
"""

from typing import NamedTuple


class Bytes(NamedTuple):
    """Of one parameter. `gradients`: those of a micro-batch, in the type in which they leave the backward."""

    weights: float
    masters: float
    gradients: float
    sums: float
    moments: tuple[float, float]

    @property
    def total(self) -> float:
        return self.weights + self.masters + self.gradients + self.sums + sum(self.moments)


PUBLISHED = {
    "BF16, sums in float32": Bytes(2, 4, 2, 4, (4, 4)),
    "BF16, sums in BF16": Bytes(2, 4, 2, 0, (4, 4)),
    "Transformer Engine": Bytes(4, 0, 4, 0, (4, 4)),
    "FP8-LM, O3": Bytes(1, 2, 1, 2, (1, 2)),
    "DeepSeek-V3": Bytes(1, 4, 2, 4, (2, 2)),
    "Nanotron": Bytes(1, 2, 1, 4, (1, 1)),
}
# Only one parameter's gradient exists at a time, so it does not count. FP8 is made of the BF16 weights at each use
OURS = {
    "ours, BF16": Bytes(2, 4, 0, 4, (4, 4)),
    "ours, --fp8": Bytes(2, 4, 0, 4, (4, 4)),
    "ours, --fp8 --moments bfloat16": Bytes(2, 4, 0, 4, (2, 2)),
}
