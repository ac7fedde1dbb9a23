"""Calls whose outcome all ranks share: each rank gets every result, or each rank raises the same error."""

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
