"""Ways to hang, for two ranks and a few seconds each: what does one see, and where do the ranks wait?

OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 step02_data_parallel/hangs.py skipped

The page is common/when_a_run_hangs.md. A run of yours waits ten minutes before it gives up (`--timeout`), this one
three seconds, or as many as a second argument says. A bit earlier, faulthandler prints the line that each rank is at.
"""

import faulthandler
import os
import re
import sys
import time
from datetime import timedelta

import common.entry  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

PATIENCE = 3.0  # seconds until gloo gives up


def skipped(rank: int) -> None:
    """Rank 1 leaves the first of two all-reduces out."""
    first, second = torch.tensor(1.0), torch.tensor(10.0)
    if rank == 0:
        dist.all_reduce(first)
    dist.all_reduce(second)
    print(f"[rank {rank}] the second sum is {second.item():g}, and should be 20", flush=True)
    dist.barrier()


def order(rank: int) -> None:
    """Both ranks sum in the same two groups, in different orders."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=PATIENCE)) for _ in range(2)]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


def shapes(rank: int) -> None:
    """Rank 1 has one parameter more, so its bucket is longer."""
    dist.all_reduce(torch.ones(4 + rank))


def facing(rank: int) -> None:
    """Each rank receives before it sends: two neighbors in a pipeline that both wait for the other."""
    other, message = 1 - rank, torch.ones(4)
    dist.recv(message, other)
    dist.send(message, other)


def gone(rank: int) -> None:
    """Rank 1 ends with an error before the all-reduce."""
    if rank == 1:
        raise ValueError("a bad sample")
    dist.all_reduce(torch.ones(4))


def stopped(rank: int) -> None:
    """Rank 1 is alive and does not get on: its disk hangs, say, or its GPU."""
    if rank == 1:
        time.sleep(2 * PATIENCE)
    dist.all_reduce(torch.ones(4))


CASES = {each.__name__: each for each in (skipped, order, shapes, facing, gone, stopped)}


def main(name: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    faulthandler.dump_traceback_later(PATIENCE * 2 / 3)
    rank = dist.get_rank()
    try:
        CASES[name](rank)
    except RuntimeError as error:
        line = re.sub(r"^\[.*?\] ", "", str(error)).split(". ")[0]  # without the place in gloo's source, and advice
        print(f"[rank {rank}] {line}", flush=True)
        raise SystemExit(1) from None
    print(f"[rank {rank}] got through", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in CASES:
        sys.exit(f"error: name one of {', '.join(CASES)}")
    if "RANK" not in os.environ:
        sys.exit("error: start two ranks with torchrun --nproc_per_node 2")
    PATIENCE = float(sys.argv[2]) if len(sys.argv) == 3 else PATIENCE
    main(sys.argv[1])
