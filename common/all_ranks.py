"""Calls whose outcome all ranks share: each rank gets every result, or each rank raises the same error."""

import itertools
from collections.abc import Callable

from common import collectives
from common.errors import UsageError
from common.process_groups import Mesh


def on_all_ranks(mesh: Mesh, function: Callable | None) -> list:
    """Call `function` on every rank and return the results of all ranks, in rank order.

    All ranks must come here together; one with nothing to do passes None. If some ranks raise a UsageError or an
    OSError, every rank raises that of the lowest one, an OSError as a UsageError. So no rank goes on alone.
    """
    result = error = None
    try:
        result = function() if function else None
    except (UsageError, OSError) as caught:
        error = caught if isinstance(caught, UsageError) else UsageError(str(caught))
    outcomes = collectives.all_gather_objects((result, error), mesh.world)
    for _, error in outcomes:
        if error:
            raise error
    return [result for result, _ in outcomes]


def from_rank_0(mesh: Mesh, function: Callable):
    """Call `function` on rank 0 only and return its result on every rank. Errors as in `on_all_ranks`."""
    return on_all_ranks(mesh, function if mesh.rank == 0 else None)[0]


def agree(mesh: Mesh, function: Callable[[], dict]) -> None:
    """Call `function` on every rank for facts, by name, that must be equal on all of them.

    All ranks come here together. If facts differ, all raise the same UsageError, which says which, and on which ranks.
    Errors of `function` as in `on_all_ranks`.
    """
    everywhere = on_all_ranks(mesh, function)
    names = dict.fromkeys(name for facts in everywhere for name in facts)
    values = {name: [facts.get(name) for facts in everywhere] for name in names}
    lines = [f"{name} is {_by_rank(each)}" for name, each in values.items() if any(value != each[0] for value in each)]
    if lines:
        raise UsageError(f"all ranks must agree, but {'; '.join(lines)}")


def _by_rank(values: list) -> str:
    """`0.1 on ranks 0 to 2, 0.2 on rank 3`, from a value of each rank; the first three values are enough."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("none" if value is None else str(value), []).append(rank)
    parts = [f"{value} on {_listed(where)}" for value, where in itertools.islice(ranks.items(), 3)]
    return ", ".join(parts) + ", and so on" * (len(ranks) > 3)


def _listed(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0 to 3, 8 to 11`; the first four stretches are enough."""
    stretches = [[pair[1] for pair in each] for _, each in itertools.groupby(enumerate(ranks), lambda p: p[1] - p[0])]
    parts = [f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0]) for each in stretches[:4]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}{' ...' * (len(stretches) > 4)}"
