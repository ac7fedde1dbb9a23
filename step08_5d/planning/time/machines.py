"""Clusters as numbers: what a GPU computes, holds and sends. None of them is fitted; see `profiles.py` for habits."""

from typing import NamedTuple

from common.costs.hardware import EXPONENTIALS, MATMUL_TFLOPS, MEMORY_BANDWIDTH, vendor_tflops
from common.costs.networks import NETWORK, NODE, NVLINK


class Machine(NamedTuple):
    """A cluster of equal nodes, in numbers of its vendor."""

    name: str
    memory: float  # bytes of a GPU
    memory_bandwidth: float  # bytes/s of a GPU
    near: float = NVLINK  # bytes/s that a GPU sends to others of its node: in one direction
    far: float = NETWORK  # bytes/s that a GPU sends to other nodes, over its card
    gpus: int = NODE  # of a node
    float8: bool = False  # whether products are of float8 numbers (--float8)
    order: str = "tp,cp,dp,pp"  # of the dimensions over the ranks, from near to far
    power: float = 1.0  # share of the data sheet's watts that a GPU may take
    measured: bool = False  # whether messages reach all of `far`, as somebody has measured, and not only a share

    def for_gpus(self, gpus: int) -> "Machine":
        """Return the same with as many GPUs on each node as so many need: 64 of 72, say, for 512 on eight nodes."""
        return self._replace(gpus=gpus // nodes_for(gpus, self.gpus))

    def words(self, gpus: int | None = None) -> str:
        """What is assumed of so many GPUs, with a line for what is more than the data sheet says."""
        of_node, sheet = self.for_gpus(gpus or self.gpus).gpus, MACHINES[self.name]
        far = (
            f"{of_node * self.far / 1e9:g} GB/s a node, measured,"
            if self.measured
            else f"{self.far / 1e9:g} GB/s a GPU"
        )
        result = f"{f'{gpus:,} ' if gpus else ''}{self.name}: {self.peak / 1e12:g} TFLOP/s, {self.memory / 1e9:g} GB, "
        result += "products of 8-bit numbers, " if self.float8 else ""
        result += f"{self.near / 1e9:g} GB/s within a node of {of_node}, {far} between nodes"
        last = ("far", "--bus-bandwidth", of_node) if self.measured else ("far", "--between", 1)
        if gpus and of_node < self.gpus < gpus:
            whole = " or ".join(f"{each:,}" for each in whole_nodes(gpus, self.gpus))
            result += (
                f"\n  {gpus // of_node} nodes give {of_node} of their {self.gpus} GPUs each; {whole} are whole nodes"
            )
        for name, flag, times in (("memory", "--memory", 1), ("near", "--within", 1), last):
            given, most = (times / 1e9 * getattr(each, name) for each in (self, sheet))
            if given > most:
                result += f"\n  warning: {flag} {given:g} is more than the data sheet's {most:g}"
        return result

    @property
    def peak(self) -> float:
        """FLOP/s of a GPU in bfloat16, without sparsity."""
        return 1e12 * vendor_tflops(self.name, "bfloat16")

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


def whole_nodes(gpus: int, of_node: int) -> tuple[int, int]:
    """Return how many GPUs the nodes have that so many GPUs fill, without the last one and with it."""
    fewer = gpus // of_node * of_node
    return fewer, fewer + of_node


def nodes_for(gpus: int, of_node: int) -> int:
    """Return the smallest number of nodes that can each give equally many of so many GPUs, `of_node` at most."""
    nodes = -(-gpus // of_node)
    while gpus % nodes:
        nodes += 1
    return nodes


# Data sheets of A100 80GB SXM, H100 SXM, H200 SXM, DGX B200 and DGX GB200, which has 72 GPUs on one NVLink and a card
# of 400 Gb/s for each of them; H800: "Insights into DeepSeek-V3" (arXiv:2505.09343, sections 2 and 4). Sheets print
# both directions of NVLink together, 600 to 1,800 GB/s; here is one, the half.
MACHINES = {
    each.name: each
    for each in (
        Machine("A100", 80e9, 2.04e12, near=300e9, far=25e9),
        Machine("H100", 80e9, MEMORY_BANDWIDTH["H100"]),
        Machine("H800", 80e9, MEMORY_BANDWIDTH["H100"], near=200e9),
        Machine("H200", 141e9, MEMORY_BANDWIDTH["H200"]),
        Machine("B200", 180e9, 8e12, near=900e9),
        Machine("GB200", 186e9, 8e12, near=900e9, gpus=72),
    )
}
