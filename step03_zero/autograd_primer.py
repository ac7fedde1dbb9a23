"""Three facts about autograd on which ZeRO rests: hooks, their order, and versions.

    python step03_zero/autograd_primer.py

It prints what happens in the forward and backward of two layers, and what autograd says about changed weights.
"""

import torch
from torch import nn


def hooks_and_their_order() -> list[str]:
    """Run two layers forward and backward. Returns what happened, in order."""
    events = []
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]

    def before_forward(index):
        events.append(f"forward of layer {index} begins")

    def after_forward(index, output):
        events.append(f"forward of layer {index} is over")
        output.register_hook(lambda gradient: events.append(f"the gradient of layer {index}'s output is known"))

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda module, inputs, index=index: before_forward(index))
        layer.register_forward_hook(lambda module, inputs, output, index=index: after_forward(index, output))
        layer.weight.register_post_accumulate_grad_hook(
            lambda weight, index=index: events.append(f"the gradient of layer {index}'s weight is known")
        )
    layers[1](layers[0](torch.ones(1, 2))).sum().backward()
    return events


def versions() -> tuple[str, float]:
    """Change a weight between forward and backward, once so that autograd sees it and once so that it does not.

    Returns autograd's objection, and the gradient of x, which is the weight, 3.
    """
    x, weight = torch.ones(1, requires_grad=True), torch.tensor([3.0], requires_grad=True)
    y = x * weight  # keeps a reference to the weight, and notes its version
    with torch.no_grad():
        weight += 1  # in place: another version
    try:
        y.backward()
    except RuntimeError as error:
        objection = str(error).partition(":")[0]

    buffer = torch.tensor([3.0])
    weight.data = buffer.view(1)  # the memory of the buffer, but versions of its own
    y = x * weight
    buffer.untyped_storage().resize_(0)  # the memory is gone
    buffer.untyped_storage().resize_(4)
    buffer.fill_(3.0)  # another version of the buffer, the same version of the weight
    y.backward()
    return objection, x.grad.item()


if __name__ == "__main__":
    print("hooks, in the order in which they ran:", *hooks_and_their_order(), sep="\n  ")
    objection, gradient = versions()
    print(f"the weight was changed in place:\n  {objection}")
    print(f"its memory was emptied and refilled:\n  no objection, and the gradient of x is {gradient:g}")
