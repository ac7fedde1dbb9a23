"""What a rank really sends and holds, in the words of `common.costs.vocabulary`, beside what a `cost.py` predicts.

counted = on_ranks(2, on_every_case, count_step, cases)     # def count_step(mesh, flags): run = Run(mesh, **flags);
print_counted("a step", {"tp 2": cost.messages(...)}, ...)  #     return counted(run.gradients, mesh)
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from common.collectives import barrier, record
from common.costs.vocabulary import KINDS, Message, added
from common.drawing.tables import compared, print_table
from common.experiments import tcp_bytes
from common.measure.storages import live_bytes
from common.process_groups import Mesh

Sent = dict[tuple[str, str], tuple[float, float]]  # by group and operation: how many, and the bytes of all of them


class Counted(NamedTuple):
    """What a rank, or the mean rank, has sent."""

    sent: Sent  # by the log of calls: model bytes
    sockets: float  # payload of its TCP sockets, which also carry gloo's own few bytes; 0 where the system cannot tell

    @property
    def bytes(self) -> float:
        """By the log of calls, over all groups and operations."""
        return sum(size for _, size in self.sent.values())


def counted(function: Callable[[], object], mesh: Mesh) -> Counted:
    """On every rank of `mesh`: call the function and count what this rank sends meanwhile."""
    barrier(mesh.world)
    before = tcp_bytes.sent_by_me() or 0
    barrier(mesh.world)  # every rank has read its counter before any rank sends
    with record() as calls:
        function()
    barrier(mesh.world)  # what was issued has left
    sockets = (tcp_bytes.sent_by_me() or 0) - before
    barrier(mesh.world)
    sent = [Message(call.group, call.op, call.bytes, 1) for call in calls if call.op != "receive"]
    return Counted(added(sent), sockets)


def mean_rank(ranks: Iterable[Counted]) -> Counted:
    """What a rank sends on average: costs of pipelines and of experts are means."""
    ranks, number, size = list(ranks), Counter(), Counter()
    for rank in ranks:
        for key, (count, sent) in rank.sent.items():
            number[key] += count / len(ranks)
            size[key] += sent / len(ranks)
    return Counted({key: (number[key], size[key]) for key in number}, sum(each.sockets for each in ranks) / len(ranks))


def print_counted(
    title: str, predicted: dict[str, list[Message]], found: dict[str, Counted], sockets: bool = True
) -> None:
    """Print a row for each case, group and operation: number and bytes, predicted and counted.

    What nobody predicts (the norm of the gradient, the loss in the record: single numbers) has no row of its own; all
    that a rank's sockets sent is compared with what was predicted.
    """
    rows = []
    for name, messages in predicted.items():
        for (group, op), (number, size) in added(messages).items():
            count, sent = found[name].sent.get((group, op), (0, 0))
            rows.append((f"{name}: {op} ({group})", f"{number:,.4g}", f"{count:,.4g}", *compared(size, sent)))
        if sockets and found[name].sockets:
            whole = sum(each.count * each.bytes for each in messages)
            rows.append((f"{name}: TCP sockets", "", "", *compared(whole, found[name].sockets)))
    header = ("", "number: predicted", "counted", "bytes of all: predicted", "counted", "ratio")
    print_table(f"{title}; what a rank sends", header, rows)


def held(run, part: Callable[[str], str] = lambda name: "") -> dict[str, float] | dict[tuple[str, str], float]:
    """On a rank: the bytes that it holds by kind, each when it is most; takes one step, with its update.

    Args:
        run: a `training_step.Training`, of any step.
        part: what of the model a parameter of this name belongs to, such as "experts"; with it the keys are (kind,
            part).
    """
    gradients = run.gradients()
    pairs = {"parameters": run.weights(), "gradients": list(zip(run.shards, gradients, strict=True))}
    result = {kind: _by_part(each, part) for kind, each in pairs.items()}
    run.update(gradients)
    result["optimizer state"] = _by_part(run.states(), part)
    flat = {(kind, name): size for kind in KINDS for name, size in result[kind].items()}
    return {kind: size for (kind, _), size in flat.items()} if all(name == "" for _, name in flat) else flat


def _by_part(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], part: Callable[[str], str]) -> dict[str, int]:
    """Bytes of the storages behind the second tensors, by the part to which the first ones belong."""
    sorted_ = {}
    for owner, tensor in pairs:
        sorted_.setdefault(part(owner.spec.name), []).append(tensor)
    return {name: live_bytes(tensors) for name, tensors in sorted_.items()}


def print_held(title: str, predicted: dict[str, dict], found: dict[str, dict], scale: float = 1, digits=",.0f") -> None:
    """Print a row for each case and kind, and their sum: bytes predicted and counted, divided by `scale`."""
    rows = []
    for name, kinds in predicted.items():
        for kind in kinds:
            words = kind if isinstance(kind, str) else " of ".join(kind)
            rows.append((f"{name}: {words}", *compared(kinds[kind], found[name].get(kind, 0), digits, scale)))
        sums = sum(kinds.values()), sum(found[name].get(kind, 0) for kind in kinds)
        rows.append((f"{name}: sum", *compared(*sums, digits, scale)))
    print_table(f"{title}; what a rank holds", ("", "predicted", "counted", "ratio"), rows)
