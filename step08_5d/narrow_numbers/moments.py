"""AdamW whose two moments are stored in BF16, as DeepSeek-V3 does: 4 bytes per parameter less.

An update is still computed in float32, and the master weights stay float32. What a moment loses is its last digits: it
is rounded to 8 bits after every step. That works as long as a step changes it by more than such a rounding, 1 / 512.
The second moment moves by 1 - 0.95 = 1 / 20 of its distance; with the usual 0.999 it would often not move at all.
"""

import torch

from step01_single_gpu.mixed_precision import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class NarrowMoments(Optimizer):
    """`Optimizer` for AdamW with moments in BF16."""

    def state_of(self, master):
        """As `Optimizer.state_of`, in BF16."""
        state = super().state_of(master)
        state |= {key: state[key].bfloat16() for key in MOMENTS if state[key].dtype != torch.bfloat16}
        return state

    @torch.no_grad()
    def step(self, gradients, lr, factor=None, skip=None):
        """As `Optimizer.step`, but for float16: no step is skipped."""
        for group, masters in ((group, set(group["params"])) for group in self.inner.param_groups):
            (first, second), eps = group["betas"], group["eps"]
            for master, gradient in zip(self.masters, gradients, strict=True):
                if master not in masters:
                    continue
                state = self.state_of(master)
                gradient = gradient if factor is None else gradient * factor
                state["step"] += 1
                corrections = 1 - first ** state["step"], 1 - second ** state["step"]
                mean, square = (state[key].to(master.dtype) for key in MOMENTS)
                mean.lerp_(gradient, 1 - first)
                square.lerp_(gradient.square(), 1 - second)
                master.mul_(1 - lr * group["weight_decay"])
                master.addcdiv_(mean / corrections[0], (square / corrections[1]).sqrt() + eps, value=-lr)
                for key, value in zip(MOMENTS, (mean, square), strict=True):
                    state[key].copy_(value)
        self._copy_to_parameters()
