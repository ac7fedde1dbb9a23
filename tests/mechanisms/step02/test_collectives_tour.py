"""The tour of collectives: its own assertions hold."""

import pytest
import torch

from common import collectives
from common.process_groups import Degrees, build_mesh
from common.start import environment
from step02_data_parallel import collectives_tour
from tests.harness.ranks import run_ranks


def ranks_tour():
    """The tour; then its ring against the library on values for which every order of additions rounds differently."""
    collectives_tour.NAP, cpu = 0.02, torch.device("cpu")
    group = build_mesh(Degrees(dp=environment().world_size), cpu).world
    collectives_tour.tour(group, cpu)
    tensor = torch.randn(12 * group.size, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
    library = tensor.clone()
    collectives.all_reduce(library, group)
    collectives_tour.ring_all_reduce(tensor, group)
    torch.testing.assert_close(tensor, library, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_stop_on(world, capsys):
    run_ranks(world, ranks_tour)
    shown = capsys.readouterr().out
    assert f"All 11 results are as asserted, on {world} ranks." in shown
    assert shown.count("(not defined, here changed)") == world - 1  # the playbook prints them as they were: erratum 16
