"""Published numbers of the networks between GPUs, in bytes/s, each with its source. None was measured here."""

import math
from functools import cache

# What an H100 sends at most: over NVLink 4 to GPUs of its node (900 GB/s in both directions together, data sheet), and
# over a card of 400 Gb/s to other nodes (eight cards in a DGX H100, data sheet)
NVLINK, NETWORK = 450e9, 50e9
NODE = 8  # GPUs

# Median bus bandwidth (GB/s) of 256 MB by operation and number of GPUs, on nodes of 8 H100. Measured by the authors of
# The Ultra-Scale Playbook and read off its figure "pp_comm_bandwidth". It is NCCL's bus bandwidth: bytes that a rank
# sends in the best algorithm, such as 2(N-1)/N K in an all-reduce of K bytes, over seconds.
BUS_GB_PER_S = {
    "all_reduce": {8: 436.0, 16: 361.7, 32: 160.1, 64: 99.6, 128: 84.7, 256: 64.9, 512: 32.9},
    "all_gather": {8: 249.8, 16: 184.6, 32: 119.0, 64: 69.0, 128: 55.0, 256: 28.0, 512: 11.0},
    "reduce_scatter": {8: 249.7, 16: 181.6, 32: 115.8, 64: 68.6, 128: 54.5, 256: 27.9, 512: 11.1},
}


@cache
def bus_bandwidth(op: str, gpus: float) -> float:
    """Return the published bus bandwidth in bytes/s, between two published numbers of GPUs on a straight line between
    their logarithms. Beyond the first and the last number it is theirs.
    """
    table = BUS_GB_PER_S[op]
    gpus = min(max(gpus, min(table)), max(table))
    below, above = max(n for n in table if n <= gpus), min(n for n in table if n >= gpus)
    share = math.log(gpus / below) / math.log(above / below) if above > below else 0.0
    return 1e9 * table[below] * (table[above] / table[below]) ** share
