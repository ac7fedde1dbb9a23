"""Activation recomputation by hand: keep only a region's inputs, and run its forward again in the backward.

The field says "activation checkpointing" or "gradient checkpointing"; PyTorch has it as torch.utils.checkpoint.
Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174) for `full`; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 5, for `selective`.

  none       every layer keeps what its backward needs
  selective  the attention core keeps only q, k and v; scores and probabilities are computed again
  full       a layer keeps only its input and computes everything again: one more forward, so that D tokens take up
             to 8 Psi D FLOPs instead of 6 Psi D (Psi is the number of parameters; the head's are not repeated)
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn


class _Recompute(torch.autograd.Function):
    """function(*inputs), which returns one tensor; only `inputs` are kept for the backward."""

    @staticmethod
    def forward(ctx, function, *inputs):
        # --- write this yourself ---
        ctx.function = function
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in inputs]
        ctx.others = [None if tensor else value for value, tensor in zip(inputs, ctx.is_tensor, strict=True)]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
        return function(*inputs)  # autograd does not look into a Function's forward, so nothing in it is kept
        # --- until here ---

    @staticmethod
    def backward(ctx, gradient):
        # --- write this yourself ---
        saved = iter(ctx.saved_tensors)
        inputs = list(ctx.others)
        for index, tensor in enumerate(ctx.is_tensor):
            if tensor:  # cut off from the graph before it: the nested backward ends here, the outer one continues
                inputs[index] = next(saved).detach().requires_grad_(ctx.needs_input_grad[index + 1])
        with torch.enable_grad():
            output = ctx.function(*inputs)
        # A nested backward instead of autograd.grad: weights inside get their gradients and fire their hooks as usual
        torch.autograd.backward(output, gradient)
        return None, *(value.grad if isinstance(value, torch.Tensor) else None for value in inputs)
        # --- until here ---


def recompute(function, *inputs):
    """function(*inputs), which returns one tensor, but only `inputs` are kept: the backward computes it again.

    Weights inside get gradients only if some input requires one (a layer's hidden states always do). The function must
    not draw random numbers: this model has no dropout, so no state of a random generator is restored.
    """
    return _Recompute.apply(function, *inputs)


def apply_recompute(model, mode: str) -> None:
    """Make every layer of a `Decoder` recompute (mode "none", "selective" or "full"), whatever it is made of later.

    It replaces the way in which a layer calls a function, and not the function. So a mechanism that replaces the
    function afterwards has the new one recomputed. (A wrapper around the old one would be lost in silence.)
    """
    for layer in model.layers.values():
        if mode == "selective":
            layer.attention.call = recompute  # of its core
        elif mode == "full":
            layer.call = recompute  # of `compute`, within its forward: hooks on the layer run once


# ---- in any model ----------------------------------------------------------------------------------------------------


def recompute_modules(modules: Iterable[nn.Module]) -> None:
    """Let modules of any kind keep only what is handed to their `forward`, which returns one tensor.

    Parameters keep their names. Hooks on a module run once, because only its `forward` is computed again. Raises
    ValueError for a module with dropout.
    """
    for module in modules:
        for each in module.modules():
            if isinstance(each, nn.modules.dropout._DropoutNd) and each.p:
                raise ValueError(f"{type(module).__name__} has {each}, which would draw other numbers the second time")
        module.forward = _keeping_inputs(module.forward)


def _keeping_inputs(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function`, recomputed, for inputs with and without names."""

    @functools.wraps(function)
    def call(*inputs, **named) -> torch.Tensor:
        count, names = len(inputs), tuple(named)

        def unnamed(*values):  # autograd's Functions take no names
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        output = _Recompute.apply(unnamed, *inputs, *named.values())
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{function.__qualname__} returns a {type(output).__name__}; one tensor can be recomputed")
        return output

    return call
