"""Which optimizer a run takes, and AdamW as one kernel per parameter (`--fused`)."""

import torch

from common.config import TrainConfig
from common.process_groups import Mesh
from step01_single_gpu.mixed_precision import Optimizer
from step08_5d.fused import launches_kernels
from step08_5d.kernels import adamw
from step08_5d.narrow_numbers.moments import NarrowMoments


def optimizer_class(config: TrainConfig, mesh: Mesh) -> type[Optimizer]:
    """The optimizer with narrow moments, the one whose update is one kernel, or that of step 1."""
    if config.moments != TrainConfig.moments:
        return NarrowMoments
    return FusedAdamW if launches_kernels(config, mesh.device) and config.optimizer == "adamw" else Optimizer


class FusedAdamW(Optimizer):
    """AdamW that clips, updates the master weights and rounds them to the model's weights in one pass."""

    @torch.no_grad()
    def step(self, gradients, lr, factor=None, skip=None):
        """As `Optimizer.step`. No number comes back to the host, so it does not wait."""
        of_matrices, of_others = self.inner.param_groups
        # Filled on the device once for all: masters have one type, and copies from the host would wait
        numbers = [self.masters[0].new_full((), number) for number in (self.updates + 1, lr)] if self.masters else []
        for parameter, master, gradient in zip(self.parameters, self.masters, gradients, strict=True):
            state, copy = self.state_of(master), parameter if parameter.dtype != master.dtype else None
            group = of_matrices if parameter.spec.decay else of_others
            settings = {key: group[key] for key in ("weight_decay", "betas", "eps")}
            moments = state["exp_avg"], state["exp_avg_sq"]
            adamw.adamw(master, *moments, gradient, copy, *numbers, factor, skip, **settings)
