"""What keeps the experts of all layers busy, once a step: their loads are compared, and biases moved."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common import collectives
from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Mesh
from step01_single_gpu.initial_weights import initial_values
from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel.router import Router


class RunningStatistics(Protocol):
    """What layers note in every micro-batch of a step, and ranks compare at its end: state that no gradient moves.

    buffers     what a comparison changes: tensors with a spec, to be saved and loaded with the weights
    """

    buffers: Sequence[Tensor]

    def finish(self, skip: Tensor | None = None) -> dict[str, Tensor]:
        """Compare notes, change the buffers, unless `skip` is 1 (as for `Optimizer.step`), and start anew.

        All ranks call it together. Returns what the step's record shall hold, as 0-d tensors in float64.
        """
        ...


def routers_of(stages: list[Decoder]) -> list[tuple[int, Router]]:
    """The routers of this rank's layers, each with the number of its layer."""
    layers = [(int(index), layer.mlp) for stage in stages for index, layer in stage.layers.items()]
    return [(index, mlp.router) for index, mlp in layers if hasattr(mlp, "router")]


class Balancing:
    """What the routers of all layers do together, once a step: they compare loads and move their biases.

    See `RunningStatistics`. Biases get their initial values here, and auxiliary losses the scale of the loss.
    """

    def __init__(self, stages: list[Decoder], config: TrainConfig, mesh: Mesh, scaler: LossScaler):
        self.config, self.mesh, self.routers = config, mesh, routers_of(stages)
        for _, router in self.routers:
            router.scaler = scaler
        self.buffers = [router.bias for _, router in self.routers]
        if self.buffers:
            initial_values(config)(self.buffers)

    @torch.no_grad()
    def finish(self, skip: Tensor | None = None) -> dict[str, Tensor]:
        """Move the biases, and start counting anew.

        Returns, the same on all ranks: `aux_loss`, the auxiliary losses of all layers; `imbalance`, the load of an
        expert at its worst as a multiple of the mean (mean over the layers); and `dropped`, how many choices were
        dropped.
        """
        shape = self.config.model_config
        numbers = torch.zeros(2 + shape.layers * shape.experts, dtype=torch.float64, device=self.mesh.device)
        (aux_loss, dropped), loads = numbers[:2], numbers[2:].view(shape.layers, shape.experts)  # views: one message
        if not shape.experts:
            return {"aux_loss": aux_loss, "imbalance": torch.zeros_like(aux_loss), "dropped": dropped}
        for index, router in self.routers:
            loads[index] += router.load
            aux_loss += router.auxiliary
            dropped += router.dropped
            router.start_over()
        collectives.all_reduce(numbers, self.mesh.world)  # float64 holds these integers exactly
        if self.config.balance == "bias":
            for index, router in self.routers:
                change = self.config.bias_rate * (loads[index].mean() - loads[index]).sign()
                router.bias += change if skip is None else change * (1 - skip)  # skip: only float16 has it
        loads = loads[shape.expert_layers.start :]
        worst = (loads.amax(1) / loads.mean(1)).mean()
        return {"aux_loss": aux_loss, "imbalance": worst, "dropped": dropped}
