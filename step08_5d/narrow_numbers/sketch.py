"""One linear layer in FP8, in PyTorch alone: `python sketch.py` trains it beside a wide one. See README.md."""

import torch
from torch import Tensor

FORMAT, TOP, TILE = torch.float8_e4m3fn, 448.0, 128


def quantise(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """x (m, k) in tiles of `rows` x 128 -> its FP8 numbers, and the scale of each."""
    tiles = x.view(-1, rows, x.shape[1] // TILE, TILE)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp_min(1e-30) / TOP
    numbers = (tiles / scale).clamp(-TOP, TOP).to(FORMAT)
    return numbers.view_as(x), scale.expand_as(tiles).reshape(x.shape)


def multiply(left: Tensor, right: Tensor, right_rows: int = 1) -> Tensor:
    """left (m, k) times right (n, k) transposed: FP8 operands, sums in float32."""
    (a, scale_a), (b, scale_b) = quantise(left.float(), 1), quantise(right.float(), right_rows)
    return (a.float() * scale_a) @ (b.float() * scale_b).T


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # (tokens, in), (out, in) -> (tokens, out)
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, TILE).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = multiply(dy, weight.T, TILE).to(x.dtype)  # adds up `out`
        dw = multiply(dy.T, x.T)  # adds up tokens, so tiles lie along tokens
        return dx, dw


def train(linear, steps: int = 200) -> list[float]:
    """Fit a random matrix; returns the losses. The gradients are about 1e-7: unscaled, FP8 would make them 0."""
    generator = torch.Generator().manual_seed(0)
    x, target, weight = (torch.randn(256, 256, generator=generator) for _ in range(3))
    x[:, 3] *= 100  # an outlier
    weight = (0.01 * weight).requires_grad_()
    optimizer, losses = torch.optim.AdamW([weight], lr=1e-2), []
    for _ in range(steps):
        loss = (linear(x.bfloat16(), weight) - x @ target.T / 16).square().mean() * 1e-3
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wide(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.bfloat16().T


if __name__ == "__main__":
    for step, (narrow, expected) in enumerate(zip(train(Linear8.apply), train(wide), strict=True)):
        if step % 40 == 0:
            print(f"step {step:3}  FP8 tiles {narrow:.4g}  bfloat16 {expected:.4g}")
