"""The block of multi-token prediction (`step08_5d/multi_token.py`): its backward as a ledger.

It is a layer of the last stage, between the head and all others, with more around it: a projection and two norms in
front, a norm of its own behind, and the embedding once more. Gradients of both predictions arrive in one tensor.
"""

from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory import kept, layer
from step08_5d.planning.memory.ends import BOTH, of_embedding
from step08_5d.planning.memory.ledger import Ledger, Linear
from step08_5d.planning.memory.linear import norm
from step08_5d.planning.memory.sizes import LayerSizes


def backward(model: ModelConfig, layout: Layout, *, shared: bool) -> Ledger:
    """Return the ledger of the block. It ends with the gradient of what the last layer has returned.

    Args:
        shared: whether the gradient of its embedding waits for that of another use of the same matrix.
    """
    size, experts = LayerSizes.of(model, layout), model.has_experts(model.layers)
    tensors = kept.at_work(model, layout, experts=experts) | kept.beside_second_block(model, layout, at_work=True)
    ledger = Ledger(tensors | {BOTH: 2 * size.stream}, splits=size.split)
    result = norm(ledger, size, "shared_head.norm", BOTH, stays=True)
    ledger.event("the block's output", {}, [result], leaves={layer.OUTPUT: size.stream})
    layer.through(ledger, model, layout, size, experts=experts)
    projection, of_input = Linear("eh_proj", 0.0, 2 * model.hidden**2 * size.w), "gradient of eh_proj.input"
    ledger.linear("projection", projection, {of_input: 2 * size.stream}, [layer.INPUT, "eh_proj.input"])
    ledger.add_up("projection", [projection])
    of_hidden = {"gradient of the last layer's output": size.stream}
    ledger.event("both predictions", of_hidden, [norm(ledger, size, "hnorm", of_input, stays=True), BOTH])
    embedded = norm(ledger, size, "enorm", of_input)
    if layout.recompute == "full":
        ledger.release(["embedded"])
    of_embedding(ledger, model, layout, size, embedded, waits=shared)
    return ledger
