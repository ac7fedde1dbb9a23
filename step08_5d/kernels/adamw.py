"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) on a flat shard: clip, update and narrow copy in one pass.

With g = factor * gradient, and t the number of this update:

    master     = master * (1 - lr * weight_decay)
    exp_avg    = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    master     = master - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
    copy       = master, rounded to the type of the model's weights

With a float32 gradient and a bfloat16 copy, at least 30 bytes per parameter are moved: 16 read and 14 written. As
separate PyTorch operations the same formula moves 118 (a test counts them). torch's fused AdamW with a copy after it
moves 38 (*predicted*): it writes the scaled gradient back, and the copy reads the master weights once more.

The learning rate, the clip factor and whether to skip the update are read on the device: the host never waits for the
gradient norm that they come from, and is free to launch the next step's kernels.
"""

import math

import torch

from step08_5d.kernels.launching import ceil_div, tl, triton, warps_for, wide_type

BLOCK = 1024  # elements per program


def settings_of(optimizer, parameter) -> dict:
    """Of the functions below for a parameter of step 1's `Optimizer`: weight_decay, betas and eps."""
    weight_decay = optimizer.weight_decay if parameter.spec.decay else 0.0
    return {"weight_decay": weight_decay, "betas": optimizer.betas, "eps": optimizer.eps}


def adamw_reference(
    master, exp_avg, exp_avg_sq, gradient, copy, step, lr, factor=None, skip=None, *, weight_decay, betas, eps
):
    if skip is not None and skip:
        return
    step, lr = step.to(master.dtype), lr.to(master.dtype)
    g = gradient.to(master.dtype) * (1 if factor is None else factor)
    master.mul_(1 - lr * weight_decay)
    exp_avg.mul_(betas[0]).add_(g, alpha=1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    denominator = (exp_avg_sq / (1 - betas[1] ** step)).sqrt_().add_(eps)
    master.sub_(exp_avg / denominator * (lr / (1 - betas[0] ** step)))
    if copy is not None:
        copy.copy_(master)


@triton.jit
def _adamw_kernel(
    master, exp_avg, exp_avg_sq, gradient, copy, step, lr, factor, skip, size,
    DECAY: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    EPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a run never changes is compiled in (and exact: Triton passes a Python float as float32)."""
    if skip is not None:
        if tl.load(skip) != 0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    g = tl.load(gradient + offsets, mask=inside, other=0.0).to(WIDE)
    m = tl.load(exp_avg + offsets, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + offsets, mask=inside, other=0.0)
    w = tl.load(master + offsets, mask=inside, other=0.0)
    if factor is not None:
        g *= tl.load(factor).to(WIDE)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    rate, count = tl.load(lr).to(WIDE), tl.load(step).to(WIDE)
    correction1 = 1 - tl.exp(count * LOG_BETA1)  # 1 - beta^t
    correction2 = 1 - tl.exp(count * LOG_BETA2)
    w = w * (1 - rate * DECAY) - rate / correction1 * m / (tl.sqrt(v / correction2) + EPS)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)
    tl.store(master + offsets, w, mask=inside)
    if copy is not None:
        tl.store(copy + offsets, w.to(copy.dtype.element_ty), mask=inside)


@torch.no_grad()
def adamw(master, exp_avg, exp_avg_sq, gradient, copy, step, lr, factor=None, skip=None, *, weight_decay, betas, eps):
    """Update contiguous tensors of one shape in place.

    master, exp_avg, exp_avg_sq: float32 or float64. gradient: any floating type. copy: the weights in a narrower type,
    or None if the model uses the masters themselves. step, lr, factor, skip: 0-d tensors on the same device. `step` is
    the number of this update, which the caller has counted; if `skip` is not 0, nothing changes.
    """
    size, logs = master.numel(), [math.log(beta) for beta in betas]
    tensors = [each for each in (master, exp_avg, exp_avg_sq, gradient, copy) if each is not None]
    if not all(each.is_contiguous() and each.numel() == size for each in tensors):
        raise ValueError("the tensors of an update are contiguous, and of one size")
    if size:
        _adamw_kernel[ceil_div(size, BLOCK),](
            master, exp_avg, exp_avg_sq, gradient, copy, step, lr, factor, skip, size,
            weight_decay, *betas, *logs, eps, wide_type(master.dtype), BLOCK, num_warps=warps_for(BLOCK),
        )  # fmt: skip
