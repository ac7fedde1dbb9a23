"""How fast are the links here? Bandwidth over message size, between two ranks and in collectives of all.

    torchrun --nproc_per_node 4 -m common.experiments.links
    python -m common.nodes --nodes 2 --ranks 2 --bandwidth 200mbit -- -m common.experiments.links

A message goes from rank 0 to another rank and comes back, and half of that counts. Bandwidth is bytes over seconds; for
a collective these are the bytes that a rank has to send (of an all-reduce 2(N-1)/N of the tensor, of the others half
of that), so it compares with that of a link. Medians with the band from 5 to 95 % of all tries: a link is not one
number.
"""

import os
import statistics
import time
from collections.abc import Callable

import common.entry  # noqa: F401

# isort: split
import torch

from common import collectives
from common.drawing.tables import print_table
from common.errors import UsageError
from common.group import Group
from common.launching.command_line import OneLineParser, summary
from common.launching.launch import end_cleanly
from common.process_groups import Degrees, Mesh, build_mesh
from common.start import environment, init_distributed

LONG = 0.2  # seconds: larger messages than one that takes so long are not tried


def seconds(function: Callable, tensor: torch.Tensor, group: Group, tries: int) -> list[float]:
    """Times of `function(tensor, group)` on this rank. The first, which also connects the ranks, does not count."""
    found = []
    for _ in range(tries + 1):
        collectives.barrier(group)
        start = time.perf_counter()
        function(tensor, group)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found[1:]


def there_and_back(other: int) -> Callable:
    """A message from rank 0 to rank `other`, and back."""

    def function(tensor: torch.Tensor, group: Group) -> None:
        if group.rank == 0:
            collectives.send(tensor, other, group)
            collectives.receive(tensor, other, group)
        elif group.rank == other:
            collectives.receive(tensor, 0, group)
            collectives.send(tensor, 0, group)

    return function


def all_gather(tensor: torch.Tensor, group: Group) -> None:
    collectives.all_gather(tensor, tensor.chunk(group.size)[group.rank], group)


def reduce_scatter(tensor: torch.Tensor, group: Group) -> None:
    collectives.reduce_scatter(tensor.new_empty(len(tensor) // group.size), tensor, group)


def all_to_all(tensor: torch.Tensor, group: Group) -> None:
    collectives.all_to_all(torch.empty_like(tensor), tensor, group)


def band(values: list[float]) -> tuple[float, float, float]:
    """The median and what 5 % and 95 % of the values are below, interpolated within the values."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return statistics.median(values), cuts[0], cuts[-1]


def measure(mesh: Mesh, sizes: list[int], tries: int) -> dict[str, list[tuple]]:
    """On a rank: for each kind of exchange and each size (bytes, median seconds, bandwidth: median, 5 %, 95 %)."""
    group, here = mesh.world, int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on the node of rank 0
    kinds = {}  # name: function, bytes on the link for each byte of the tensor, how often it goes to and fro
    for other in sorted({1, group.size - 1}):
        name = f"a message between ranks 0 and {other}, on {'one node' if other < here else 'two nodes'}"
        kinds[name] = (there_and_back(other), 2, 2)
    others = (group.size - 1) / group.size
    kinds[f"an all-reduce of {group.size} ranks"] = (collectives.all_reduce, 2 * others, 1)
    for name, function in {
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
    }.items():
        kinds[f"an {name}" if name[0] == "a" else f"a {name}"] = (function, others, 1)
    found = {}
    for name, (function, factor, ways) in kinds.items():
        found[name], longest = [], 0.0
        for size in sizes:
            if longest < LONG:  # or four times as many bytes would try our patience
                elements = size // 4 // group.size * group.size
                times = seconds(function, torch.zeros(elements, device=mesh.device), group, tries)
                bandwidths = band([factor * size / each for each in times])
                found[name].append((size, statistics.median(times) / ways, *bandwidths))
                longest = max(collectives.all_gather_objects(statistics.median(times), group))
    return found


def main() -> None:
    """On every rank: measure and, on rank 0, print."""
    parser = OneLineParser(prog="python -m common.experiments.links", description=summary(__doc__))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--max-mb", type=float, default=300, help="the largest message (default: %(default)s)")
    parser.add_argument("--tries", type=int, default=20, help="of each size (default: %(default)s)")
    options, world = parser.parse_args(), environment().world_size
    if world == 1 or options.tries < 2 or options.max_mb < 0.001:
        raise UsageError("links need several ranks, --tries 2 or more and --max-mb 0.001 or more")
    sizes = [1 << power for power in range(10, 40, 2) if 1 << power <= options.max_mb * 1e6]
    mesh = build_mesh(Degrees(dp=world), init_distributed(options.device))
    for name, rows in measure(mesh, sizes, options.tries).items():
        cells = [
            (f"{size:,}", f"{1e3 * time:.3f}", *(f"{each / 1e6:,.2f}" for each in rest)) for size, time, *rest in rows
        ]
        if mesh.rank == 0:
            print_table(name, ("bytes", "ms", "MB/s", "5 %", "95 %"), cells)


if __name__ == "__main__":
    end_cleanly(main)
