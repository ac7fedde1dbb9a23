"""What a table of actions lacks or has too much of: exactly which, rank by rank."""

from collections import defaultdict
from collections.abc import Sequence

from step05_pipeline.schedules.actions import Action


def incomplete(rows: Sequence[Sequence[Action]], ranks: int, micro_batches: int) -> str | None:
    """Why these rows are no table for so many ranks, with one stage each, and micro-batches; None if they are one.

    A micro-batch is to have an F, and a B or its halves I and W.
    """
    if len(rows) != ranks:
        return f"the table has {len(rows)} line{'s' * (len(rows) > 1)}, and there are {ranks} ranks"
    if chunk := next((each for row in rows for each in row if each.chunk), None):
        return f"{chunk} is of another stage than the first of its rank, and here a rank has one"
    for rank, row in enumerate(rows):
        if more := next((each for each in row if each.micro_batch >= micro_batches), None):
            return f"rank {rank} does {more}, and {more.kind}{micro_batches - 1} is the last"
    lacking = defaultdict(list)  # what is missing -> on which ranks
    for rank, row in enumerate(rows):
        if missing := _missing(row, micro_batches):
            lacking[missing].append(rank)
    lines = []
    for missing, where in lacking.items():
        some = f"rank{'s' * (len(where) > 1)} {_listed(list(map(str, where)))} lack{'s' * (len(where) == 1)}"
        lines.append(f"{'every rank lacks' if len(where) == ranks > 1 else some} {missing}")
    return "; ".join(lines) or None


def _missing(row: Sequence[Action], micro_batches: int) -> str:
    found = {kind: {each.micro_batch for each in row if each.kind == kind} for kind in "FBIW"}
    all, halves = set(range(micro_batches)), found["I"] | found["W"]
    lacks = {"F": all - found["F"], "B": all - found["B"] - halves}
    lacks |= {"I": found["W"] - found["I"] - found["B"], "W": found["I"] - found["W"] - found["B"]}
    return _listed([part for kind, numbers in lacks.items() for part in _ranges(kind, sorted(numbers))])


def _ranges(kind: str, numbers: list[int]) -> list[str]:
    """F1, or F3 to F6."""
    parts, begin = [], 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = [f"{kind}{number}" for number in numbers[begin:end]]
            parts += run if len(run) < 3 else [f"{run[0]} to {run[-1]}"]
            begin = end
    return parts


def _listed(parts: list[str]) -> str:
    return " and ".join([*[", ".join(parts[:-1])] * (len(parts) > 1), *parts[-1:]])
