"""What travels in place of K and V, and how a rank makes K and V of it when it has arrived.

In ordinary attention K and V travel themselves. In latent attention (`common/latent_attention.py`) each token has a
latent and a rotated key, which all heads share, and only these travel: 576 numbers in place of 40,960 with DeepSeek-V3.
A rank multiplies what has arrived by its own rows of `kv_b_proj`, which makes K and V of its heads; so in a ring, each
part of the sequence is expanded once more on every rank. (An all-gather expands them one part at a time, too.)

In the backward a rank has the gradients of K and V that its queries cause, for one part of the sequence after the
other. It folds them into gradients of latent and rotated key, and these are what travels home. The weight's gradient
is the sum over all parts, and needs no message: every rank has seen the latents that it multiplied. It goes to whoever
takes this weight's gradients once, at the end, as after any other product.
"""

import torch
from torch import Tensor

from common.latent_attention import Expansion
from step04_tensor_parallel.linear import Dense, hand_over, input_gradient, output


class Themselves:
    """K and V travel as they are. Made anew for each forward and each backward."""

    weights = ()

    def value_width(self, v: Tensor) -> int:
        """Return how wide a head's values are."""
        return v.shape[-1]

    def expand(self, kv: list[Tensor]) -> list[Tensor]:
        """Return K and V (batch, kv_heads, n, d) of the two tensors that this rank has; nothing, if nothing came."""
        return kv

    def fold(self, kv: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return the gradients of these two tensors, for those of K and V. Both are at least float32."""
        return gradients

    def weight_gradients(self) -> tuple[Tensor | None, ...]:
        """Return those of `weights`, when all parts have been folded; None for one that its sink has taken."""
        return ()


class OfLatents(Themselves):
    """Latents (batch, 1, n, kv_rank) and rotated keys (batch, 1, n, rope_dim) travel."""

    def __init__(self, expansion: Expansion):
        self.expansion, self.weights, self.total = expansion, (expansion.weight,), None

    def value_width(self, v):
        return self.expansion.shape.value_dim

    def expand(self, kv):
        if not kv:
            return kv
        latent, key = kv
        return list(self.expansion.arrange(output(latent.squeeze(1), self.expansion.weight), key))

    def fold(self, kv, gradients):
        if not kv:
            return []
        weight, wide = self.expansion.weight, gradients[0].dtype
        d_product, d_key = self.expansion.arrange_backward(*gradients)
        d_product = d_product.to(weight.dtype)
        self._add(getattr(weight, "products", Dense).weight_gradient(d_product, kv[0].squeeze(1)), wide)
        return [input_gradient(d_product, weight).unsqueeze(1).to(wide), d_key]

    def _add(self, part, wide):
        """Add the weight's gradient of one part of the sequence to those of the others."""
        if self.total is None:
            self.total = torch.zeros_like(self.expansion.weight, dtype=wide)
        if isinstance(part, Tensor):
            self.total += part
        else:  # products that add to sums themselves
            part(self.total, False)

    def weight_gradients(self):
        gradient = hand_over(self.expansion.weight, self.total, self.total, lambda total, _: total)  # unrounded
        return (None if gradient is None else gradient.to(self.expansion.weight.dtype),)


def expander(expansion: Expansion | None) -> Themselves:
    """What makes K and V of what travels; None: these travel themselves."""
    return Themselves() if expansion is None else OfLatents(expansion)
