"""What ranks of write-05-a do in which order, with what, and what comes of it if they take what is not theirs."""

from collections import Counter

import torch
import torch.distributed as dist

from common.labs.ranks import Case


class Row(Case):
    """A case that says in words which actions a rank gets; `row` makes them."""

    def __str__(self) -> str:
        sizes = f"{Case(ranks=self.ranks, layers=self.layers, width=self.width)}, {self.micro_batches} micro-batches"
        ahead = f", with {self.ahead} more forward before the first backward" * bool(self.ahead)
        late = ", the last micro-batch after all others" * bool(self.late)
        ragged = ", of which the last one is smaller" * bool(self.ragged)
        return f"{sizes}{ragged} in the order of 1F1B{ahead}{late}"


class Turned(Row):
    """A case in which all forwards come first, and then the backwards from the last micro-batch to the first."""

    def __str__(self) -> str:
        return super().__str__().replace("the order of 1F1B", "the order of AFAB, backwards from the last to the first")


def drawn(case: Case) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(case.seed)
    weights = torch.randn(case.ranks * case.layers, case.width, case.width, generator=random, dtype=torch.float64)
    size = 2, 3 * case.micro_batches - case.ragged, case.width
    return weights * (2 / case.width) ** 0.5, *torch.randn(*size, generator=random, dtype=torch.float64)


def row(case: Case, rank: int) -> list[str]:
    """The rank's actions: `ahead` forwards more than 1F1B has before its first backward; `late` micro-batches alone."""
    m = case.micro_batches - case.late
    ahead = min(m, case.ranks - rank + case.ahead)
    forwards, backwards = ([f"{kind}{number}" for number in range(m)] for kind in "FB")
    if isinstance(case, Turned):
        return forwards + backwards[::-1]
    mixed = [each for pair in zip(backwards, forwards[ahead:]) for each in pair]
    alone = [f"{kind}{number}" for number in range(m, case.micro_batches) for kind in "FB"]
    return forwards[:ahead] + mixed + backwards[m - ahead :] + alone


def look_at_messages(case: Case, rank: int) -> None:
    """Let a message of another size than its micro-batch has be an error: gloo would die of it on the other rank."""
    group, rows = dist.ProcessGroup, [len(each) for each in drawn(case)[1].chunk(case.micro_batches)]
    actions, counted = {other: row(case, other) for other in (rank - 1, rank, rank + 1)}, Counter()

    def looking(call, kind: str):
        def look(self, tensors, peer, *rest):
            # What goes to the next rank is made by forwards, and what comes from the rank before, too
            letter = "F" if (peer > rank) == (kind == "sends") else "B"
            order = [each for each in actions.get(rank if kind == "sends" else peer, ()) if each[0] == letter]
            number = counted[kind, peer]
            counted[kind, peer] += 1
            if number < len(order):
                wanted = rows[int(order[number][1:])], case.width
                if tensors[0].numel() != wanted[0] * wanted[1]:
                    found = " x ".join(map(str, tensors[0].shape)) or "a number"
                    it = f"rank {rank} {kind} {found} {'to' if kind == 'sends' else 'from'} rank {peer}"
                    raise ValueError(f"{it}, and the message of {order[number]} is {wanted[0]} x {wanted[1]}")
            return call(self, tensors, peer, *rest)

        return look

    own = vars(group).get("unlooked") or (group.send, group.recv)
    group.unlooked = own
    group.send, group.recv = looking(own[0], "sends"), looking(own[1], "receives")


def newest_taken(case: Case) -> list[list[torch.Tensor]]:
    """Gradients by rank if a backward takes the newest of what is kept; [] if it cannot.

    Sizes must fit, as they do unless a micro-batch is smaller than others.
    """
    weights, samples, targets = drawn(case)
    stages, wanted = weights.chunk(case.ranks), targets.chunk(case.micro_batches)
    inputs = [list(samples.chunk(case.micro_batches))]
    for stage in stages:
        outputs = inputs[-1]
        for weight in stage:
            outputs = [torch.relu(each @ weight) for each in outputs]
        inputs.append(outputs)
    arrived, found = [], []
    for rank in reversed(range(case.ranks)):
        mine, kept, sent = stages[rank].clone().requires_grad_(), [], []
        for action in row(case, rank):
            if action[0] == "F":
                kept.append(int(action[1:]))
                continue
            taken = kept.pop()
            y = x = inputs[rank][taken].clone().requires_grad_()
            for weight in mine:
                y = torch.relu(y @ weight)
            if rank == case.ranks - 1:
                ((y - wanted[taken]).square().sum() / targets.numel()).backward()
            elif y.shape == arrived[len(sent)].shape:
                y.backward(arrived[len(sent)])
            else:
                return []
            sent.append(x.grad)
        arrived = sent
        found.insert(0, mine.grad)
    return found
