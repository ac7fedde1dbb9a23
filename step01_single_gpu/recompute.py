"""Activation recomputation by hand: keep a region's inputs, run its forward again when the backward comes.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174) for `full`; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 5, for `selective`.

  none       every layer keeps what its backward needs
  selective  the attention core keeps only q, k and v; scores and probabilities are made again
  full       a layer keeps only its input; everything in it is made again, for one more forward: 8 N D FLOPs, not 6 N D
"""

import functools

import torch


class _Recompute(torch.autograd.Function):
    """function(*inputs) with one tensor as result, keeping `inputs` only."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in inputs]
        ctx.others = [None if tensor else value for value, tensor in zip(inputs, ctx.is_tensor, strict=True)]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
        return function(*inputs)  # autograd does not look into a Function's forward: nothing in there is kept

    @staticmethod
    def backward(ctx, gradient):
        saved = iter(ctx.saved_tensors)
        inputs = list(ctx.others)
        for index, tensor in enumerate(ctx.is_tensor):
            if tensor:  # cut off from the graph before it: this backward ends here, the outer one goes on
                inputs[index] = next(saved).detach().requires_grad_(ctx.needs_input_grad[index + 1])
        with torch.enable_grad():
            output = ctx.function(*inputs)
        # A nested backward, not autograd.grad: the weights inside get their gradients and fire their hooks as usual
        torch.autograd.backward(output, gradient)
        return None, *(value.grad if isinstance(value, torch.Tensor) else None for value in inputs)


def recomputed(function):
    """`function`, computed again in the backward instead of keeping what it saved.

    Its gradient reaches the weights inside only if some input requires a gradient (a layer's hidden states always do).
    It must not draw random numbers: this model has no dropout, so there is no generator state to put back.
    """
    return functools.wraps(function)(functools.partial(_Recompute.apply, function))


def apply_recompute(model, mode: str) -> None:
    """Make every layer of a `Decoder` recompute: mode none, selective or full. Parameters keep their names."""
    for layer in model.layers.values():
        if mode == "selective":
            layer.attention.core = recomputed(layer.attention.core)
        elif mode == "full":
            forward = layer.forward  # (x, (cos, sin)) -> x; autograd sees tensors only as arguments, not in a tuple
            flat = recomputed(lambda x, cos, sin, forward=forward: forward(x, (cos, sin)))
            layer.forward = lambda x, rope, flat=flat: flat(x, *rope)
