"""Clusters as numbers: what a GPU computes, holds and sends. None of them is fitted; see `profiles.py` for habits."""

from functools import cache
from typing import NamedTuple

from common.costs.hardware import EXPONENTIALS, MATMUL_TFLOPS, MEMORY_BANDWIDTH, vendor_tflops
from common.costs.networks import NETWORK, NODE, NVLINK


class Machine(NamedTuple):
    """A cluster of equal nodes, in numbers of its vendor."""

    name: str
    memory: float  # bytes of a GPU
    memory_bandwidth: float  # bytes/s of a GPU
    near: float = NVLINK  # bytes/s of a GPU to others of its node
    far: float = NETWORK  # bytes/s of a GPU to other nodes
    gpus: int = NODE  # of a node
    float8: bool = False  # whether products are of float8 numbers (only published runs do that)
    power: float = 1.0  # share of the data sheet's watts that a GPU may take

    @property
    def peak(self) -> float:
        """FLOP/s of a GPU in bfloat16, without sparsity."""
        return 1e12 * _tflops(self.name, "bfloat16")

    @property
    def products(self) -> float:
        """FLOP/s that a lone large product reaches. Power falls with the clock's cube, as the voltage falls with it."""
        return 1e12 * MATMUL_TFLOPS[self.name][self.float8] * self.power ** (1 / 3)

    @property
    def attention(self) -> float:
        """FLOP/s of attention with heads of 128, if it had to wait for nothing but its exponentials.

        Each score has one, and 2 + 2 FLOPs for every element of a head. Exponentials have not become faster with
        products: an H100 has 1.6 times as many as an A100, and 2.9 times the products.
        """
        return 4 * 128 * EXPONENTIALS[self.name]


def nodes_for(gpus: int, of_node: int) -> int:
    """Return the smallest number of nodes that can each give equally many of so many GPUs, `of_node` at most."""
    nodes = -(-gpus // of_node)
    while gpus % nodes:
        nodes += 1
    return nodes


_tflops = cache(vendor_tflops)  # a search asks for it with every layout


# Data sheets of A100 80GB SXM, H100 SXM, H200 SXM and DGX B200; bandwidths between GPUs in one direction
MACHINES = {
    each.name: each
    for each in (
        Machine("A100", 80e9, 2.04e12, near=300e9, far=25e9),
        Machine("H100", 80e9, MEMORY_BANDWIDTH["H100"]),
        Machine("H200", 141e9, MEMORY_BANDWIDTH["H200"]),
        Machine("B200", 180e9, 8e12, near=900e9),
    )
}
