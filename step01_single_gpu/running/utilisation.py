"""How much of the hardware a run uses: a device's peak FLOP/s, from its vendor or measured, and the utilization."""

import math
import time

import torch

from common.costs.hardware import vendor_tflops

_measured: dict[tuple, float] = {}


def utilisation(flops_per_step: float, step_time_s: float, world_size: int, peak_flops: float) -> float:
    """The fraction of all devices' peak that a step used: FLOPs / (step time * world size * peak FLOP/s).

    With the model's FLOPs (three times the forward's, attention included) this is the MFU of PaLM (arXiv:2204.02311,
    appendix B). With all FLOPs that the hardware executes, recomputed forwards included, it is the HFU.

    The peak is always that of products in `--dtype` (`peak_source` in config.json names it), so that MFU compares runs
    as tokens per second do. A run that multiplies in a narrower and faster type may therefore exceed 1.
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
