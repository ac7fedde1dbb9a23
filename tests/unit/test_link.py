"""The simulated link: a collective ends no earlier than its latency and bandwidth allow, and a group shares one."""

import time

import torch

from common import collectives
from common.link import Link
from common.process_groups import Degrees, Group, build_mesh
from tests.harness.ranks import run_ranks


def ranks_link():
    """Seconds that collectives take over a link with 20 ms latency and 10 MB/s: the best of three."""
    mesh = build_mesh(Degrees(tp=2, dp=2), torch.device("cpu"))
    tensor, peer = torch.ones(50_000), 1 - mesh.tp.rank  # 200 kB: 20 ms at 10 MB/s

    def two_at_once(first: Group, second: Group) -> None:
        works = [collectives.all_reduce(tensor.clone(), group, async_op=True) for group in (first, second)]
        for work in works:
            work.wait()

    result = {}
    for name, operation in {
        "all_reduce": lambda: collectives.all_reduce(tensor.clone(), mesh.world),
        "all_gather": lambda: collectives.all_gather(torch.ones(100_000), tensor, mesh.tp),
        "exchange": lambda: collectives.exchange([(tensor, peer)], [(tensor.clone(), peer)], mesh.tp),
        "same group": lambda: two_at_once(mesh.tp, mesh.tp),
        "two groups": lambda: two_at_once(mesh.tp, mesh.dp),
        "one rank": lambda: collectives.all_reduce(tensor, mesh.cp),
    }.items():
        operation()  # connections are made at the first use
        collectives.link, taken = Link(alpha=0.02, bandwidth=10e6), []
        for _ in range(3):
            collectives.barrier(mesh.world)
            start = time.perf_counter()
            operation()
            taken.append(time.perf_counter() - start)
        collectives.link, result[name] = None, min(taken)
    return result


def test_link_takes_its_time():
    alpha, transfer = 0.02, 0.02
    ranks = run_ranks(4, ranks_link)
    for name, expected in {
        "all_reduce": 6 * alpha + 1.5 * transfer,  # 2(N-1) messages one after another, 2(N-1)/N of the bytes
        "all_gather": alpha + transfer,
        "exchange": alpha + transfer,  # both directions at once
        "same group": 2 * (2 * alpha + transfer),  # one after the other
        "two groups": 2 * alpha + transfer,  # two links side by side
        "one rank": 0.0,
    }.items():
        best = min(
            rank[name] for rank in ranks
        )  # the lower bound is exact; how much more it takes is up to the machine
        assert expected - 1e-4 <= best < expected + 0.06, name
