"""How much of the hardware a run uses: a device's peak FLOP/s, from its vendor or measured, and the utilisation."""

import math
import re
import time

import torch

# Dense TFLOP/s of one device as torch sees it (vendors also print twice that, "with sparsity"); "float32" is without
# TF32, and float64 is the tensor-core rate if there is one. A type without a number is measured. The first pattern that
# occurs in `torch.cuda.get_device_name()` counts. Sources: the vendors' data sheets; for RTX 4090 NVIDIA's whitepaper
# of Ada (float32 accumulation); MI250X is halved, since torch sees each of its dies as a device.
_TYPES = ("bfloat16", "float16", "tf32", "float32", "float64")
_GPUS = {
    r"\bA100\b": (312, 312, 156, 19.5, 19.5),
    r"\bH100 PCIe\b": (756, 756, 378, 51, 51),
    r"\bH[12]00 NVL\b": (835, 835, 417, 60, 60),
    r"\bH[12]00\b": (989, 989, 494, 67, 67),
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
_measured: dict[tuple, float] = {}


def utilisation(flops_per_step: float, step_time_s: float, world_size: int, peak_flops: float) -> float:
    """The fraction of all devices' peak that a step used: FLOPs / (step time * world size * peak FLOP/s).

    With the model's FLOPs (three times the forward's, attention included) this is the MFU of PaLM (arXiv:2204.02311,
    appendix B). With all FLOPs that the hardware executes, recomputed forwards included, it is the HFU.
    """
    return flops_per_step / (step_time_s * world_size * peak_flops)


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float | None = None) -> tuple[float, str]:
    """Peak FLOP/s of one device for matrix products in `dtype`, and where the number comes from.

    `override_tflops` (10^12 FLOP/s) wins, then the vendor's number. A CPU, an unknown GPU and a slice of one (MIG) are
    measured: 0.2 s, once per process, with as many threads as torch uses now. Ranks that share a CPU must measure at
    the same time, or each would count the whole machine as its own.
    """
    device = torch.device(device)
    if override_tflops is not None:
        return override_tflops * 1e12, "given by --peak-tflops"
    name, kind = "this CPU", str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
            kind = "tf32"
        if (tflops := vendor_tflops(name, kind)) is not None:
            return tflops * 1e12, f"{name}, {kind}: the vendor's number, dense"
    key = (str(device), kind, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _measure_matmul(device, dtype)
    return _measured[key], f"{name}, {kind}: measured, the fastest matrix product"


def vendor_tflops(name: str, kind: str) -> float | None:
    """The vendor's TFLOP/s of the GPU called `name` for `kind` (one of `_TYPES`), or None if we know no number."""
    rows = [row for pattern, row in _GPUS.items() if re.search(pattern, name) and "MIG" not in name]
    return rows[0][_TYPES.index(kind)] if rows else None


def _measure_matmul(device: torch.device, dtype: torch.dtype, budget: float = 0.2) -> float:
    """FLOP/s of the fastest of several large matrix products in about `budget` seconds."""

    def seconds_of(a: torch.Tensor, b: torch.Tensor) -> float:
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    size, best, end = 8192 if device.type == "cuda" else 1024, math.inf, time.perf_counter() + budget
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    while math.isinf(best) or time.perf_counter() < end:  # on a busy machine only a few of many tries run undisturbed
        best = min(best, seconds_of(a, b))
    return 2 * size**3 / best
