"""One training step by hand: gradient accumulation, recomputation and master weights, for three layers.

    python step01_single_gpu/sketch.py

It takes the same five steps in four ways. For each it prints the losses, which agree up to rounding, and how many
activations were in memory at most. From the first way to the third they become fewer. In the fourth there are as many
as in the third, but each takes two bytes instead of four.
A name that begins with d is a gradient: dx is that of the loss with respect to x.
"""

import torch
from torch import Tensor

LAYERS, WIDTH, HIDDEN, SAMPLES, STEPS, LEARNING_RATE = 3, 32, 128, 16, 5, 0.2


def forward(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """One layer. Returns its output, and the numbers between its two weights."""
    hidden = torch.relu(x @ up)
    return x + hidden @ down, hidden


def backward(dy: Tensor, x: Tensor, hidden: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dup and ddown."""
    # --- write this yourself ---
    dhidden = (dy @ down.T) * (hidden > 0)
    return dy + dhidden @ up.T, x.T @ dhidden, hidden.T @ dy
    # --- until here ---


def count(kept: list[tuple[Tensor, Tensor | None]]) -> int:
    """Numbers in the inputs and hidden tensors of layers."""
    return sum(tensor.numel() for pair in kept for tensor in pair if tensor is not None)


def train_step(masters, samples: Tensor, targets: Tensor, micro_batches: int, recompute: bool, dtype: torch.dtype):
    """Update the master weights. Returns the loss, and the most activations that were kept at once."""
    layers = [[weight.to(dtype) for weight in layer] for layer in masters]  # what forward and backward use
    sums = [[torch.zeros_like(weight) for weight in layer] for layer in masters]  # of gradients, wide as the masters
    loss, most = 0.0, 0
    for x, target in zip(samples.chunk(micro_batches), targets.chunk(micro_batches)):
        # --- write this yourself ---
        x, kept = x.to(dtype), []
        for up, down in layers:
            y, hidden = forward(x, up, down)
            kept.append((x, None if recompute else hidden))
            x = y

        error = x - target  # wide, like the target
        loss += error.square().sum() / targets.numel()  # a share of the mean over the whole batch
        dx = (2 * error / targets.numel()).to(dtype)
        for (up, down), (sum_up, sum_down) in zip(reversed(layers), reversed(sums)):
            x, hidden = kept.pop()
            if hidden is None:
                _, hidden = forward(x, up, down)  # recomputation
            most = max(most, count([*kept, (x, hidden)]))
            dx, dup, ddown = backward(dx, x, hidden, up, down)  # a layer's input is the previous layer's output
            sum_up += dup  # accumulation: the sum of the micro-batches' gradients is the batch's gradient
            sum_down += ddown
        # --- until here ---
    for layer, gradients in zip(masters, sums):
        for master, gradient in zip(layer, gradients):
            master -= LEARNING_RATE * gradient  # 1 + 0.001 is 1 in bfloat16, but not here
    return loss, most


def train(micro_batches: int, recompute: bool, dtype: torch.dtype = torch.float32):
    """Take all steps. Returns the losses, the master weights, and the most activations that were kept at once."""
    wide = torch.promote_types(dtype, torch.float32)  # float32 if dtype is narrower
    random = torch.Generator().manual_seed(0)
    masters = []
    for _ in range(LAYERS):
        up, down = torch.randn(2, WIDTH, HIDDEN, generator=random, dtype=wide) * 0.1
        masters.append([up, down.T.contiguous()])
    samples, targets = torch.randn(2, SAMPLES, WIDTH, generator=random, dtype=wide)
    losses, most = [], 0
    for _ in range(STEPS):
        loss, most = train_step(masters, samples, targets, micro_batches, recompute, dtype)
        losses.append(loss.item())
    return losses, masters, most


if __name__ == "__main__":
    for micro_batches, recompute, dtype in [
        (1, False, torch.float32),
        (4, False, torch.float32),
        (4, True, torch.float32),
        (4, True, torch.bfloat16),
    ]:
        losses, _, most = train(micro_batches, recompute, dtype)
        print(f"{micro_batches} micro-batches, {'recomputed' if recompute else 'kept'}, {dtype}".ljust(45), end="")
        print(f"at most {most:6,} activations; losses", *(f"{loss:.6f}" for loss in losses))
