"""What keeps the experts of all layers busy, once a step: their loads are compared, and biases moved."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common import collectives
from common.group import Group
from common.layers import at_least_float32
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


class Balancing:
    """What the routers of all layers do together, once a step: they compare loads and move their biases.

    See `RunningStatistics`.

    Args:
        routers: those of this rank, each with the number of its layer. A rank may have none.
        layers: the numbers of all layers of the model that have experts; without any, nothing is compared.
        experts: of such a layer.
        rate: how far a step moves the bias of an expert that gets more or fewer tokens than the mean; 0 for not at all.
        world: all ranks, which may have routers of other layers, or have sent other tokens through those of this one.
    """

    def __init__(
        self,
        routers: Sequence[tuple[int, Router]],
        layers: range,
        experts: int,
        rate: float,
        world: Group,
        device: torch.device | str = "cpu",
    ):
        self.routers, self.layers, self.experts = routers, layers, experts
        self.rate, self.world, self.device = rate, world, device
        self.buffers = [router.bias for _, router in routers]
        for bias in self.buffers:
            if rate and bias.dtype != at_least_float32(bias.dtype):
                raise ValueError(f"a router's bias has become {bias.dtype}, which is too coarse for steps of {rate:g}")

    @torch.no_grad()
    def finish(self, skip: Tensor | None = None) -> dict[str, Tensor]:
        """Move the biases, and start counting anew.

        Returns, the same on all ranks: `aux_loss`, the auxiliary losses of all layers; `imbalance`, the load of an
        expert at its worst as a multiple of the mean (mean over the layers); and `dropped`, how many choices were
        dropped.
        """
        size = len(self.layers), self.experts
        numbers = torch.zeros(2 + math.prod(size), dtype=torch.float64, device=self.device)
        (aux_loss, dropped), whole = numbers[:2], numbers[2:].view(size)  # views: one message
        if not self.layers:
            return {"aux_loss": aux_loss, "imbalance": torch.zeros_like(aux_loss), "dropped": dropped}
        loads = dict(zip(self.layers, whole, strict=True))
        for index, router in self.routers:
            loads[index] += router.load
            aux_loss += router.auxiliary
            dropped += router.dropped
            router.start_over()
        collectives.all_reduce(numbers, self.world)  # float64 holds these integers exactly
        if self.rate:
            for index, router in self.routers:
                change = self.rate * (loads[index].mean() - loads[index]).sign()
                router.bias += change if skip is None else change * (1 - skip)  # skip: only float16 has it
        worst = (whole.amax(1) / whole.mean(1)).mean()
        return {"aux_loss": aux_loss, "imbalance": worst, "dropped": dropped}
