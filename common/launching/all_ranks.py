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

    def call() -> tuple:
        try:
            return function() if function else None, None
        except (UsageError, OSError) as error:
            return None, error if isinstance(error, UsageError) else UsageError(str(error))

    work, outcomes = ThreadPoolExecutor(1).submit(call), [None]
    while None in outcomes:
        outcomes = collectives.all_gather_objects(work.result() if wait([work], 1.0).done else None, mesh.world)
    for _, error in outcomes:
        if error:
            raise error
    return [result for result, _ in outcomes]


def in_touch(mesh: Mesh, function: Callable, *arguments):
    """Call `function` on every rank and return this rank's result, or raise its error, once all ranks are done.

    As in `on_all_ranks` it may take longer than --timeout, and must not talk to other ranks.
    """
    work, done = ThreadPoolExecutor(1).submit(function, *arguments), [False]
    while not all(done):
        done = collectives.all_gather_objects(bool(wait([work], 1.0).done), mesh.world)
    return work.result()


def from_rank_0(mesh: Mesh, function: Callable):
    """Call `function` on rank 0 only and return its result on every rank. Errors as in `on_all_ranks`."""
    return on_all_ranks(mesh, function if mesh.rank == 0 else None)[0]
