"""A tour of the collectives that distributed training is made of: before, after, and an assertion for each.

    torchrun --nproc_per_node 3 step02_data_parallel/collectives_tour.py
    torchrun --nproc_per_node 4 step02_data_parallel/collectives_tour.py

Any number of ranks from 2 up; 3 and 4 read best. Every stop fills a tensor on each rank, runs one collective,
asserts the result and prints what the ranks held before and after, in rank order. Operations that the
training steps use go through `common.collectives`, the three that they do not (reduce, gather, scatter)
straight to `torch.distributed`.
"""

import time

import common.entry  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

from common import collectives
from common.errors import UsageError
from common.group import Group
from common.launching.launch import end_cleanly
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed

NAP = 0.2  # seconds: at the barrier rank r comes this many times r late


def show(title: str, idea: str, before, after, group: Group) -> None:
    """Print one stop on rank 0: `before` and `after` (anything printable) of every rank, in rank order."""
    lines = collectives.all_gather_objects((_text(before), _text(after)), group)
    if group.rank == 0:
        width = max(len(text) for text, _ in lines)
        print(f"\n{title}\n  {idea}")
        for rank, (left, right) in enumerate(lines):
            print(f"  rank {rank}:  {left:{width}}  ->  {right}")


def _text(value) -> str:
    """Whole numbers without a decimal point; a list of tensors is shown piece by piece."""
    if isinstance(value, torch.Tensor):
        return str([int(x) if x == int(x) else x for x in value.flatten().tolist()]).replace(",", "")
    if isinstance(value, list):
        return " ".join(_text(each) for each in value)
    return str(value)


def check(got: torch.Tensor, expected, what: str) -> None:
    """Raise AssertionError on this rank unless `got` holds the `expected` numbers."""
    expected = torch.as_tensor(expected, dtype=got.dtype, device=got.device)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0, msg=lambda text: f"{what}: {text}")


# ---- one to all, all to one ------------------------------------------------------------------------------------------


def broadcast(group: Group, device: torch.device) -> None:
    tensor = torch.arange(1.0, 6.0, device=device) if group.rank == 0 else torch.zeros(5, device=device)
    before = tensor.clone()
    dist.broadcast(tensor, group.ranks[0], group.handle)
    check(tensor, [1, 2, 3, 4, 5], "broadcast")
    show("broadcast from rank 0", "one rank's tensor, copied to all", before, tensor, group)


def reduce(group: Group, device: torch.device) -> None:
    tensor = torch.full((5,), group.rank + 1.0, device=device)
    before = tensor.clone()
    dist.reduce(tensor, dst=group.ranks[0], op=dist.ReduceOp.SUM, group=group.handle)
    note = "not defined, here " + ("unchanged" if torch.equal(tensor, before) else "changed")
    if group.rank == 0:
        check(tensor, [sum(range(1, group.size + 1))] * 5, "reduce")
        note = "the sum"
    # Only the destination is asserted. The other ranks' tensors served as scratch space: on gloo they come
    # back as partial sums, on another backend perhaps untouched, and code that reads them works on one of the
    # two.
    show("reduce to rank 0", "the sum of all, on one rank", before, f"{_text(tensor)}  ({note})", group)


def gather(group: Group, device: torch.device) -> None:
    tensor = torch.full((2,), group.rank + 1.0, device=device)
    pieces = [torch.zeros_like(tensor) for _ in range(group.size)] if group.rank == 0 else None
    dist.gather(tensor, pieces, dst=group.ranks[0], group=group.handle)
    if group.rank == 0:
        check(torch.stack(pieces), [[rank + 1] * 2 for rank in range(group.size)], "gather")
    show("gather to rank 0", "every rank's piece, on one rank, in rank order", tensor, pieces or "-", group)


def scatter(group: Group, device: torch.device) -> None:
    result = torch.zeros(2, device=device)
    pieces = None
    if group.rank == 0:
        pieces = [torch.full((2,), 10.0 * (rank + 1), device=device) for rank in range(group.size)]
    dist.scatter(result, pieces, src=group.ranks[0], group=group.handle)
    check(result, [10 * (group.rank + 1)] * 2, "scatter")
    show("scatter from rank 0", "gather backwards: one rank deals out the pieces", pieces or "-", result, group)


# ---- all to all ------------------------------------------------------------------------------------------------------


def all_reduce(group: Group, device: torch.device) -> None:
    tensor = torch.full((5,), group.rank + 1.0, device=device)
    before = tensor.clone()
    collectives.all_reduce(tensor, group)
    check(tensor, [sum(range(1, group.size + 1))] * 5, "all-reduce")
    show("all-reduce", "the sum of all, on all: what data parallelism does to gradients", before, tensor, group)


def all_gather(group: Group, device: torch.device) -> None:
    tensor = torch.full((2,), group.rank + 1.0, device=device)
    result = torch.zeros(2 * group.size, device=device)
    collectives.all_gather(result, tensor, group)
    check(result.view(-1, 2), [[rank + 1] * 2 for rank in range(group.size)], "all-gather")
    show("all-gather", "every rank's piece, on all: the second half of an all-reduce", tensor, result, group)


def reduce_scatter(group: Group, device: torch.device) -> None:
    """The playbook's numbers: piece j of rank r is ((r+1) * [1, 2]) to the power j+1."""
    base = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device) * (group.rank + 1)
    pieces = [base ** (j + 1) for j in range(group.size)]
    result = torch.zeros_like(base)
    collectives.reduce_scatter(result, torch.cat(pieces), group)
    power = group.rank + 1
    expected = [sum((unit * (rank + 1)) ** power for rank in range(group.size)) for unit in (1, 2)]
    check(result, expected, "reduce-scatter")
    if group.size == 3:
        check(result, [[6, 12], [14, 56], [36, 288]][group.rank], "reduce-scatter, the playbook's numbers")
    idea = "rank j gets the sum of all ranks' piece j: the first half of an all-reduce"
    show("reduce-scatter", idea, pieces, result, group)


def all_to_all(group: Group, device: torch.device) -> None:
    tensor = 10.0 * (group.rank + 1) + torch.arange(1.0, group.size + 1, device=device)
    result = torch.zeros_like(tensor)
    collectives.all_to_all(result, tensor, group)
    check(result, [10 * (rank + 1) + group.rank + 1 for rank in range(group.size)], "all-to-all")
    show("all-to-all", "piece j goes to rank j: a transposition across ranks", tensor, result, group)


# ---- point to point --------------------------------------------------------------------------------------------------


def send_receive(group: Group, device: torch.device) -> None:
    """All send to the right. If all called a blocking send first, nobody would come to receive."""
    tensor = torch.full((2,), group.rank + 1.0, device=device)
    result = torch.zeros_like(tensor)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    collectives.exchange([(tensor, right)], [(result, left)], group)
    check(result, [left + 1] * 2, "send and receive")
    idea = "to the right neighbor, from the left one, issued together"
    show("send and receive", idea, tensor, result, group)


def ring_all_reduce(tensor: torch.Tensor, group: Group, after_step=lambda phase, step: None) -> None:
    """All-reduce by hand in two phases of N-1 messages of K/N bytes, each to the right neighbor.

    The tensor is cut into N chunks. Reduce-scatter: in step s rank r sends chunk r-s-1 on and adds what arrives
    to chunk r-s-2; after N-1 steps it holds the complete sum of chunk r. All-gather: the complete chunks go
    round once more. A link carries 2(N-1)/N K bytes in all, less than 2K for any N (Patarasuk and Yuan,
    2009).

    Args:
        tensor: (elements,), changed in place; `elements` must be a multiple of the group's size.
        after_step: called with the name of the phase and the step, for those who want to look.
    """
    n, me = group.size, group.rank
    right, left = (me + 1) % n, (me - 1) % n
    chunks = list(tensor.view(n, -1))
    incoming = torch.empty_like(chunks[0])
    for step in range(n - 1):
        collectives.exchange([(chunks[(me - step - 1) % n], right)], [(incoming, left)], group)
        chunks[(me - step - 2) % n] += incoming
        after_step("reduce-scatter", step)
    for step in range(n - 1):
        collectives.exchange([(chunks[(me - step) % n], right)], [(chunks[(me - step - 1) % n], left)], group)
        after_step("all-gather", step)


def ring(group: Group, device: torch.device) -> None:
    # Digits tell the story: rank r writes at decimal place r, and chunk c is written with the digit c+1. With
    # 4 ranks 0220 is the second chunk with the contributions of ranks 1 and 2, and 2222 is complete.
    n = group.size
    digits = torch.tensor([float(chunk % 9 + 1) for chunk in range(n)], dtype=torch.float64, device=device)
    tensor = digits.repeat_interleave(2) * 10.0**group.rank  # (2 * ranks,): two elements a chunk
    width = max(len("rank 0"), n * (n + 1) - 1)  # of a rank's column
    library, size = tensor.clone(), tensor.numel() * tensor.element_size()
    collectives.all_reduce(library, group)

    def look(phase: str, step: int) -> None:
        mine = " ".join(f"{int(value):0{n}d}" for value in tensor.view(n, -1)[:, 0]).ljust(width)
        columns = collectives.all_gather_objects(mine, group)
        if group.rank == 0:
            print(f"  {phase:15}{f'{step + 1}/{n - 1}' if step >= 0 else '':6}", "   ".join(columns))

    if group.rank == 0:
        print("\nring all-reduce by hand: reduce-scatter, then all-gather")
        print("  a column per rank, in it a number per chunk; a digit at place r: rank r's part is in")
        print(f"  {'':21}", "   ".join(f"rank {rank}".ljust(width) for rank in range(n)))
    look("before", -1)
    collectives.sent_bytes.clear()
    ring_all_reduce(tensor, group, look)
    sent = collectives.sent_bytes[group.name]
    check(tensor, library, "ring all-reduce equals the library's")
    if sent != 2 * (n - 1) * size // n:
        raise AssertionError(f"{sent} bytes sent, expected 2({n}-1)/{n} x {size}")
    if group.rank == 0:
        print(f"  each rank sent {2 * (n - 1)} messages of K/N = {size // n} bytes,", end=" ")
        print(f"{sent} in all = 2(N-1)/N K for K = {size}")


def barrier(group: Group, device: torch.device) -> None:
    collectives.barrier(group)  # a common start
    start = time.perf_counter()
    time.sleep(NAP * group.rank)
    came = time.perf_counter() - start
    collectives.barrier(group)
    left = time.perf_counter() - start
    last = NAP * (group.size - 1)
    if left <= last - 0.1:
        raise AssertionError(f"rank {group.rank} left after {left:.2f} s, the last one came after {last:.2f} s")
    idea = f"nobody leaves before the last has come (rank r sleeps {NAP:g} r seconds)"
    show("barrier", idea, f"came after {came:.2f} s", f"left after {left:.2f} s", group)


STOPS = (
    *(broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, all_to_all),
    *(send_receive, ring, barrier),
)


def tour(group: Group, device: torch.device) -> None:
    """All stops, in turn, on the ranks of `group` (two or more). Raises AssertionError on a wrong result."""
    for stop in STOPS:
        stop(group, device)
    if group.rank == 0:
        print(f"\nAll {len(STOPS)} results are as asserted, on {group.size} ranks.")


def main() -> None:
    command = "torchrun --nproc_per_node 3 step02_data_parallel/collectives_tour.py"
    _, world_size, _ = environment()
    if world_size < 2:
        raise UsageError(f"the tour needs ranks that talk to each other: {command}")
    device = init_distributed()
    world = build_mesh(Degrees(dp=world_size), device).world
    tour(world, device if world.backend == "nccl" else torch.device("cpu"))


if __name__ == "__main__":
    end_cleanly(main)
