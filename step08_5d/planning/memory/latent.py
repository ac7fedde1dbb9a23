"""The backward of latent attention (`common/latent_attention.py`) as entries of a ledger: see `layer.py`.

Tokens are divided in two ways. Down-projections, their norms and the residual stream have a tensor rank's part of the
sequence. The latent and the rotated key, of which K and V are made, are whole on every tensor rank, and so a rank's
heads see all tokens.
"""

from typing import NamedTuple

from common.costs.vocabulary import WIDTHS
from common.counts import attention_parts
from common.model_config import ModelConfig
from step06_context_parallel import cost as context
from step08_5d.cost import Layout
from step08_5d.planning.memory.ledger import Ledger, Linear, Tensors
from step08_5d.planning.memory.linear import column, columns, norm, row
from step08_5d.planning.memory.sizes import LayerSizes


class _Widths(NamedTuple):
    """Bytes of tensors that only latent attention has."""

    ratio: float  # of a sum to an activation
    narrower: bool  # values than keys
    values: float  # of all tokens, of a rank's heads; as of outputs
    pairs: float  # the same of what latents are multiplied to: plain parts of keys, and values
    turned: float  # the same of the rotated part of queries
    latent: float  # of all tokens
    shared: float  # latent and rotated key of all tokens
    weights: dict[str, float]  # of a rank, by name

    @classmethod
    def of(cls, model: ModelConfig, layout: Layout, size: LayerSizes) -> "_Widths":
        latent, tokens = model.latent, layout.tokens * size.w
        heads = model.heads / layout.tp * tokens
        parts = {name: number * size.w for name, number in attention_parts(model).items()}
        weights = {name: each if "_a_" in name else each / layout.tp for name, each in parts.items()}
        by_head = (heads * width for width in (latent.value_dim, latent.pair_width, latent.rope_dim))
        narrower = latent.value_dim < latent.key_width
        return cls(
            size.wide / size.stream, narrower, *by_head, tokens * latent.kv_rank, tokens * latent.shared_width, weights
        )


def kept(model: ModelConfig, layout: Layout, size: LayerSizes, recompute: str, listed: Tensors) -> Tensors:
    """Of step 1's list for one rank, what tensor ranks and the ring keep otherwise. See `tensors_of_layer`."""
    widths = _Widths.of(model, layout, size)
    rotated = widths.shared - widths.latent
    whole = {"kv_b_proj.input": widths.shared, "rotated key": rotated}
    result = listed | {name: each for name, each in whole.items() if name in listed}
    if layout.cp > 1 and recompute == "none":  # what has travelled, and an output that is no wider than values
        for name in ("kv_b_proj.input", "k", "v"):
            del result[name]
        result |= {"out": widths.values, "latent": widths.latent, "rotated key": rotated}
    return result


def attention(ledger: Ledger, model: ModelConfig, layout: Layout, size: LayerSizes, gradient: str) -> str:
    """From the gradient of the residual stream, which stays, to that of the attention's input. Returns its name."""
    widths, divided, shape = _Widths.of(model, layout, size), layout.tp > 1, model.latent
    of_latents = size.as_wide_as(shape.kv_rank / model.hidden)

    def linear(name: str, inner: float = 0.0) -> Linear:
        return Linear(name, inner, widths.weights[name])

    of_output = row(ledger, size, "output projection", linear("o_proj", widths.values), gradient, divided=divided)
    (of_ring if layout.cp > 1 else of_whole_sequences)(ledger, layout, size, widths, of_output)

    # The rotated part of queries beside them, which then get a tensor of their own
    rotated = {"rotated": widths.turned * (2 * widths.ratio + 2.5 if size.narrow else 3.5)}
    ledger.event("rotation", rotated, rotated)
    beside = {"gradient of q, rotated": widths.turned}
    queries = {"gradient of q, joined": size.queries}
    ledger.event("rotation: joined", beside | queries, ["gradient of q", *beside])

    both, part = "gradient of latent and rotated key", widths.shared / layout.tp
    ledger.event("latent and rotated key: joined", {both: widths.shared}, ["gradient of latent", "gradient of key"])
    of_part = both
    if divided:
        of_part, copy = f"{both}, scattered", {} if size.one else {"in order": widths.shared}
        ledger.event("latent: scattered", copy | {of_part: part}, [both, *copy], filled=[of_part])
    of_latent = norm(ledger, of_latents, "kv_a_norm", of_part, stays=True)
    ledger.event("latent: joined", {"gradient of kv_a_proj": part}, [of_latent, of_part])
    first, event = linear("kv_a_proj"), "down-projections"
    total = column(ledger, size, event, first, "qkv.input", "", last=False)

    name = "q_b_proj" if shape.q_rank else "q_proj"
    ledger.event("queries: in order", {f"gradient of {name}": size.queries}, ["gradient of q, joined"])
    if shape.q_rank:
        narrow = size.as_wide_as(shape.q_rank / model.hidden)
        result = columns(ledger, narrow, "queries", [linear(name)], "q_b_proj.input", divided=divided)
        of_queries = norm(ledger, narrow, "q_a_norm", result)
        ledger.event("queries: latent", {}, [of_queries], leaves={"gradient of q_a_proj": narrow.stream})
        return column(ledger, size, event, linear("q_a_proj"), "qkv.input", total, last=True)
    if not divided:
        return column(ledger, size, event, linear(name), "qkv.input", total, last=True)
    part = columns(ledger, size, "queries", [linear(name)], "qkv.input", divided=True)
    ledger.event(f"{event}: their sum", {"gradient of qkv.input, summed": size.stream}, [part, total])
    return "gradient of qkv.input, summed"


def of_whole_sequences(ledger: Ledger, layout: Layout, size: LayerSizes, widths: _Widths, of_output: str) -> None:
    """The core, and the expansion: gradients of queries, latent and rotated key.

    The kernel wants values, and the gradients of outputs, as wide as keys.
    """
    again: Tensors = {}
    if layout.recompute == "selective":  # the gradient of the output stays, as do the inputs
        again = {f"{each}, again": size.queries for each in ("k", "v", "out")} | {"logsumexp, again": size.statistics}
        again |= {} if widths.narrower else {"v, again": widths.pairs}  # beside the plain parts of keys
    stays, released, of_values = [of_output] if again else [], [of_output], "gradient of v"
    kept_ones = [each for each in ("q", "k", "v", "out", "logsumexp") if each in ledger.tensors and not stays]
    if widths.narrower:
        wide = {"gradient of the output, as wide as keys": size.queries}
        ledger.event("attention: as wide as keys", wide, [] if stays else released)
        released = [*wide]
    elif stays:
        released = []
    results = {f"gradient of {each}": size.queries for each in "qk"} | {of_values: size.queries}
    ledger.event("attention", again | results, [*released, *again, *kept_ones])
    if widths.narrower:
        ledger.event("expansion: values", {"gradient of values": widths.values}, [of_values])
        of_values = "gradient of values"
    parts, whole = {"gradient of plain parts and values": widths.pairs}, {"gradient of kv_b_proj": widths.pairs}
    key = {"gradient of key": widths.shared - widths.latent}
    ledger.event("expansion: joined", key | parts, ["gradient of k", of_values])
    ledger.event("expansion: in order", whole, parts)
    layer = Linear("kv_b_proj", 0.0, widths.weights["kv_b_proj"])
    ledger.linear("expansion", layer, {"gradient of latent": widths.latent}, [*whole, "kv_b_proj.input"])
    ledger.add_up("expansion", [layer])
    if stays:
        ledger.event("attention: over", {}, [*stays, "q", "rotated key"])


def of_ring(ledger: Ledger, layout: Layout, size: LayerSizes, widths: _Widths, of_output: str) -> None:
    """The same where latents travel, and each rank expands those that have arrived.

    The most is held in a hop with other ranks' latents, when gradients of K and V are folded into one tensor, or with
    those of this rank, when it computes all of its queries' pairs at once.
    """
    w, high, _ = WIDTHS[layout.dtype]
    ratio, weight = widths.ratio, widths.weights["kv_b_proj"]
    again: Tensors = {}
    if layout.recompute == "selective":
        again = {"out, again": widths.values, "logsumexp, again": size.statistics}
        again |= {"latent, again": widths.latent, "rotated key, again": widths.shared - widths.latent}
    kept_ones = [each for each in ("q", "latent", "rotated key", "out", "logsumexp") if each in ledger.tensors]
    kept_ones += ["kv_b_proj.input"] if "kv_b_proj.input" in ledger.tensors else []
    results = {"gradient of q": size.queries, "gradient of latent": widths.latent}
    results |= {"gradient of key": widths.shared - widths.latent}
    layer = Linear("kv_b_proj", 0.0, weight)
    lives = again | {"sums of q": ratio * size.queries, "sums at home": ratio * widths.shared}
    expanded = {"expanded": widths.pairs + size.queries, "their sums": ratio * (size.queries + widths.values)}
    folded, total = {"folded, twice": 2 * ratio * widths.pairs}, {"sum of kv_b_proj.weight": ratio * weight}
    moving = context.buffers("ring", layout.cp, widths.shared / w / 2, w, high)["backward"]
    arriving, of_sums = {"what arrives": widths.shared}, 2 * ratio * widths.shared
    block = {"a block": (6 if widths.narrower else 3) * size.queries}
    ledger.event("attention: own keys", lives | arriving | expanded | block, [*block, *arriving], buffers=arriving)
    ledger.event("attention: own keys, folded", folded | arriving, [*folded, *arriving], buffers=arriving)
    arriving = {"what arrives": moving - of_sums, "sums of other ranks": of_sums}
    block = {"a block": (4.5 if widths.narrower else 2.5) * size.queries}
    ledger.event("attention", total | arriving | block, block, buffers=arriving)
    released = [of_output, *lives, *expanded, *folded, *arriving, *kept_ones]
    if ledger.splits:  # it waits for the second half as it is
        ledger.put_off(Linear(layer.name, 0.0, 0.0), [*total])
    else:
        released, results[layer.gradient] = [*released, *total], weight
    ledger.event("attention: folded", folded, released, buffers=arriving, leaves=results)
    ledger.add_up("expansion", [layer])
