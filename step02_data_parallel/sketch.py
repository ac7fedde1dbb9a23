"""Data parallelism by hand: buckets of gradients, each summed over all ranks while the backward goes on.

    python step02_data_parallel/sketch.py
    torchrun --nproc_per_node 2 step02_data_parallel/sketch.py

All ranks together take the same samples as one process, so both commands print the same losses, up to rounding.
A name that begins with d is a gradient: dx is that of the loss with respect to x.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

LAYERS, WIDTH, SAMPLES, STEPS, LEARNING_RATE = 6, 64, 16, 5, 1.0
BUCKET = 2  # layers whose gradients travel together


def forward(weights: Tensor, x: Tensor) -> list[Tensor]:
    """Return the input of each layer, and the output of the last."""
    activations = [x]
    for weight in weights:
        activations.append(torch.relu(activations[-1] @ weight))
    return activations


def backward(weights: Tensor, activations: list[Tensor], dy: Tensor) -> Tensor:
    """Return the gradients of all weights, summed over the samples of all ranks."""
    gradients = torch.empty_like(weights)  # (LAYERS, WIDTH, WIDTH): one buffer, and a bucket is a part of it
    # --- write this yourself ---
    in_flight = []
    for layer in reversed(range(LAYERS)):
        dy = dy * (activations[layer + 1] > 0)
        gradients[layer] = activations[layer].T @ dy
        if layer % BUCKET == 0:  # the bucket is full: send it, and go on
            bucket = gradients[layer : layer + BUCKET]
            in_flight.append(dist.all_reduce(bucket, async_op=True))
        dy = dy @ weights[layer].T  # a layer's input is the previous layer's output
    for work in in_flight:
        work.wait()
    # --- until here ---
    return gradients


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], Tensor]:
    """Take all steps. Returns the losses and the weights, the same on every rank."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(LAYERS, WIDTH, WIDTH, generator=random, dtype=dtype) * (2 / WIDTH) ** 0.5
    samples, targets = torch.randn(2, SAMPLES, WIDTH, generator=random, dtype=dtype)
    x, target = samples.chunk(ranks)[rank], targets.chunk(ranks)[rank]  # all that differs between ranks

    losses = []
    for step in range(STEPS):
        activations = forward(weights, x)
        error = activations[-1] - target
        loss = error.square().sum() / targets.numel()  # a share of the mean over all ranks' samples
        gradients = backward(weights, activations, 2 * error / targets.numel())
        weights -= LEARNING_RATE * gradients  # equal weights and equal gradients: they stay equal
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}")
    if rank == 0:
        print(f"rank 0 of {ranks} took {len(x)} of {SAMPLES} samples, and summed {LAYERS // BUCKET} buckets per step")
    return losses, weights


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
