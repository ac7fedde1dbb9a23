"""Groups beyond the parity cases, up to 16,384 ranks; their backends, and how NCCL is started and ended."""

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import collectives, process_groups, start
from common.errors import UsageError
from common.experiments.demo import device_flag
from common.launching import launch
from common.launching.run_mesh import degrees_of, mesh_of
from common.link import Link
from common.process_groups import AXES, DIMENSION_OF, GROUP_NAMES, Degrees, Mesh, all_groups, build_mesh, coordinates
from step05_pipeline.apply_pipeline import place_stages
from step05_pipeline.config import schedule_of
from step05_pipeline.schedules.catalogue import SCHEDULES
from step08_5d.config import check
from tests.harness.observing import configure


def test_every_group_belongs_to_a_dimension():
    assert DIMENSION_OF.keys() == {*GROUP_NAMES, "pp"} - {"world"}
    assert set(DIMENSION_OF.values()) == {*AXES, "ep"}


def test_groups_that_no_parity_case_tells_apart():
    experts = all_groups(Degrees(dp=8, ep=2, zero_replicas=2, experts=True))
    assert experts["expert_shard"] == [(0, 2), (4, 6), (1, 3), (5, 7)], "neighbours share a copy"
    assert experts["expert_replica"] == [(0, 4), (2, 6), (1, 5), (3, 7)]
    experts = all_groups(Degrees(dp=12, ep=2, zero_replicas=4, experts=True))  # 4 copies of the model, of experts 2
    assert experts["expert_shard"] == [(0, 2, 4), (6, 8, 10), (1, 3, 5), (7, 9, 11)]
    assert experts["expert_replica"] == [(0, 6), (2, 8), (4, 10), (1, 7), (3, 9), (5, 11)]
    assert all_groups(Degrees(tp=8), kv_heads=2)["kv_replica"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all_groups(Degrees(pp=4), placement=((0, 1, 2, 3), (3, 2, 1, 0)))["mirror"] == [(0, 3), (1, 2)]


def test_backend_of_ranks_in_different_places():
    """NCCL needs a GPU per rank, whatever number of ranks the launcher calls local."""
    two, sixteen = [("a", "x"), ("a", "y")], [(node, str(gpu)) for node in "ab" for gpu in range(8)]
    for places, line in [
        (two, "2 ranks on 1 node, one H200 each, NCCL"),
        ([("a", "x"), ("b", "x")], "2 ranks on 2 nodes, one H200 each, NCCL"),
        (sixteen, "16 ranks on 2 nodes, one H200 each, NCCL"),
        (two + two[:1], "3 ranks on 1 node, sharing 2 H200, gloo"),
        ([("a", None)] * 4, "4 ranks on 1 node, on the CPU, gloo"),
        ([("a", None), ("b", None)], "2 ranks on 2 nodes, on the CPU, gloo"),
    ]:
        assert start.choose_backend(places, "H200") == (line.split()[-1].lower(), line)
    assert start.choose_backend(two, "RTX", nccl=False) == ("gloo", "2 ranks on 1 node, one RTX each, gloo"), "Windows"
    with pytest.raises(UsageError, match="rank 16 sees no GPU, but others do; with --device cpu "):
        start.choose_backend([*sixteen, ("c", None), ("c", None)])
    assert [device_flag(gpus, 4) for gpus in (0, 1, 3, 4, 8)] == ["", "--device cpu", "--device cpu", "", ""]


@pytest.mark.parametrize(
    ("named", "addresses", "interfaces"),  # what a node's name stands for; addresses towards rank 0; what gloo takes
    [
        ("127.0.1.1", ["127.0.0.1", "10.0.0.2"], ["eth1", "eth2"]),  # as Debian has it
        (None, ["127.0.0.1", "10.0.0.2"], ["eth1", "eth2"]),
        ("192.0.2.9", ["10.0.0.1", "10.0.0.2"], ["eth1", "eth2"]),  # not, or no longer, that of this machine
        ("10.0.0.3", ["127.0.0.1", "10.0.0.2"], [None, None]),  # others can reach it
        ("127.0.1.1", ["127.0.0.1", ""], [None, None]),
        ("127.0.1.1", ["10.0.0.7", "10.0.0.2"], [None, "eth2"]),  # an address of no interface
    ],
)
def test_gloo_offers_an_address_that_other_nodes_reach(named, addresses, interfaces, monkeypatch):
    class Socket(contextlib.nullcontext):
        def __enter__(self):
            return self

        def bind(self, place):
            if place[0] not in ("10.0.0.3", "127.0.1.1"):
                raise OSError

    def resolve(name: str) -> str:
        if name != platform.node() or not named:
            raise socket.gaierror
        return named

    def two_interfaces() -> list[tuple[int, str]]:
        return [(1, "lo"), (2, "eth1"), (3, "eth2")]

    fake = SimpleNamespace(socket=Socket, gethostbyname=resolve, if_nameindex=two_interfaces)
    monkeypatch.setattr(start, "socket", fake)
    monkeypatch.setattr(start, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(start, "address_towards", {"10.0.0.2": "10.0.0.1"}.get)
    monkeypatch.setattr(start, "address_of", {"lo": "127.0.0.1", "eth1": "10.0.0.1", "eth2": "10.0.0.2"}.get)
    for own in ({}, {"GLOO_SOCKET_IFNAME": "mine"}):
        for rank, interface in enumerate(interfaces):
            with mock.patch.dict(os.environ, own):
                start.let_others_reach_gloo(addresses, rank)
                assert os.environ.get("GLOO_SOCKET_IFNAME") == (own.get("GLOO_SOCKET_IFNAME") or interface)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_addresses_of_this_machine():
    assert start.address_towards("127.0.0.1") == start.address_of("lo") == "127.0.0.1"
    assert start.address_towards("::1") == start.address_of("no-such-0") == ""


def test_start_of_nccl_after_a_watchdog_timeout(monkeypatch, capsys):
    """Each process sees one GPU, its own. torchrun's store still holds the key with which NCCL ends all ranks.

    NCCL looks for it in the store below all prefixes.
    """
    launcher, seen = HashStore(), {}
    attempt = PrefixStore("/worker/attempt_1", launcher)
    launcher.set_timeout(timedelta(seconds=5))
    launcher.set("exception_dump", "1")
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NCCL_HOSTID": "a"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "1", "TORCH_NCCL_HIGH_PRIORITY": "0"}
    environment = dict.fromkeys(start.NCCL_SETTINGS, "") | environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # so that the test's end restores it
        if not value:
            monkeypatch.delenv(name)

    def init_process_group(store, **options):
        below = getattr(store, "_underlying_non_prefix_store", store)
        seen.update(options, environment=dict(os.environ), timed_out=below.check(["exception_dump"]))

    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(attempt, 0, 2)]))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    gpu = SimpleNamespace(uuid="x", name="H200")
    fakes = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None}
    for name, fake in (fakes | {"get_device_properties": lambda device: gpu}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    world = SimpleNamespace(bound_device_id=torch.device("cuda:0"))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(start, "meet", lambda: None)
    with ThreadPoolExecutor(1) as threads:  # the other rank
        threads.submit(lambda: start._store_of_this_start(attempt, 1, 5).set("place of rank 1", json.dumps(["a", "y"])))
        assert start.init_distributed(timeout=5) == torch.device("cuda:0")
    assert seen["backend"] == "cpu:gloo,cuda:nccl" and seen["device_id"] == torch.device("cuda:0")
    expected = start.NCCL_SETTINGS | {"TORCH_NCCL_HIGH_PRIORITY": "0"}  # the user's own value
    assert expected.items() <= seen["environment"].items() and len(expected) == 3
    assert not seen["timed_out"], "the store is not new"
    assert world.bound_device_id is None, "a new group would split the world"
    assert capsys.readouterr().out == "2 ranks on 1 node, one H200 each, NCCL\n"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_subgroups_have_one_backend_each(monkeypatch, backend):
    made, limit, gpu = {}, timedelta(seconds=7), torch.device("cuda:0")

    def new_group(ranks, timeout=None, backend=None, pg_options=None, device_id=None):
        assert (device_id == gpu) == (backend == "nccl") and timeout == limit, "NCCL connects at once"
        made.setdefault(tuple(ranks), []).append((backend, pg_options and vars(pg_options.config)))

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(dist, "get_backend", lambda: {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}[backend])
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(process_groups, "meet", lambda: None)
    mesh = build_mesh(Degrees(tp=2, pp=2, dp=2), gpu, timeout=7)
    few = {"max_ctas": 4} if backend == "nccl" else None
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7)]
    pipelines = dict.fromkeys([(0, 2), (1, 3), (4, 6), (5, 7)], [(backend, few)] * 2 + [(backend, None)])
    assert made == dict.fromkeys(pairs, [(backend, None)]) | pipelines, "one for each direction, and `embed`"
    assert mesh.edp.ranks == (0, 1, 4, 5)
    with pytest.warns(UserWarning, match="does not belong"), pytest.raises(AttributeError):  # no sum over the world
        collectives.all_reduce(torch.ones(1), mesh.edp)


def test_a_run_ends_when_the_gpu_is_idle_and_all_ranks_have_come(monkeypatch):
    """The meeting is gloo's: an NCCL barrier may return while its kernel still needs the other ranks."""
    calls = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: calls.append(f"meet on the {tensor.device.type}"))
    monkeypatch.setattr(dist, "barrier", lambda *_: calls.append("barrier"))
    monkeypatch.setattr(os, "_exit", lambda status: calls.append(status))
    launch.end_cleanly(lambda: calls.append("job"))
    assert calls == ["job", "synchronize", "meet on the cpu", 0]


# ---- groups of a large world on one of its ranks ---------------------------------------------------------------------

LARGE = Degrees(tp=8, cp=4, pp=16, dp=32, ep=64, zero_replicas=4, experts=True)  # 16,384 ranks


@contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """In this context, the process is a rank of a world whose other ranks do not exist, and nothing is sent."""
    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0"):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def test_sixteen_ranks_are_laid_out_as_in_llama_3():
    """Llama 3 (arXiv:2407.21783), figure 5: 16 GPUs, every degree 2, groups of [TP, CP, PP, DP]."""
    groups = all_groups(Degrees(2, 2, 2, 2))
    assert [groups[name][0] for name in ("tp", "cp", "pp_forward", "dp")] == [(0, 1), (0, 2), (0, 4), (0, 8)]
    assert (12, 13) in groups["tp"] and (0, 2, 8, 10) in groups["dp_cp"]
    assert coordinates(13, Degrees(2, 2, 2, 2)) == {"tp": 1, "cp": 0, "pp": 1, "dp": 1}

    # In another order, too, ranks that follow each other share the experts, or a copy of the model
    degrees = degrees_of(configure(8, "--tp 2 --cp 2 --pp 2 --experts 8 --ep 4 --zero 1 --order dp,pp,tp,cp", 16))
    groups = {name: ranks[0] for name, ranks in all_groups(degrees).items()}
    assert [groups[name] for name in ("dp", "pp_forward", "tp", "cp")] == [(0, 1), (0, 2), (0, 4), (0, 8)]
    assert groups["dp_cp"] == (0, 1, 8, 9) and (groups["ep"], groups["edp"]) == ((0, 1, 4, 5), (0, 8))
    assert all_groups(replace(degrees, zero_replicas=2))["shard"][0] == (0, 1)
    assert coordinates(13, degrees) == {"dp": 1, "pp": 0, "tp": 1, "cp": 1}
    for wrong in ("tp,cp,pp", "tp,cp,pp,dp,dp", "tp,cp,pp,ep", "tp, cp, pp, dp"):
        with pytest.raises(UsageError, match="--order .* must name"):
            check(replace(configure(8, "--tp 2", 2), order=wrong))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_group_of_every_placement_has_the_link(name):
    """Also those that a schedule brings: of tied matrices, and of several copies. Each group has a line of its own."""
    flags = f"--pp 4 --layers 8 --dp 2 --tp 2 --zero 1 --zero-replicas 2 --global-batch 16 --schedule {name}"
    for link in ("1000000,1.5", None):
        config = configure(8, f"{flags} --link {link}" if link else flags, 16)
        with one_rank_of(16, 5):
            mesh = place_stages(mesh_of(config, torch.device("cpu")), schedule_of(config).placement, 60.0)
        lines = [getattr(mesh, each).line for each in GROUP_NAMES]
        if link is None:
            assert lines == [None] * len(GROUP_NAMES)
        else:
            assert {line and line.link for line in lines} == {Link(1.0, 1.5e9)}
            assert len({id(line) for line in lines}) == len(GROUP_NAMES)


def names_of(mesh: Mesh) -> dict[str, str]:
    """What torch calls the communicator of each group, which is how its ranks find each other."""
    groups = [getattr(mesh, name) for name in GROUP_NAMES]
    groups = [group for group in groups if isinstance(group.handle, dist.ProcessGroup)]
    for group in groups:
        assert tuple(dist.get_process_group_ranks(group.handle)) == group.ranks, group.name
    return {group.name: group.handle.group_name for group in groups}


def test_a_rank_connects_to_its_own_groups_only():
    """The rank names thousands of groups, and makes 11 communicators: seconds, if it made one for each of them."""
    for rank, embed in [(0, 1), (LARGE.tp * LARGE.cp, 0)]:  # only first and last stage share the embedding
        counted = mock.patch("torch.distributed.new_group", wraps=dist.new_group)
        with one_rank_of(LARGE.world, rank), counted as of_all_ranks:
            begin = time.process_time()
            names = names_of(build_mesh(LARGE, torch.device("cpu"), 8))
            assert time.process_time() - begin < 10, "seconds of a core"
            # tp, cp, two of the pipeline, dp, dp_cp, shard, replica (which is expert_replica), ep, edp, expert_shard
            mine = len(set(names.values()) - {"0"})
            assert mine == 11 + embed and of_all_ranks.call_count > 1000 * mine
            assert len(dist.distributed_c10d._world.pg_names) == 1 + mine, "torch has made others, or two alike"
