"""ZeRO-3 without hooks or autograd: three linear layers, of whose weights each rank stores a part.

    python step03_zero/sketch.py
    torchrun --nproc_per_node 2 step03_zero/sketch.py

One rank and several take the same samples together, so both commands print the same losses, up to rounding. The lesson
begins with this file; unit.py and zero.py do the same for any model, with an optimizer, and in advance.
"""

import torch
from torch import Tensor

from common import collectives
from common.launch import end_cleanly
from common.process_groups import Degrees, Group, build_mesh
from common.start import environment, init_distributed

LAYERS, WIDTH, SAMPLES, STEPS, LEARNING_RATE = 3, 64, 16, 5, 10.0


def gather(shard: Tensor, world: Group) -> Tensor:
    """Return the whole weight, of which every rank stores some rows."""
    weight = shard.new_empty(world.size * len(shard), shard.shape[1])
    collectives.all_gather(weight, shard, world)
    return weight


def reduce_scatter(gradient: Tensor, world: Group) -> Tensor:
    """Return this rank's rows of the sum of every rank's gradient."""
    rows = gradient.new_empty(len(gradient) // world.size, gradient.shape[1])
    collectives.reduce_scatter(rows, gradient, world)
    return rows


def train_step(shards: list[Tensor], x: Tensor, target: Tensor, world: Group) -> Tensor:
    """Update this rank's part of each layer. Returns this rank's share of the loss, a mean over all ranks' samples."""
    activations = [x]
    for shard in shards:  # forward
        weight = gather(shard, world)
        activations.append(torch.relu(activations[-1] @ weight))
        del weight

    error = activations[-1] - target
    gradient = 2 * error / (world.size * error.numel())
    for shard in reversed(shards):  # backward
        weight = gather(shard, world)
        gradient = gradient * (activations.pop() > 0)
        weight_gradient = activations[-1].T @ gradient
        gradient = gradient @ weight.T
        del weight
        shard -= LEARNING_RATE * reduce_scatter(weight_gradient, world)
    return error.square().sum() / (world.size * error.numel())


def main() -> None:
    world = build_mesh(Degrees(dp=environment().world_size), init_distributed("cpu")).world
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=random) * (2 / WIDTH) ** 0.5 for _ in range(LAYERS)]
    shards = [weight.chunk(world.size)[world.rank].clone() for weight in weights]  # all that a rank keeps
    del weights
    x, target = torch.randn(SAMPLES, WIDTH, generator=random), torch.rand(SAMPLES, WIDTH, generator=random)
    mine = [each.chunk(world.size)[world.rank] for each in (x, target)]
    for step in range(STEPS):
        loss = train_step(shards, *mine, world)
        collectives.all_reduce(loss, world)
        if world.rank == 0:
            print(f"step {step}  loss {loss:.6f}")
    if world.rank == 0:
        print(f"rank 0 of {world.size} stores {sum(map(len, shards)) * WIDTH:,} of {LAYERS * WIDTH * WIDTH:,} weights")


if __name__ == "__main__":
    end_cleanly(main)
