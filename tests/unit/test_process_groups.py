"""The mesh: who shares what, for every factorisation of 1 to 16 ranks and at 16,384, and as real communicators."""

import itertools
import json
import math
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from common import collectives, process_groups, start
from common.config import TrainConfig
from common.errors import UsageError
from common.experiments.demo import device_flag
from common.launching import launch
from common.process_groups import AXES, GROUP_NAMES, Degrees, all_groups, build_mesh, separate
from step05_pipeline.stages import place_stages
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")


def layouts(world: int):
    """Every (tp, cp, pp, dp) with product `world`, every ep and every number of ZeRO's copies, in changing orders."""
    orders = itertools.cycle(itertools.permutations(AXES))
    divisors = [each for each in range(1, world + 1) if world % each == 0]
    for tp, cp, pp, dp in itertools.product(divisors, repeat=4):
        if tp * cp * pp * dp == world:
            for ep, copies in itertools.product(divisors, repeat=2):
                if tp * cp * dp % ep == 0 and dp * cp % copies == 0:
                    yield Degrees(tp, cp, pp, dp, ep, copies, axes=next(orders))


def by_definition(degrees: Degrees, kv_heads: int, placement) -> dict[str, list[tuple[int, ...]]]:
    """Groups from what their members have in common. Two ranks share a group if all of that is equal."""
    tp, cp, dp, ep, copies = degrees.tp, degrees.cp, degrees.dp, degrees.ep, degrees.zero_replicas
    holders = tp * cp * dp // ep  # of an expert; without ZeRO each has a copy of its own
    holding = 1 if copies == dp * cp else holders // math.gcd(holders, copies)  # one copy together
    groups, earlier = defaultdict(lambda: defaultdict(list)), defaultdict(itertools.count)
    for rank, where in enumerate(itertools.product(*(range(getattr(degrees, axis)) for axis in degrees.axes))):
        d, p, c, t = (where[degrees.axes.index(axis)] for axis in AXES)
        sample, place, shards = next(earlier[p, t]), next(earlier[p]), dp * cp // copies
        end = any(p in (row[0], row[-1]) for row in placement)
        held = {stage for row in placement for stage, holder in enumerate(row) if holder == p}
        common = {
            "world": (),
            "tp": (d, p, c),
            "kv_replica": (d, p, c, t // max(1, tp // kv_heads)),
            "cp": (d, p, t),
            "pp_forward": (d, c, t),
            "pp_backward": (d, c, t),
            "dp": (p, c, t),
            "dp_cp": (p, t),
            "shard": (p, t, sample // shards),
            "replica": (p, t, sample % shards),
            "ep": (p, place // ep),
            "edp": (p, place % ep),
            "expert_shard": (p, place % ep, place // ep // holding),
            "expert_replica": (p, place % ep, place // ep % holding),
            "embed": (d, c, t, -1 if end else p),
            "mirror": (d, c, t, min(row[stage] for row in placement for stage in held)),
        }
        for name, what in common.items():
            groups[name][what].append(rank)
    return {name: sorted(map(tuple, each.values())) for name, each in groups.items()}


@pytest.mark.parametrize("world", range(1, 17))
def test_groups_are_what_their_members_have_in_common(world):
    for number, degrees in enumerate(layouts(world)):
        chain = tuple(range(degrees.pp))
        placements = [(chain,), (chain + chain,), (chain + chain[::-1],), (chain, chain[::-1])]
        placement, kv_heads = placements[number % 4], (1, 2, 4, 8, 16)[number % 5]
        if degrees.tp % kv_heads and kv_heads % degrees.tp:
            kv_heads = degrees.tp
        groups = {name: sorted(ranks) for name, ranks in all_groups(degrees, kv_heads, placement).items()}
        assert groups == by_definition(degrees, kv_heads, placement) and groups.keys() == set(GROUP_NAMES), degrees
    assert all_groups(degrees)["embed"] == all_groups(degrees, placement=(chain,))["embed"]


def test_named_examples():
    for options, name, expected in [
        ({"degrees": Degrees(tp=8), "kv_heads": 2}, "kv_replica", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({"degrees": Degrees(dp=4, zero_replicas=2)}, "shard", [(0, 1), (2, 3)]),  # neighbours share a model
        ({"degrees": Degrees(dp=4, zero_replicas=2)}, "replica", [(0, 2), (1, 3)]),
        ({"degrees": Degrees(pp=4), "placement": ((0, 1, 2, 3), (3, 2, 1, 0))}, "mirror", [(0, 3), (1, 2)]),
        ({"degrees": Degrees(pp=4), "placement": ((0, 1, 2, 3, 3, 2, 1, 0),)}, "embed", [(0,), (1,), (2,), (3,)]),
    ]:
        assert all_groups(**options)[name] == expected
    for flags, copies in [({}, 4), ({"zero": 1}, 1), ({"zero": 3, "zero_replicas": 2}, 2)]:
        assert Degrees.of(TrainConfig(dp=4, **flags)).zero_replicas == copies


def test_sixteen_thousand_ranks_take_work_in_proportion():
    """A few calls for each rank and name. What looks at all pairs of ranks would make 268 million."""
    degrees, calls = Degrees(tp=8, cp=4, pp=16, dp=32, ep=64, zero_replicas=4), itertools.count()

    def count(frame, event, argument):
        assert event not in ("call", "c_call") or next(calls) < 20 * degrees.world, "too much work"

    sys.setprofile(count)
    try:
        all_groups(degrees, kv_heads=8)
    finally:
        sys.setprofile(None)


def ranks_use_every_group(cases: list[tuple[Degrees, tuple | None]]) -> None:
    for degrees, placement in cases:
        mesh = build_mesh(degrees, CPU, kv_heads=2)
        if placement:
            mesh = place_stages(mesh, placement)
        groups, own = {name: getattr(mesh, name) for name in GROUP_NAMES}, separate(mesh.world, 60)
        for name, expected in all_groups(degrees, 2, placement).items():
            assert groups[name].ranks == next(ranks for ranks in expected if mesh.rank in ranks), f"{name}, {degrees}"
        for group in [*groups.values(), own]:
            value = torch.tensor([float(2**mesh.rank)])
            collectives.all_reduce(value, group)
            assert value.item() == sum(2.0**rank for rank in group.ranks), f"{group.name} {group.ranks}"
        assert own.handle is not mesh.world.handle, "a thread of its own may use it"
        made = [group for name, group in groups.items() if name not in ("embed", "mirror") and group.size > 1]
        for one, other in itertools.combinations(made, 2):
            shared = one.ranks == other.ranks and not {one.name, other.name} & {"pp_forward", "pp_backward"}
            assert (one.handle is other.handle) == shared, f"{one.name} and {other.name}, {degrees}"


EIGHT = [(Degrees(2, 2, 2, 1, 4, experts=True), ((0, 1), (1, 0))), (Degrees(4, 1, 1, 2, 2, experts=True), None)]
EIGHT += [(Degrees(1, 1, 8, 1), (tuple(range(8)) * 2,))]
EIGHT += [(Degrees(2, 2, 1, 2, 8), None), (Degrees(1, 2, 1, 4, 8, 2, axes=("cp", "tp", "pp", "dp")), None)]


def test_communicators_join_their_members():
    run_ranks(8, ranks_use_every_group, EIGHT)


def test_one_process_needs_no_torch_distributed():
    tensor = torch.ones(3)
    collectives.all_reduce(tensor, build_mesh(Degrees(), CPU).world).wait()
    assert tensor.tolist() == [1, 1, 1] and not torch.distributed.is_initialized()
    for degrees, words in [(Degrees(dp=2), "tp 1 x cp 1 x pp 1 x dp 2 is not 1 ranks"), (Degrees(tp=0), "tp 0 x")]:
        with pytest.raises(UsageError, match=words):
            build_mesh(degrees, CPU)
    for degrees in Degrees(dp=4, ep=3), Degrees(dp=4, zero_replicas=3):  # TrainConfig names the flag
        with pytest.raises(ValueError):
            all_groups(degrees)


def test_ranks_that_start_again_find_each_other_and_no_trace_of_dead_ones(monkeypatch):
    """torchrun keeps its store across restarts, and in it the port of a rank 0 that has died."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    launcher = HashStore()
    dead = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher.set("port of rank 0", str(dead.port))
    del dead
    with pytest.raises(RuntimeError, match="rank 0 does not answer"):
        start._store_of_this_start(launcher, 1, timeout=0.1)
    for attempt in ("second", "third"):
        with ThreadPoolExecutor(3) as threads:
            starting = [threads.submit(start._store_of_this_start, launcher, rank, 20) for rank in (1, 2, 0)]
            stores = [each.result() for each in reversed(starting)]
        assert not any(store.check(["address"]) for store in stores), "nothing is left of an earlier start"
        stores[0].set("address", attempt)
        assert [store.get("address").decode() for store in stores] == [attempt] * 3
        del stores, starting


def test_backend_of_ranks_in_different_places():
    """NCCL needs a GPU per rank, whatever number of ranks the launcher calls local."""
    two, sixteen = [("a", "x"), ("a", "y")], [(node, str(gpu)) for node in "ab" for gpu in range(8)]
    for places, line in [
        (two, "2 ranks on 1 node, one H200 each, NCCL"),
        ([("a", "x"), ("b", "x")], "2 ranks on 2 nodes, one H200 each, NCCL"),  # names of nodes that NCCL_HOSTID gave
        (sixteen, "16 ranks on 2 nodes, one H200 each, NCCL"),
        (two + two[:1], "3 ranks on 1 node, sharing 2 H200, gloo"),
        ([("a", None)] * 4, "4 ranks on 1 node, on the CPU, gloo"),
        ([("a", None), ("b", None)], "2 ranks on 2 nodes, on the CPU, gloo"),
    ]:
        assert start.choose_backend(places, "H200") == (line.split()[-1].lower(), line)
    with pytest.raises(UsageError, match="rank 16 sees no GPU, but others do; with --device cpu "):
        start.choose_backend([*sixteen, ("c", None), ("c", None)])
    assert [device_flag(gpus, 4) for gpus in (0, 1, 3, 4, 8)] == ["", "--device cpu", "--device cpu", "", ""]


def test_start_of_nccl_after_a_watchdog_timeout(monkeypatch, capsys):
    """Each process sees one GPU, its own. torchrun's store still holds the key with which NCCL ends all ranks.

    NCCL looks for it in the store below all prefixes.
    """
    launcher, seen, place = HashStore(), {}, ("place of rank 1", json.dumps(["a", "y"]))
    attempt = PrefixStore("/worker/attempt_1", launcher)
    launcher.set_timeout(timedelta(seconds=5))
    launcher.set("exception_dump", "1")
    attempt.set(*place)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NCCL_HOSTID": "a"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "1", "TORCH_NCCL_HIGH_PRIORITY": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in start.NCCL_SETTINGS.keys() - environment.keys():
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)
    gpu = SimpleNamespace(uuid="x", name="H200")
    fakes = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None}
    for name, fake in (fakes | {"get_device_properties": lambda device: gpu}).items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def init_process_group(store, **options):
        below = getattr(store, "_underlying_non_prefix_store", store)
        seen.update(options, environment=dict(os.environ), timed_out=below.check(["exception_dump"]))

    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(attempt, 0, 2)]))
    world = SimpleNamespace(bound_device_id=torch.device("cuda:0"))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(start, "meet", lambda: None)

    def other_rank():
        start._store_of_this_start(attempt, 1, timeout=5).set(*place)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(other_rank)
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
        assert (device_id == gpu) == (backend == "nccl"), "NCCL connects at once"
        made.setdefault(tuple(ranks), []).append((timeout, backend, pg_options))
        return f"communicator {len(made)}"

    options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(dist, "get_backend", lambda: {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}[backend])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(process_groups, "meet", lambda: None)
    mesh = build_mesh(Degrees(tp=2, pp=2, dp=2), gpu, timeout=7)
    pipelines, others = {(0, 2), (1, 3), (4, 6), (5, 7)}, {(0, 1), (0, 4)}
    assert made.keys() == {(0, 1), (2, 3), (4, 5), (6, 7)} | {(0, 4), (1, 5), (2, 6), (3, 7)} | pipelines
    assert all(made[ranks] == [(limit, backend, None)] for ranks in others)
    for ranks in pipelines:  # one for each direction, and `embed`
        *early, (*same, options) = made[ranks]
        assert len(early) == 2 and options is None and same == [limit, backend]
        for given in early:
            assert given[:2] == (limit, backend)
            assert vars(given[2].config) == {"max_ctas": 4} if backend == "nccl" else given[2] is None
    if backend == "nccl":
        assert made[0, 2][0][2] is not made[0, 2][1][2], "torch keeps the options and changes them"
    assert mesh.edp.ranks == (0, 1, 4, 5)
    with pytest.warns(UserWarning, match="does not belong"), pytest.raises(AttributeError):  # no sum over the world
        collectives.all_reduce(torch.ones(1), mesh.edp)


def test_a_run_ends_when_the_gpu_is_idle_and_all_ranks_have_come(monkeypatch):
    """The meeting is gloo's: an NCCL barrier may return while its kernel still needs the other ranks."""
    calls = []
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
