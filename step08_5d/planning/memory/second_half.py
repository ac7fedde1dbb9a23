"""The second half of a backward (zb-h1, zb-h2) as a ledger: gradients of matrices that the first half has put off."""

from collections.abc import Sequence

from step08_5d.planning.memory.ledger import Deferred, Ledger, Linear


def bytes_of(deferred: Sequence[Deferred]) -> float:
    """Return the bytes that are kept between the halves for these matrices."""
    return sum(sum(each.operands.values()) for each in deferred)


def backward(deferred: Sequence[Deferred]) -> Ledger:
    """Return the ledger of one product after the other.

    The gradient before is still there, but not what that one was computed from.
    """
    numbered = {f"{number}: {each.name}": each for number, each in enumerate(deferred)}
    operands = {name: sum(each.operands.values()) for name, each in numbered.items()}
    ledger, before = Ledger(operands), []
    for name, each in numbered.items():
        layer = Linear(name, 0.0, each.weight)
        ledger.event(each.name, {layer.gradient: layer.weight}, before)
        ledger.add_up(each.name, [layer], releases=False)
        ledger.release([name])
        before = [layer.gradient]
    return ledger
