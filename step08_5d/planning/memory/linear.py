"""The backward of what layers are made of, as entries of a ledger: the matrices at both ends of a sublayer, alone or
divided over tp ranks, and norms. Hidden states are as wide as `LayerSizes` says."""

from step08_5d.planning.memory.ledger import Ledger, Linear
from step08_5d.planning.memory.sizes import LayerSizes


def row(
    ledger: Ledger,
    size: LayerSizes,
    event: str,
    layer: Linear,
    gradient: str,
    *,
    divided: bool,
    input_stays: bool = False,
) -> str:
    """A matrix that ends a sublayer: from the gradient of the residual stream, which stays, to that of its input.

    If it is divided, the gradient of its output is gathered first, and put in order unless there is a single sequence.

    Args:
        gradient: the name of that of the residual stream. input_stays: others need the matrix's input later.

    Returns the name of the result.
    """
    input, result = f"{layer.name}.input", f"gradient of {layer.name}.input"
    operands, shared = ([], [input]) if input_stays else ([input], [])
    if divided:
        gathered, arrived = f"{gradient}, gathered", "what arrives"
        copy = {} if size.one else {arrived: size.whole}
        buffers = [arrived] if copy else [gathered]
        ledger.event(f"{event}: gathered", {gathered: size.whole} | copy, copy, buffers=buffers)
        operands.append(gathered)
    else:
        shared.append(gradient)
    ledger.linear(event, layer, {result: layer.inner}, operands, shared)
    ledger.add_up(event, [layer])
    return result


def columns(
    ledger: Ledger,
    size: LayerSizes,
    event: str,
    layers: list[Linear],
    input: str,
    *,
    divided: bool,
    input_stays: bool = False,
) -> str:
    """Matrices of the same input: the gradients of their outputs become one of the input.

    Args:
        input_stays: others need it later.

    Returns the name of the result.
    """
    if divided:
        return _divided_columns(ledger, size, event, layers, input)
    total = ""
    for layer in reversed(layers):
        total = column(ledger, size, event, layer, input, total, last=layer is layers[0], input_stays=input_stays)
    return total


def column(
    ledger: Ledger,
    size: LayerSizes,
    event: str,
    layer: Linear,
    input: str,
    total: str,
    *,
    last: bool,
    input_stays=False,
) -> str:
    """One of the matrices of an input.

    Args:
        total: the name of the gradient of the input by the matrices before, or "". last: whether none comes after it.

    Returns the name of the gradient by all of them so far.
    """
    part, operands, shared = f"gradient of {input}, by {layer.name}", [f"gradient of {layer.name}"], []
    if last:
        (shared if input_stays else operands).append(input)
    ledger.linear(event, layer, {part: size.stream}, operands, shared)
    ledger.add_up(event, [layer], releases=not total)  # autograd adds up the input's gradients first
    if total:
        parts = [total, part, *([] if ledger.splits else [layer.gradient])]
        part = f"gradient of {input}" if last else f"{part} and before"
        ledger.event(f"{event}: their sum", {part: size.stream}, parts)
    return part


def _divided_columns(ledger: Ledger, size: LayerSizes, event: str, layers: list[Linear], input: str) -> str:
    """The same over tensor ranks: the input is gathered again, its gradient is a sum over the ranks, scattered to them.

    Both travel while this rank computes the gradients of the weights.
    """
    x, result = size.whole, f"gradient of {input}"
    gathered, in_order = f"{input}, gathered", f"{input}, gathered, in order"
    total, part = f"{result}, all tokens", f"{result}, all tokens, by a layer"
    parts = {} if len(layers) == 1 and size.one else {part: x}  # or, of several sequences, what is to be scattered
    ledger.event(f"{event}: their sum", {gathered: x, total: x} | parts, parts, buffers=[gathered])
    releases = [total, input]
    if not size.one:
        ledger.event(f"{event}: in order", {in_order: x})
        releases.append(gathered)
        gathered = in_order
    gradients = [f"gradient of {layer.name}" for layer in layers]
    if ledger.splits:
        for layer in reversed(layers):
            ledger.put_off(layer, [f"gradient of {layer.name}", *([gathered] if layer is layers[0] else [])])
        # Of one sequence, nothing is made any more when the sum is on its way
        ledger.event(event, {result: size.stream}, releases, buffers=[result] if size.one else [result, total])
    else:
        weights = {layer.gradient: layer.weight for layer in layers}
        releases += [gathered, *gradients]
        ledger.event(event, {result: size.stream} | weights, releases, buffers=[result, total])
        ledger.add_up(event, layers)
    return result


def norm(ledger: Ledger, size: LayerSizes, name: str, gradient: str, *, stays: bool = False) -> str:
    """RMSNorm: from the gradient of its output to that of its input. Returns its name.

    It has kept its input in the type of sums, and the normalised input for the gradient of its gain.

    Args:
        stays: whether the gradient is a part of a tensor that others need later.
    """
    x, wide, of_normalised = size.stream, size.wide, f"gradient of {name}.normalised"
    both = {of_normalised: x, "gradient of the gain, by token": x}
    released = ["gradient of the gain, by token", f"{name}.normalised", *([] if stays else [gradient])]
    ledger.event("norm: gain", both, released)
    ledger.store()
    if size.narrow:
        ledger.event("norm: in the type of sums", {f"{of_normalised}, wide": wide}, [of_normalised])
        of_normalised += ", wide"
    direct, result = f"gradient of {name}.input, by its scale alone", f"gradient of {name}.input"
    of_rsqrt = {f"gradient of {name}.rsqrt, by element": wide}
    ledger.event("norm: scaled", {direct: wide} | of_rsqrt, [of_normalised, *of_rsqrt])
    squares = {f"gradient of {name}.input, by {each}": wide for each in ("its mean", "its square", "both")}
    ledger.event("norm: square", squares | {result: wide}, [direct, *squares, f"{name}.input"])
    if size.narrow:
        ledger.event("norm: rounded", {f"{result}, rounded": x}, [result])
        result += ", rounded"
    return result
