"""Calls whose outcome all ranks share: each rank gets every result, or each rank raises the same error."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from common import collectives
from common.errors import UsageError
from common.process_groups import Mesh


def on_all_ranks(mesh: Mesh, function: Callable | None) -> list:
    """Call `function` on every rank and return the results of all ranks, in rank order.

    All ranks must come here together; one with nothing to do passes None. If some ranks raise a UsageError or an
    OSError, every rank raises that of the lowest one, an OSError as a UsageError. So no rank goes on alone.

    A thread calls it, which may take longer than --timeout, as a download does: every second, the ranks tell each other
    that they are alive. The function itself must not talk to other ranks.
    """
    pool, outcomes = ThreadPoolExecutor(1), [(False, None, None)]
    work = pool.submit(function or (lambda: None))
    while not all(done for done, _, _ in outcomes):
        done = bool(wait([work], 1.0).done)
        error = work.exception() if done else None
        error = UsageError(str(error)) if isinstance(error, OSError) else error
        if error and not isinstance(error, UsageError):
            raise error
        result = work.result() if done and not error else None
        outcomes = collectives.all_gather_objects((done, result, error), mesh.world)
    for _, _, error in outcomes:
        if error:
            raise error
    return [result for _, result, _ in outcomes]


def from_rank_0(mesh: Mesh, function: Callable):
    """Call `function` on rank 0 only and return its result on every rank. Errors as in `on_all_ranks`."""
    return on_all_ranks(mesh, function if mesh.rank == 0 else None)[0]
