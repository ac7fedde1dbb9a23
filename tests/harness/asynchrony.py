"""NCCL's semantics on gloo: a program may rely on `wait`, and on nothing that happens to be true before it.

    with asynchrony() as seen:
        train(config, mesh)
    assert not seen.faults

On gloo a program that uses a result too early, or frees a tensor too early, is often right by luck. In the block it is
not. From the launch of an asynchronous collective until its wait

- what it writes to holds NaN, because only the wait brings the result. That includes this rank's part of what is
  gathered in place, which NCCL would leave alone
- what it reads must stay in memory and keep its values; what it writes to must not be written to by anybody else
- `is_completed` answers at random, differently on each rank

and every collective must be waited for. The results are those of gloo, bit for bit.
"""

import inspect
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from common import collectives
from common.collectives import Call, Work
from common.start import environment

COLLECTIVES = "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange"  # or messages


@dataclass
class Seen:
    """What this rank did.

    faults: what would be wrong on NCCL, a line each.
    order: all operations in the order of their launch, each as its `Call`s, of which a batch of messages has several.
    members: the global ranks of the groups in these calls, by name.
    events: launches and waits in their order, as ("launch" or "wait", what, its number). An operation that is not
        asynchronous is waited for at once; that of a single number is left out.
    """

    faults: list[str] = field(default_factory=list)
    order: list[list[Call]] = field(default_factory=list)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    events: list[tuple[str, str, int]] = field(default_factory=list)

    def waited_at_once(self, name: str) -> int:
        """Of the operations of this name, how many are waited for before anything else is launched."""
        launches = [place for place, (what, which, _) in enumerate(self.events) if (what, which) == ("launch", name)]
        return sum(self.events[place + 1 :][:1] == [("wait", *self.events[place][1:])] for place in launches)


@contextmanager
def asynchrony(seed: int = 0) -> Iterator[Seen]:
    """Let the collectives of this rank behave as described above. They are recorded, too."""
    seen, in_flight, draw = Seen(), [], random.Random(f"{seed} {environment().rank}")
    with ExitStack() as stack:
        stack.enter_context(collectives.record(launched=lambda _, calls, __: seen.order.append(calls)))
        for name in COLLECTIVES:
            wrapped = _asynchronous(getattr(collectives, name), seen, in_flight, draw)
            stack.enter_context(mock.patch.object(collectives, name, wrapped))
        yield seen
        for work in list(in_flight):
            seen.faults.append(f"{work.name}: never waited for")
            work.wait()


class _InFlight:
    """A collective on private copies, in place of the `Work` that a program waits for."""

    def __init__(self, name: str, seen: Seen, in_flight: list, draw: random.Random):
        self.name, self.seen, self.in_flight, self.draw = name, seen, in_flight, draw
        self.work, self.results, self.before, self.number = Work(), [], [], len(seen.events)
        in_flight.append(self)
        seen.events.append(("launch", name, self.number))

    def launch(self, real, given: inspect.BoundArguments) -> None:
        """Call the real function with copies of all tensors, and watch the tensors themselves."""
        arguments, watched, to_write = given.arguments, [], []
        for key in arguments.keys() & {"tensor", "output", "input", "sends", "receives"}:
            is_list = key in ("sends", "receives")
            messages = arguments[key] if is_list else [(arguments[key], None)]
            copies = [(tensor.clone(), peer) for tensor, peer in messages]
            watched += [tensor for tensor, _ in messages]
            if key in ("tensor", "output", "receives"):
                to_write += [(tensor, copy) for (tensor, _), (copy, _) in zip(messages, copies, strict=True)]
            arguments[key] = copies if is_list else copies[0][0]
        self.work = real(*given.args, **given.kwargs)
        for tensor, result in to_write:
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
            self.results.append((tensor, result))
        self.before = [(tensor, tensor.data_ptr(), _bits(tensor).clone()) for tensor in watched]

    def is_completed(self) -> bool:
        return self not in self.in_flight or self.draw.random() < 0.5

    def wait(self) -> None:
        if self not in self.in_flight:
            return
        self.in_flight.remove(self)
        self.seen.events.append(("wait", self.name, self.number))
        for tensor, address, bits in self.before:
            freed = tensor.numel() and not tensor.untyped_storage().nbytes()
            if freed or tensor.data_ptr() != address:
                self.seen.faults.append(f"{self.name}: memory was freed before the wait")
            elif not torch.equal(_bits(tensor), bits):
                self.seen.faults.append(f"{self.name}: a tensor was changed before the wait")
        self.work.wait()
        for tensor, result in self.results:
            if tensor.untyped_storage().nbytes():
                tensor.data.copy_(result)
        self.results, self.before = [], []


def _asynchronous(real, seen: Seen, in_flight: list, draw: random.Random):
    """One of the functions of common.collectives, asynchronous as on NCCL."""
    signature = inspect.signature(real)

    def function(*args, **named):
        given = signature.bind(*args, **named)
        group = given.arguments["group"]
        seen.members[group.name] = group.ranks
        what = f"{real.__name__} of {group.name}"
        if group.size == 1 or not given.arguments.get("async_op"):
            tensor = given.arguments.get("tensor")
            if group.size > 1 and not (isinstance(tensor, torch.Tensor) and tensor.numel() == 1):  # the loss, say
                number = len(seen.events)
                seen.events += [("launch", what, number), ("wait", what, number)]
            return real(*args, **named)
        result = _InFlight(what, seen, in_flight, draw)
        result.launch(real, given)
        return result

    return function


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals NaN."""
    return tensor.detach().reshape(-1).view(torch.uint8)
