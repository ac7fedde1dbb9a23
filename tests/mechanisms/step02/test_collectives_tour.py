"""The tour of collectives: its own assertions hold, its output shows what it claims, a wrong result is noticed."""

import os
import re

import pytest
import torch

from common import collectives
from common.process_groups import Degrees, Group, build_mesh
from step02_data_parallel import collectives_tour
from tests.harness.ranks import RankFailure, run_ranks, run_script

SCRIPT = "step02_data_parallel/collectives_tour.py"


def world_group() -> Group:
    return build_mesh(Degrees(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu")).world


def ranks_tour():
    """The tour; then its ring against the library on values for which every order of additions rounds differently."""
    collectives_tour.NAP, group = 0.02, world_group()
    collectives_tour.tour(group, torch.device("cpu"))
    for elements in (group.size, 12 * group.size):
        tensor = torch.randn(elements, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
        library, steps = tensor.clone(), []
        collectives.all_reduce(library, group)
        collectives_tour.ring_all_reduce(tensor, group, lambda *step, steps=steps: steps.append(step))
        torch.testing.assert_close(tensor, library, rtol=1e-13, atol=1e-13)
        expected = [(phase, step) for phase in ("reduce-scatter", "all-gather") for step in range(group.size - 1)]
        assert steps == expected, steps


@pytest.mark.parametrize("world", [2, 5])  # and three, below
def test_every_stop_on(world, capsys):
    run_ranks(world, ranks_tour)
    printed = capsys.readouterr().out
    assert f"All 11 results are as asserted, on {world} ranks." in printed
    assert "[rank 1]" not in printed, "rank 0 prints for all, so the lines are in order"


def test_the_command_prints_before_and_after():
    result = run_script(SCRIPT, ranks=3)
    assert result.returncode == 0, result.stderr
    stops = dict(re.findall(r"^(\S[^\n]*)\n((?:  .*\n)+)", result.stdout, re.MULTILINE))
    after = {title: re.findall(r"-> *(.*?) *$", text, re.MULTILINE) for title, text in stops.items()}
    assert after["broadcast from rank 0"] == ["[1 2 3 4 5]"] * 3
    assert after["reduce to rank 0"][0] == "[6 6 6 6 6]  (the sum)"
    assert all(text.endswith("(not defined)") for text in after["reduce to rank 0"][1:])
    unchanged = [f"[{rank} {rank} {rank} {rank} {rank}]  (not defined)" for rank in (2, 3)]
    assert after["reduce to rank 0"][1:] != unchanged, "erratum 16: gloo adds up in the other ranks' tensors"
    assert after["all-reduce"] == ["[6 6 6 6 6]"] * 3
    assert after["gather to rank 0"] == ["[1 1] [2 2] [3 3]", "-", "-"]
    assert after["all-gather"] == ["[1 1 2 2 3 3]"] * 3
    assert after["scatter from rank 0"] == ["[10 10]", "[20 20]", "[30 30]"]
    assert after["reduce-scatter"] == ["[6 12]", "[14 56]", "[36 288]"], "the playbook's numbers"
    assert after["all-to-all"] == ["[11 21 31]", "[12 22 32]", "[13 23 33]"]
    assert after["send and receive"] == ["[3 3]", "[1 1]", "[2 2]"]
    ring = stops["ring all-reduce by hand: reduce-scatter, then all-gather"]
    ring = [" ".join(line.split()) for line in ring.splitlines()]
    assert "reduce-scatter 2/2 111 202 003 010 222 033 110 200 333" in ring
    assert "all-gather 2/2 111 222 333 111 222 333 111 222 333" in ring
    assert "each rank sent 4 messages of K/N = 16 bytes, 64 in all = 2(N-1)/N K for K = 48" in ring


def test_one_process_is_told_what_to_do():
    result = run_script(SCRIPT)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and "torchrun --nproc_per_node 3" in result.stderr
    assert len(result.stderr.splitlines()) == 1, "no traceback"


def ranks_wrong_sum():
    def no_sum(tensor, group, async_op=False, op="sum"):
        return collectives.Work()

    collectives.all_reduce = no_sum
    collectives_tour.all_reduce(world_group(), torch.device("cpu"))


def test_a_wrong_result_is_noticed():
    with pytest.raises(RankFailure, match="all-reduce"):
        run_ranks(2, ranks_wrong_sum)
