"""AdamW whose two moments are stored in BF16, as DeepSeek-V3 does: 4 bytes per parameter less.

An update is still computed in float32, and the master weights stay float32. What a moment loses is its last digits: it
is rounded to 8 bits after every step. That works as long as a step changes it by more than such a rounding, 1 / 512.
The second moment moves by 1 - 0.95 = 1 / 20 of its distance; with the usual 0.999 it would often not move at all.
"""

import torch

from step01_single_gpu.mixed_precision import Optimizer
from step08_5d.kernels.adamw import adamw_reference, settings_of

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
        """As `Optimizer.step`. Raises ValueError for `skip`, which only float16 has."""
        if skip is not None:
            raise ValueError("moments in BF16 are for training in bfloat16 or float32: no step is skipped")
        for parameter, master, gradient in zip(self.parameters, self.masters, gradients, strict=True):
            state, settings = self.state_of(master), settings_of(self, parameter)
            state["step"] += 1
            wide = [state[key].to(master.dtype) for key in MOMENTS]
            rate = master.new_full((), lr)
            adamw_reference(master, *wide, gradient, None, state["step"], rate, factor, **settings)
            for key, value in zip(MOMENTS, wide, strict=True):
                state[key].copy_(value)
        self._copy_to_parameters()
