"""Published numbers of GPUs and of the networks between them, each with its source. None was measured here.

Pure Python, in bytes/s and FLOP/s unless a name says otherwise.
"""

import math
import re

# Dense TFLOP/s of one device as torch sees it (vendors also print twice that, "with sparsity"); "float32" is without
# TF32, and float64 is the tensor-core rate if there is one. The first pattern that occurs in a device's name counts.
# Sources: the vendors' data sheets; for RTX 4090 NVIDIA's whitepaper of Ada (float32 accumulation); MI250X is halved,
# since torch sees each of its dies as a device. Only the data sheets of H100 and H200 have been read for float8.
_TYPES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8")
_GPUS = {
    r"\bA100\b": (312, 312, 156, 19.5, 19.5),
    r"\bH100 PCIe\b": (756, 756, 378, 51, 51, 1513),
    r"\bH[12]00 NVL\b": (835, 835, 417, 60, 60, 1671),
    r"\bH[12]00\b": (989, 989, 494, 67, 67, 1979),
    r"(?<!G)\bB200\b": (2250, 2250, 1100, 75, 37),
    r"\bL4\b": (121, 121, 60, 30.3, None),
    r"\bL40S\b": (362, 362, 183, 91.6, None),
    r"\bA10\b": (125, 125, 62.5, 31.2, None),
    r"\bV100-PCIE\b": (None, 112, None, 14, 7),
    r"\bV100\b": (None, 125, None, 15.7, 7.8),
    r"\bRTX 4090\b(?! D)": (165.2, 165.2, 82.6, 82.6, 1.29),
    r"\bMI250X\b": (191.5, 191.5, None, 47.85, 47.85),
    r"\bMI300X\b": (1307.4, 1307.4, 653.7, 163.4, 163.4),
}


def vendor_tflops(name: str, kind: str) -> float | None:
    """The vendor's TFLOP/s of the GPU called `name` for `kind` (one of `_TYPES`), or None if we know no number."""
    rows = [row for pattern, row in _GPUS.items() if re.search(pattern, name) and "MIG" not in name]
    return dict(zip(_TYPES, rows[0])).get(kind) if rows else None


H100_TFLOPS = float(vendor_tflops("H100", "bfloat16"))
MEMORY_BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # data sheets of NVIDIA H100 SXM and H200

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


def bus_bandwidth(op: str, gpus: float) -> float:
    """Return the published bus bandwidth in bytes/s, between two published numbers of GPUs on a straight line between
    their logarithms. Beyond the first and the last number it is theirs.
    """
    table = BUS_GB_PER_S[op]
    gpus = min(max(gpus, min(table)), max(table))
    below, above = max(n for n in table if n <= gpus), min(n for n in table if n >= gpus)
    share = math.log(gpus / below) / math.log(above / below) if above > below else 0.0
    return 1e9 * table[below] * (table[above] / table[below]) ** share
