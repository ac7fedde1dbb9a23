"""How 16 ranks are laid out, and groups of a large world on one of its ranks: it makes its own, under common names."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.errors import UsageError
from common.process_groups import GROUP_NAMES, Degrees, Mesh, all_groups, build_mesh, coordinates
from step05_pipeline.stages import place_stages
from step08_5d.config import check
from tests.harness.observing import configure

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
    degrees = Degrees.of(configure(8, "--tp 2 --cp 2 --pp 2 --experts 8 --ep 4 --zero 1 --order dp,pp,tp,cp", 16))
    groups = {name: ranks[0] for name, ranks in all_groups(degrees).items()}
    assert [groups[name] for name in ("dp", "pp_forward", "tp", "cp")] == [(0, 1), (0, 2), (0, 4), (0, 8)]
    assert groups["dp_cp"] == (0, 1, 8, 9) and (groups["ep"], groups["edp"]) == ((0, 1, 4, 5), (0, 8))
    assert all_groups(replace(degrees, zero_replicas=2))["shard"][0] == (0, 1)
    assert coordinates(13, degrees) == {"dp": 1, "pp": 0, "tp": 1, "cp": 1}
    for wrong in ("tp,cp,pp", "tp,cp,pp,dp,dp", "tp,cp,pp,ep", "tp, cp, pp, dp"):
        with pytest.raises(UsageError, match="--order .* must name"):
            check(replace(configure(8, "--tp 2", 2), order=wrong))


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


def test_ranks_in_different_numbers_of_groups_agree_on_names():
    """A rank of the first stage and its neighbor of the second, who has no part in `embed`."""
    found, degrees, chain = [], Degrees(tp=2, cp=2, pp=4, dp=2, zero_replicas=4), (0, 1, 2, 3)
    for rank in (0, 4):
        with one_rank_of(degrees.world, rank):
            meshes = [build_mesh(degrees, torch.device("cpu")) for _ in range(2)]
            found.append([names_of(place_stages(mesh, (chain, chain[::-1]))) for mesh in meshes])
    for first, second in zip(*found, strict=True):
        assert "embed" in first and "embed" not in second and "mirror" in second
        same = ("pp_forward", "pp_backward")
        assert [first[name] for name in same] == [second[name] for name in same]
        assert len({first[name] for name in (*same, "tp", "cp", "embed")}) == 5
