"""Which optimizer a run takes, and AdamW as one kernel per parameter (`--fused`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.config import TrainConfig
from common.process_groups import Mesh
from step01_single_gpu.mixed_precision import Optimizer
from step08_5d.fused import launches_kernels
from step08_5d.kernels import adamw
from step08_5d.narrow_numbers.moments import NarrowMoments


def make_optimizer(shards: Sequence[Tensor], config: TrainConfig, mesh: Mesh, **options) -> Optimizer:
    """The optimizer with narrow moments, the one whose update is one kernel, or that of step 1.

    Args:
        options: `buffers` and `scaler`, as for each of them.
    """
    if config.moments != TrainConfig.moments:
        kind = NarrowMoments
    else:
        in_kernel = launches_kernels(config, mesh.device) and config.optimizer == "adamw"
        kind = FusedAdamW if in_kernel else Optimizer
    return kind(shards, config.torch_dtype, config.weight_decay, config.optimizer, **options)


class FusedAdamW(Optimizer):
    """AdamW that clips, updates the master weights and rounds them to the model's weights in one pass."""

    @torch.no_grad()
    def step(self, gradients, lr, factor=None, skip=None):
        """As `Optimizer.step`. No number comes back to the host, so it does not wait."""
        if not self.masters:
            return
        counts = [self.state_of(master)["step"] for master in self.masters]
        torch._foreach_add_(counts, 1)
        rate = self.masters[0].new_full((), lr)  # on the device, for all of them: copies from the host would wait
        for parameter, master, count, gradient in zip(self.parameters, self.masters, counts, gradients, strict=True):
            state, copy = self.state_of(master), parameter if parameter.dtype != master.dtype else None
            moments, settings = (state["exp_avg"], state["exp_avg_sq"]), adamw.settings_of(self, parameter)
            adamw.adamw(master, *moments, gradient, copy, count, rate, factor, skip, **settings)
        if skip is not None:
            torch._foreach_sub_(counts, [skip] * len(counts))
