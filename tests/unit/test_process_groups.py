"""The mesh: who shares what, for every factorisation of 1 to 16 ranks, and as real communicators."""

import dataclasses
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from common import collectives
from common.config import TrainConfig
from common.errors import UsageError
from common.process_groups import GROUP_NAMES, Degrees, _part_of_this_start, build_mesh, coordinates, layout
from tests.harness.ranks import ROOT, run_ranks


def factorisations(world: int):
    """Every (tp, cp, pp, dp) with product `world`."""
    for tp, cp, pp in itertools.product(range(1, world + 1), repeat=3):
        if world % (tp * cp * pp) == 0:
            yield Degrees(tp, cp, pp, world // (tp * cp * pp))


@pytest.mark.parametrize("world", range(1, 17))
def test_every_group_partitions_the_world(world):
    for degrees in factorisations(world):
        stage = degrees.tp * degrees.cp * degrees.dp
        for ep in [each for each in range(1, stage + 1) if stage % each == 0]:
            folded = Degrees(degrees.tp, degrees.cp, degrees.pp, degrees.dp, ep)
            layouts = [layout(rank, folded) for rank in range(world)]
            sizes = {"world": world, "tp": degrees.tp, "cp": degrees.cp, "dp": degrees.dp, "ep": ep, "edp": stage // ep}
            sizes |= {"pp_forward": degrees.pp, "pp_backward": degrees.pp, "dp_cp": degrees.dp * degrees.cp}
            for name in GROUP_NAMES:
                for rank, groups in enumerate(layouts):
                    members = groups[name]
                    assert rank in members and list(members) == sorted(set(members))
                    assert all(layouts[other][name] == members for other in members), "members agree on the group"
                    if name in sizes:
                        assert len(members) == sizes[name]
            for rank in range(world):  # one rank of the ep group and one of the edp group meet in exactly one place
                assert set(layouts[rank]["ep"]) & set(layouts[rank]["edp"]) == {rank}


@pytest.mark.parametrize("world", [8, 12, 16])
def test_groups_differ_in_their_own_axis_only(world):
    axes = {"tp": ["tp"], "cp": ["cp"], "dp": ["dp"], "pp_forward": ["pp"], "dp_cp": ["dp", "cp"]}
    for degrees in factorisations(world):
        for rank, (name, own) in itertools.product(range(world), axes.items()):
            places = [coordinates(member, degrees) for member in layout(rank, degrees)[name]]
            for axis in ("tp", "cp", "pp", "dp"):
                values = [place[axis] for place in places]
                assert len(set(values)) == (getattr(degrees, axis) if axis in own else 1)


@pytest.mark.parametrize("world", range(1, 17))
def test_shards_and_replicas_cross_within_dp_cp(world):
    """A shard group holds one copy of the model, a replica group the same part of each copy."""
    for degrees in factorisations(world):
        together = degrees.dp * degrees.cp
        for copies in [each for each in range(1, together + 1) if together % each == 0]:
            hybrid = dataclasses.replace(degrees, zero_replicas=copies)
            layouts = [layout(rank, hybrid) for rank in range(world)]
            for rank, groups in enumerate(layouts):
                shard, replica, dp_cp = groups["shard"], groups["replica"], groups["dp_cp"]
                assert (len(shard), len(replica)) == (together // copies, copies)
                assert set(shard) & set(replica) == {rank}, "they cross exactly once"
                assert {other for each in shard for other in layouts[each]["replica"]} == set(dp_cp), "and cover all"
                for name in ("shard", "replica"):
                    assert list(groups[name]) == sorted(groups[name])
                    assert all(layouts[other][name] == groups[name] for other in groups[name]), "members agree"
                parts = {layouts[other]["shard"].index(other) for other in replica}
                assert parts == {shard.index(rank)}, "replicas hold the same part"
                first = dp_cp.index(shard[0])
                assert dp_cp[first : first + len(shard)] == shard, "neighbours share a model"


def test_degrees_of_a_configuration():
    """Without ZeRO every data-parallel rank holds a copy."""
    assert Degrees.of(TrainConfig(dp=4)).zero_replicas == 4
    assert Degrees.of(TrainConfig(dp=4, zero=1)).zero_replicas == 1
    assert Degrees.of(TrainConfig(dp=4, zero=3, zero_replicas=2)).zero_replicas == 2
    assert layout(2, Degrees(dp=4, zero_replicas=2))["shard"] == (2, 3)
    assert layout(2, Degrees(dp=4, zero_replicas=2))["replica"] == (0, 2)
    with pytest.raises(UsageError, match="--zero-replicas 3 does not divide dp x cp = 4"):
        Degrees(dp=4, zero_replicas=3).check()


def test_sixteen_ranks_are_laid_out_as_in_llama_3():
    """Llama 3 (arXiv:2407.21783), figure 5: 16 GPUs, every degree 2, groups of [TP, CP, PP, DP]."""
    groups = layout(0, Degrees(2, 2, 2, 2))
    assert [groups[name] for name in ("tp", "cp", "pp_forward", "dp")] == [(0, 1), (0, 2), (0, 4), (0, 8)]
    assert layout(13, Degrees(2, 2, 2, 2))["tp"] == (12, 13)
    assert groups["dp_cp"] == (0, 2, 8, 10)


def test_kv_replicas_share_a_head():
    for rank in range(8):
        replicas = layout(rank, Degrees(tp=8), kv_heads=2)["kv_replica"]
        assert replicas == ((0, 1, 2, 3) if rank < 4 else (4, 5, 6, 7))
    assert layout(3, Degrees(tp=4), kv_heads=8)["kv_replica"] == (3,)


def test_embed_and_mirror_follow_the_placement():
    degrees = Degrees(pp=4)
    looped = ((0, 1, 2, 3, 0, 1, 2, 3),)
    assert layout(0, degrees, placement=looped)["embed"] == (0, 3)
    assert layout(1, degrees, placement=looped)["embed"] == (1,)
    v_shaped = ((0, 1, 2, 3, 3, 2, 1, 0),)
    assert layout(0, degrees, placement=v_shaped)["embed"] == (0,), "first and last stage on one rank"
    both_ways = ((0, 1, 2, 3), (3, 2, 1, 0))
    assert layout(1, degrees, placement=both_ways)["mirror"] == (1, 2)
    assert layout(0, degrees, placement=both_ways)["embed"] == (0, 3)
    assert layout(2, degrees)["mirror"] == (2,)


def sum_over_every_group(cases: list[Degrees]) -> list[dict]:
    results = []
    for degrees in cases:
        mesh = build_mesh(degrees, torch.device("cpu"), kv_heads=2)
        sums = {}
        for name in GROUP_NAMES:
            group = getattr(mesh, name)
            value = torch.tensor([float(2**mesh.rank)])
            collectives.all_reduce(value, group)
            sums[name] = (value.item(), group.ranks)
        results.append(sums)
    return results


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (8, [Degrees(2, 2, 2, 1, 4), Degrees(4, 1, 1, 2, 2), Degrees(1, 1, 8, 1), Degrees(1, 2, 1, 4, 8)]),
        (16, [Degrees(2, 2, 2, 2, 8)]),
    ],
)
def test_communicators_join_their_members(world, cases):
    for results in run_ranks(world, sum_over_every_group, cases):
        for sums in results:
            for name, (total, ranks) in sums.items():
                assert total == sum(2.0**rank for rank in ranks), f"{name} {ranks}"


def test_one_process_needs_no_torch_distributed():
    mesh = build_mesh(Degrees(), torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    tensor = torch.ones(3)
    collectives.all_reduce(tensor, mesh.world).wait()
    assert tensor.tolist() == [1, 1, 1]


def test_ranks_that_start_again_find_each_other_and_no_trace_of_dead_ones():
    """torchrun keeps its store across restarts. In the first round rank 2 dies before it comes."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=10))

    def meet(ranks, timeout):
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: _part_of_this_start(store, rank, 3, timeout), ranks))

    with pytest.raises(RuntimeError, match="only 2 ranks came within 0.1 s"):
        meet([0, 1], timeout=0.1)
    for attempt in ("second", "third"):
        parts = meet([0, 1, 2], timeout=10)
        assert not any(part.check(["address"]) for part in parts), "nothing is left of an earlier round"
        parts[0].set("address", attempt)
        assert [part.get("address").decode() for part in parts] == [attempt] * 3


def test_impossible_meshes_are_refused():
    with pytest.raises(UsageError, match="--ep 3 does not divide the 4 ranks"):
        Degrees(dp=4, ep=3).check()
    with pytest.raises(UsageError, match="--tp 0 must be at least 1"):
        Degrees(tp=0).check()
    with pytest.raises(UsageError, match="is not 1 ranks"):
        build_mesh(Degrees(dp=2), torch.device("cpu"))


def test_heavy_packages_are_imported_only_where_they_are_used():
    """Sixteen ranks would each spend seconds on them."""
    code = "import sys, step02_data_parallel.train\n"
    code += "heavy = ('transformers', 'datasets', 'matplotlib', 'torch.distributed.checkpoint', 'pandas', 'pyarrow')\n"
    code += "print([name for name in heavy if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
