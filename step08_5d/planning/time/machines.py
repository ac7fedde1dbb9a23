"""Clusters as numbers: what a GPU computes, holds and sends, and what an implementation makes of it."""

from functools import cache
from typing import NamedTuple

from common.costs.hardware import MEMORY_BANDWIDTH, vendor_tflops
from common.costs.networks import NETWORK, NODE, NVLINK


class Machine(NamedTuple):
    """A cluster of equal nodes, in numbers of its vendor."""

    name: str
    memory: float  # bytes of a GPU
    memory_bandwidth: float  # bytes/s of a GPU
    near: float = NVLINK  # bytes/s of a GPU to others of its node
    far: float = NETWORK  # bytes/s of a GPU to other nodes
    gpus: int = NODE  # of a node

    @property
    def peak(self) -> float:
        """FLOP/s of a GPU in bfloat16, without sparsity."""
        return 1e12 * _tflops(self.name, "bfloat16")


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


class Habits(NamedTuple):
    """What an implementation makes of such GPUs. `published/runs.py` fits these numbers to published runs.

    The defaults are those of all published runs, rounded to two digits.
    """

    efficiency: float = 0.55  # share of the peak that matrix products reach
    small: float = 4.2  # bytes that small operations move, in those of `speed.small_bytes`
    launch: float = 3.1e-3  # seconds, in which the CPU launches a layer's forward and backward
    near_start: float = 7.1e-5  # seconds, until a collective within a node begins to move bytes
    far_start: float = 4.0e-4  # the same between two nodes;
    spread: float = 0.96  # between n + 1 nodes it takes n ** spread times as long
    cards: float = 0.64  # of a node's speed to others, r of its g ranks have a share of (r / g) ** cards
    paced: float = 6.5e-3  # seconds that a pipeline's layer takes at least, with the messages of its tensor ranks;
    apart: float = 0.55  # with tp of these tp ** apart times as long,
    crowd: float = 0.62  # and if they are on n nodes n ** crowd times as long
    pause: float = 0.0  # seconds by which each message between stages is late: see `PAUSE` in published/runs.py
    hides: float = 1.0  # share of a backward behind which the sums of gradients may hide
    prefetch: float = 0.0  # share of a forward behind which gathered weights may hide
    order: str = "tp,cp,dp,pp"  # of the dimensions over the ranks, from near to far


# Step 8 gathers the weights of the next layer meanwhile, and puts neighboring stages near to each other
OURS = Habits(prefetch=1.0, order="tp,cp,pp,dp")
