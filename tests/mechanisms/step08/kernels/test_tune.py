"""The command that measures tiles tries each one, and leaves the table as it is."""

import pytest

from step08_5d.kernels import flash_attention, tune
from tests.mechanisms.step08.kernels.compare import needs_triton, on_cpu


@needs_triton
@on_cpu  # a compiled kernel would be timed
@pytest.mark.parametrize("kernel", [0, 2])
def test_each_tile_is_tried(kernel):
    tiles, seen = [(16, 32, 4, 1), (32, 16, 4, 1), (64, 64, 8, 3)], []
    before = {name: dict(getattr(flash_attention, name)) for name in ("TILES", "TILES_IN_REGISTERS", "PRECISE_TILES")}

    def clock(call) -> float:
        q = tune.torch.empty(1, 1, 1, 16, dtype=tune.torch.bfloat16)
        seen.append(tuple(flash_attention.tile_sizes(q, kernel).values()))
        if len(seen) == 2:
            raise RuntimeError("out of shared memory\nand more")
        call()
        return 1.0 / len(seen)

    found = tune.trials(16, kernel, tiles, clock, tokens=32)
    assert seen == tiles
    assert [trial.tile for trial in found] == [tiles[2], tiles[0], tiles[1]]
    assert found[2] == tune.Trial(tiles[1], None, "RuntimeError: out of shared memory")
    assert all(getattr(flash_attention, name) == table for name, table in before.items())
