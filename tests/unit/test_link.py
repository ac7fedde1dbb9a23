"""The simulated link: how long each operation takes on it, and what it does at the same time."""

import os
import time
from functools import partial
from unittest import mock

import pytest
import torch

from common import collectives
from common.link import Link
from common.process_groups import Group
from tests.harness.ranks import run_ranks
from tests.unit.test_collectives import mesh_of


def ranks_link() -> dict[str, tuple[float, float]]:
    """For each operation the seconds that a link must take, and those that it took. Only sleep moves the clock."""
    alpha, bandwidth, now = 0.02, 10e6, [100.0]
    mesh = mesh_of(tp=2, dp=2).with_link(Link(alpha, bandwidth))
    world, tp, dp, peer = mesh.world, mesh.tp, mesh.dp, 1 - mesh.tp.rank
    tensor, other, quarter = torch.ones(100_000), torch.ones(100_000), torch.ones(25_000)
    transfer = 4 * len(tensor) / bandwidth
    small, large = (quarter, tensor) if tp.rank else (tensor, quarter)  # what this rank sends, and what it receives
    one_way = partial(collectives.receive, other, 0) if tp.rank else partial(collectives.send, tensor, 1)

    def all_reduces(*groups: Group) -> None:
        works = [collectives.all_reduce(tensor.clone(), group, async_op=True) for group in groups]
        while not all(handle.is_completed() for work in works for handle in work._handles):
            os.sched_yield()
        assert not any(work.is_completed() for work in works), "the link still works on it"
        for work in works:
            work.wait()
            assert work.is_completed()

    # Over N ranks an all-reduce is 2(N-1) messages one after another, with 2(N-1)/N of the bytes
    on_tp, result = 2 * alpha + transfer, {}
    cases = [
        ("all_reduce", 6 * alpha + 1.5 * transfer, lambda: collectives.all_reduce(tensor.clone(), world)),
        ("reduce_scatter", 3 * alpha + 0.75 * transfer, lambda: collectives.reduce_scatter(quarter, tensor, world)),
        ("all_gather", 3 * alpha + 0.75 * transfer, lambda: collectives.all_gather(other, quarter, world)),
        ("all_to_all", 3 * alpha + 0.75 * transfer, lambda: collectives.all_to_all(other, tensor, world)),
        ("to and fro", alpha + transfer, lambda: collectives.exchange([(small, peer)], [(large.clone(), peer)], tp)),
        ("one way", alpha + transfer, lambda: one_way(tp)),
        ("one group", 2 * on_tp, lambda: all_reduces(tp, tp)),
        ("two groups", on_tp, lambda: all_reduces(tp, dp)),
        ("after a rest", on_tp + 1, lambda: [time.sleep(1), all_reduces(tp)]),
        ("one rank", 0.0, lambda: collectives.all_reduce(tensor, mesh.cp)),
    ]
    clock = {"perf_counter": lambda: now[0], "sleep": lambda seconds: now.__setitem__(0, now[0] + seconds)}
    with mock.patch.multiple(time, **clock):
        for name, least, issue in cases:
            start = now[0]
            issue()
            result[name] = least, now[0] - start
    return result


def test_link_takes_its_time():
    for rank, found in enumerate(run_ranks(4, ranks_link)):
        for name, (least, taken) in found.items():
            assert taken == pytest.approx(least, rel=1e-9), f"{name}, rank {rank}"
