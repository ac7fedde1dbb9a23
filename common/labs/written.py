"""How ranks write down what they have returned and done, for the process that grades it.

A rank runs a student's file, so what it writes may be anything. It is JSON, with the numbers of tensors in base64:
reading it cannot run code, as reading a pickle can, and whatever has not the right types is refused with ValueError.
"""

import base64
import json
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from common.labs.notes import Held, Notes, SeenCall

SHOWN = 200  # characters of a value that is no tensor
DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@dataclass
class Failure:
    """What a rank reports that does not come to the end."""

    kind: str  # "raised", "unwritten", "reads the reference" or "hangs"
    text: str
    when: float
    calls: list[SeenCall] = field(default_factory=list)  # of a rank that hangs: all that it has started


class Other:
    """In the place of a value that is no tensor: what it looks like."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def plain(values: dict) -> dict[str, dict | None]:
    """Values as they are written: those that are no tensors are kept as text. This may run a student's own class."""
    return {name: _value(each) for name, each in values.items()}


def write_result(values: dict[str, dict | None], notes: Notes) -> bytes:
    """Of one rank in one case, with values that are `plain`."""
    return json.dumps({"values": values, "notes": vars(notes)}).encode()


def read_result(content: bytes) -> tuple[dict[str, Tensor | Other | None], Notes]:
    """Raises ValueError for what `write_result` does not write."""
    try:
        found = json.loads(content)
        values = {name: _read_value(each) for name, each in found["values"].items()}
        return values, _read_notes(found["notes"])
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def write_failure(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode()


def read_failure(content: bytes) -> Failure:
    """Raises ValueError for what `write_failure` does not write."""
    try:
        found = json.loads(content)
        calls = [_read_call(*each) for each in _is(list, found["calls"])]
        return Failure(_is(str, found["kind"]), _is(str, found["text"]), _is(float, found["when"]), calls)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _value(value) -> dict | None:
    if value is None:
        return None
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
        numbers = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
        named = {"type": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return named | {"numbers": base64.b64encode(numbers).decode()}
    return {"text": repr(value)[:SHOWN]}


def _read_value(found: dict | None) -> Tensor | Other | None:
    if found is None:
        return None
    if "text" in found:
        return Other(_is(str, found["text"]))
    numbers, shape = bytearray(base64.b64decode(found["numbers"])), _numbers(found["shape"])
    dtype = DTYPES[found["type"]]
    flat = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype) if numbers else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _read_notes(found: dict) -> Notes:
    counts = Counter({_is(str, name): _is(int, count) for name, count in found["counts"].items()})
    calls, unwaited = ([_read_call(*each) for each in found[name]] for name in ("calls", "unwaited"))
    waits = [(_is(int, line), _is(int, products)) for line, products in found["waits"]]
    largest = [Held(_is(int, size), _numbers(shape), _is(int, line)) for size, shape, line in found["largest"]]
    products, peak = _is(int, found["products"]), _is(int, found["peak"])
    changed = [(_is(str, name), _is(int, line)) for name, line in found["changed"]]
    multiplied = _is(int, found["multiplied"])
    return Notes(calls, waits, products, peak, largest, unwaited, changed, multiplied, counts)


def _read_call(op, size, members, line, products, peer) -> SeenCall:
    numbers = [_is(int, each) for each in (size, line, products)]
    peer = None if peer is None else _is(int, peer)
    return SeenCall(_is(str, op), numbers[0], _numbers(members), *numbers[1:], peer)


def _numbers(found: list) -> tuple[int, ...]:
    return tuple(_is(int, each) for each in _is(list, found))


def _is(kind: type, value):
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value
