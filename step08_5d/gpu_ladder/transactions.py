"""Which sectors of memory the warps of matmul.cu touch, warp by warp: no GPU, no compiler, only addresses.

Each function yields, for every load and store of every warp, what its 32 lanes address. Numbers have 4 bytes; A is M x
K, B is K x N, C is M x N, row-major, and behind each other in memory. M, N and K must be multiples of 32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from step08_5d.gpu_ladder.traffic import LANES, SECTOR, sectors
from step08_5d.kernels.launching import ceil_div

TILE = 32  # as in matmul.cu
LANE = np.arange(LANES)


class ProductShape(NamedTuple):
    M: int
    N: int
    K: int

    def a(self, row, k) -> np.ndarray:
        return 4 * (row * self.K + k) + 0 * LANE

    def b(self, k, column) -> np.ndarray:
        return 4 * (self.M * self.K + k * self.N + column) + 0 * LANE

    def c(self, row, column) -> np.ndarray:
        return 4 * ((self.M + self.N) * self.K + row * self.N + column) + 0 * LANE


def naive(size: ProductShape) -> Iterator[np.ndarray]:
    """The lanes of a warp are rows."""
    for row in range(0, size.M, LANES):
        for column in range(size.N):
            for k in range(size.K):
                yield size.a(row + LANE, k)
                yield size.b(k, column)
            yield size.c(row + LANE, column)


def coalesced(size: ProductShape) -> Iterator[np.ndarray]:
    """The lanes of a warp are columns."""
    for row in range(size.M):
        for column in range(0, size.N, LANES):
            for k in range(size.K):
                yield size.a(row, k)
                yield size.b(k, column + LANE)
            yield size.c(row, column + LANE)


def tiled(size: ProductShape) -> Iterator[np.ndarray]:
    """Each warp loads one row of both tiles. All further reads are from shared memory, which costs no sector."""
    for row in range(size.M):
        for column in range(0, size.N, TILE):
            for start in range(0, size.K, TILE):
                yield size.a(row, start + LANE)
                yield size.b(start + row % TILE, column + LANE)
            yield size.c(row, column + LANE)


KERNELS = {"naive": naive, "coalesced": coalesced, "tiled": tiled}


def predicted_sectors(kernel: str, size: ProductShape) -> int:
    """A column of 32 numbers is 32 sectors, a row 32 * 4 / 32 = 4, and one number for all lanes 1."""
    row = LANES * 4 // SECTOR
    per_k = {"naive": LANES + 1, "coalesced": 1 + row, "tiled": 2 * row / TILE}[kernel]
    written = LANES if kernel == "naive" else row
    return round(size.M * size.N // LANES * (per_k * size.K + written))


def predicted_loads(kernel: str, size: ProductShape) -> int:
    """Numbers that threads ask memory for: two for each multiplication, or two for TILE of them."""
    return 2 * size.M * size.N * size.K // (TILE if kernel == "tiled" else 1)


def predicted_excess(kernel: str, size: ProductShape) -> int:
    """Sectors that neighbors would not have needed: 32 - 4 for each load and store of a column, none elsewhere."""
    return size.M * size.N // LANES * (LANES - LANES * 4 // SECTOR) * (size.K + 1) if kernel == "naive" else 0


def excess(kernel: str, size: ProductShape) -> int:
    """The same from the addresses: what a warp touches beyond the sectors that its different numbers would fill."""
    return sum(sectors(each) - ceil_div(4 * len(np.unique(each)), SECTOR) for each in KERNELS[kernel](size))


def count(kernel: str, size: ProductShape) -> tuple[int, int]:
    """Return the numbers loaded and the sectors touched, both counted from the addresses."""
    touched = [(len(addresses), sectors(addresses)) for addresses in KERNELS[kernel](size)]
    numbers, counted = map(sum, zip(*touched))
    return numbers - size.M * size.N, counted  # each element of C is stored, not loaded
