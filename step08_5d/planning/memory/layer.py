"""The backward of a layer as a ledger: its MLP or experts, their norm, the attention, its norm.

Sizes are those of the operations that a dry run counts: PyTorch's own ones, `--tp-mode overlap` with sequence
parallelism, and zigzag. On a GPU, kernels need less at times. What happens at the ends of the model says `ends.py`.
Kept tensors have the names of step 1's list of activations.
"""

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step06_context_parallel import cost as context
from step08_5d.cost import Layout
from step08_5d.planning.memory import latent
from step08_5d.planning.memory.kept import at_work
from step08_5d.planning.memory.ledger import Ledger, Linear, Tensors
from step08_5d.planning.memory.linear import columns, norm, row
from step08_5d.planning.memory.sizes import LayerSizes, ulysses

OUTPUT, MIDDLE, INPUT = (f"gradient of the layer's {place}" for place in ("output", "middle", "input"))


def backward(model: ModelConfig, layout: Layout, *, experts: bool) -> Ledger:
    """Return the ledger of a layer. It begins with all that the layer keeps, and with the gradient of its output."""
    size = LayerSizes.of(model, layout)
    ledger = Ledger(at_work(model, layout, experts=experts) | {OUTPUT: size.stream}, splits=size.split)
    through(ledger, model, layout, size, experts=experts)
    return ledger


def through(ledger: Ledger, model: ModelConfig, layout: Layout, size: LayerSizes, *, experts: bool) -> None:
    """From the gradient of the layer's output to that of its input."""
    if experts:
        result = of_experts(ledger, model, layout, size)
    else:
        if layout.recompute == "full" and layout.tp > 1:  # to be scattered
            both = {"output, all tokens": size.whole, "output, all tokens, in order": size.whole - size.as_gathered}
            ledger.event("recomputed", both, both)
        result = swiglu(ledger, model, layout, size, model.ffn)
    result = norm(ledger, size, "mlp_norm", result)
    add_to_stream(ledger, size, result, OUTPUT, MIDDLE)
    of_attention = latent.attention if model.latent else attention
    result = norm(ledger, size, "attention_norm", of_attention(ledger, model, layout, size, MIDDLE))
    add_to_stream(ledger, size, result, MIDDLE, INPUT)


def swiglu(
    ledger: Ledger, model: ModelConfig, layout: Layout, size: LayerSizes, ffn: int, *, shared: bool = False
) -> str:
    """From the gradient of the layer's output, which stays, to that of the MLP's input, whose name is returned.

    Args:
        shared: whether it is a shared expert. That is whole on every tensor rank, which has a part of the sequence.
    """
    inner, of = layout.tokens * ffn / layout.tp * size.w, "shared." if shared else ""
    weight, divided = model.hidden * ffn / (1 if shared else layout.tp) * size.w, layout.tp > 1 and not shared
    gate, up, down = (Linear(f"{of}{name}", inner, weight) for name in ("gate", "up", "down"))
    product = row(ledger, size, f"{of}down", down, OUTPUT, divided=divided)
    of_silu, of_up, of_gate = (f"gradient of {of}{name}" for name in ("silu", "up", "gate"))
    both = {of_silu: inner, of_up: inner}
    ledger.event(f"{of}the product of silu and up", both, [product, f"{of}silu", f"{of}up"])
    ledger.event(f"{of}silu", {of_gate: inner}, [of_silu, f"{of}gate"])
    own_input = not shared or size.narrow  # in float32, shared experts read what the router reads
    input = f"{of}gate_up.input" if own_input else "router.input"
    return columns(ledger, size, f"{of}gate and up", [gate, up], input, divided=divided, input_stays=not own_input)


def add_to_stream(ledger: Ledger, size: LayerSizes, branch: str, old: str, new: str) -> None:
    """The gradient of a sublayer's input becomes part of the residual stream's."""
    ledger.event("norm: added to the residual stream", {new: size.stream}, [branch, old])


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(ledger: Ledger, model: ModelConfig, layout: Layout, size: LayerSizes, gradient: str) -> str:
    """From the gradient of the residual stream, which stays, to that of the attention's input. Returns its name."""
    heads = {"q": model.heads, "k": max(model.kv_heads, layout.tp), "v": max(model.kv_heads, layout.tp)}
    weights = {name: model.hidden * number * model.head_width / layout.tp * size.w for name, number in heads.items()}
    inner = {"q": size.queries, "k": size.keys, "v": size.keys}
    projection, divided = Linear("o_proj", size.queries, weights["q"]), layout.tp > 1
    of_output = row(
        ledger, size, "output projection", projection, gradient, divided=divided, input_stays=not ulysses(layout)
    )
    core(ledger, layout, size, of_output)
    rotated = {"rotated": size.queries * (2 * size.wide / size.stream + 1.5 if size.narrow else 2.5)}
    ledger.event("rotation", rotated, rotated)
    layers = [Linear(name, inner[name], weights[name]) for name in heads]
    return columns(ledger, size, "queries, keys and values", layers, "qkv.input", divided=divided)


def core(ledger: Ledger, layout: Layout, size: LayerSizes, of_output: str) -> None:
    """The attention itself: gradients of queries, keys and values for that of its output.

    Over cp ranks: sums for all queries, and keys, values and their sums in all places where step 6 holds them, and what
    a block of half the pairs adds. All-gathered, the most may be held when the sums have come home. With Ulysses, a
    rank has all tokens of some heads, in a single block.
    """
    q, k, ratio = size.queries, size.gathered_keys if ulysses(layout) else size.keys, size.wide / size.stream
    results = {"gradient of q": q, "gradient of k": size.keys, "gradient of v": size.keys}
    kept = [each for each in ("q", "k", "v", "o_proj.input", "attention output", "logsumexp") if each in ledger.tensors]
    again: Tensors = {}
    if layout.recompute == "selective":
        again = {"output, again": q, "logsumexp, again": size.statistics}
        again |= {"k, again": k, "v, again": k} if layout.cp > 1 else {}
        again |= {"q, again": q} if ulysses(layout) else {}
    if layout.cp == 1:
        ledger.event("attention", again | results, [of_output, *again, *kept])
        return
    sums = {"sums of q": ratio * q, "sums of k and v": 4 * ratio * k}
    block, moving, w, wide = max(q + k, q / 2 + 2 * k), 0.0, *WIDTHS[layout.dtype][:2]
    if ulysses(layout):
        block = q + 2 * k
    else:
        moving = context.buffers(layout.cp_mode, layout.cp, k / w, w, wide)["backward"]
    arrived = {"k and v of other ranks": 2 * layout.cp * k if layout.cp_mode == "allgather" else moving}
    held = again | sums | arrived | {"sums of k and v, of other ranks": moving - sum(arrived.values())}
    if layout.cp_mode == "allgather":
        home = {"sums of k and v, at home": 2 * ratio * k}
        rounded = {"gradients of q, k and v, rounded": q + 2 * k if size.narrow else 0.0}
        both = home | rounded
        ledger.event("attention: sums are at home", held | both, both, buffers=[*arrived, *home])
    makes = {"a block": block} | ({} if layout.cp_mode == "allgather" else held)
    ledger.event("attention", makes, [of_output, *held, "a block", *kept], buffers=arrived, leaves=results)


# ---- experts ---------------------------------------------------------------------------------------------------------


def of_experts(ledger: Ledger, model: ModelConfig, layout: Layout, size: LayerSizes) -> str:
    """Experts: gates, the way back from other ranks, three grouped products, the way there, and the router.

    Returns the name of the gradient of their input.
    """
    rows, away, ratio = model.top_k * size.stream, layout.ep > 1, size.wide / size.stream
    inner = model.top_k * layout.tokens / layout.tp * model.expert_ffn * size.w
    weight = model.experts / layout.ep * model.hidden * model.expert_ffn * size.w
    gate, up, down = (Linear(f"experts.{name}", inner, weight) for name in ("gate", "up", "down"))
    wide = {"gradient of rows, before rounding": ratio * rows, "gradient of gates, by element": ratio * rows}
    wide |= {f"{OUTPUT}, wide": size.wide if size.narrow else 0.0}
    of_rows, of_input = "gradient of rows", "gradient of experts.input"
    ledger.event("experts: gates", wide, [*wide, "experts.output"], leaves={of_rows: rows})
    if away:
        ledger.event("experts: rows travel", {f"{of_rows}, arrived": rows}, [of_rows], filled=[f"{of_rows}, arrived"])
        ledger.event("experts: rows in order", {of_rows: rows}, [f"{of_rows}, arrived"])
    of_product, of_silu = "gradient of experts.down.input", "gradient of experts.silu"
    ledger.linear("experts: down", down, {of_product: inner}, ["experts.down.input", of_rows])
    ledger.add_up("experts: down", [down])
    both = {of_silu: inner, "gradient of experts.up": inner}
    ledger.event("experts: the product of silu and up", both, ["experts.silu", "experts.up", of_product])
    ledger.event("experts: silu", {"gradient of experts.gate": inner}, [of_silu, "experts.gate"])
    by_up, by_gate = f"{of_input}, by up", f"{of_input}, by gate"
    ledger.linear("experts: up", up, {by_up: rows}, ["gradient of experts.up"])
    ledger.add_up("experts: up", [up])
    ledger.linear("experts: gate", gate, {by_gate: rows}, ["gradient of experts.gate", "experts.input"])
    ledger.add_up("experts: gate", [gate])
    ledger.event("experts: their sum", {of_input: rows}, [by_up, by_gate])
    sent = f"{of_input}, in order"
    if away:
        ledger.event("experts: rows in order", {sent: rows}, [of_input])
        ledger.event("experts: rows travel", {of_input: rows}, filled=[of_input, sent])
    added = [of_input]  # to one gradient of the layer's tokens
    if model.shared_experts:  # which compute while rows travel
        added.append(swiglu(ledger, model, layout, size, model.shared_experts * model.expert_ffn, shared=True))
    if away:
        ledger.event("experts: rows have travelled", releases=[sent])
    result = "gradient of the copied tokens"
    copies = {"rows, wide": ratio * rows, "their sum, wide": size.wide} if size.narrow else {}
    total = {result: size.stream}  # rounded when the wide rows are gone
    ledger.event("experts: copies added up", copies or total, [*added, *copies], leaves=total if copies else None)
    of_scores = {"gradient of router.input, by scores": size.wide}
    read = ["scores, choices and orders", "router.input"]
    ledger.event("experts: router", of_scores, [*of_scores, *read])
    ledger.store()
    return result
