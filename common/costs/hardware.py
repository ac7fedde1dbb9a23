"""Published numbers of GPUs, each with its source. None was measured here.

Pure Python, in bytes/s and FLOP/s unless a name says otherwise.
"""

import re

# Dense TFLOP/s of one device as torch sees it (vendors also print twice that, "with sparsity"); "float32" is without
# TF32, and float64 is the tensor-core rate if there is one. The first pattern that occurs in a device's name counts.
# Sources: the vendors' data sheets; for RTX 4090 NVIDIA's whitepaper of Ada (float32 accumulation); MI250X is halved,
# since torch sees each of its dies as a device; GB200 is a 72nd of a GB200 NVL72. H800 is an H100 of which exports have
# less NVLink and float64. Only the data sheets of H100, H200 and GB200 have been read for float8.
_TYPES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8")
_GPUS = {
    r"\bA100\b": (312, 312, 156, 19.5, 19.5),
    r"\bH100 PCIe\b": (756, 756, 378, 51, 51, 1513),
    r"\bH[12]00 NVL\b": (835, 835, 417, 60, 60, 1671),
    r"\bH[12]00\b": (989, 989, 494, 67, 67, 1979),
    r"\bH800\b": (989, 989, 494, 67, 1, 1979),
    r"(?<!G)\bB200\b": (2250, 2250, 1100, 75, 37),
    r"\bGB200\b": (2500, 2500, 1250, 80, 40, 5000),
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

# TFLOP/s of a lone large product, which no vendor prints: the best of many shapes, in bfloat16 and in float8. Measured
# by S. Bekman and others (Machine Learning Engineering, "Maximum Achievable Matmul FLOPS comparison table"). H200 is as
# fast as H100 in bfloat16, it says; H800 has the same processors.
MATMUL_TFLOPS = {
    "A100": (271.2, None),
    "H100": (794.5, 1402.6),
    "H800": (794.5, 1402.6),
    "H200": (794.5, 1453.4),
    "B200": (1745.0, 3432.5),
    "GB200": (1822.0, 3615.6),
}
# Exponentials per second: 16 per clock of a multiprocessor (CUDA programming guide, special functions). A100 has 108 of
# 1.41 GHz, H100 132 of 1.83 GHz (FlashAttention-3, arXiv:2407.08608, says 3.9e12). B200 has 148; as no data sheet says
# its clock, that of H100 is taken.
EXPONENTIALS = {"A100": 2.44e12, **dict.fromkeys(("H100", "H800", "H200"), 3.87e12)}
EXPONENTIALS |= dict.fromkeys(("B200", "GB200"), 4.33e12)
