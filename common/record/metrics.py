"""The record of a run: `config.json`, `metrics.jsonl`, the progress line and the utilisation of the hardware.

A training loop calls `begin_step()`, computes, and calls `end_step(step, loss=..., grad_norm=..., lr=...)`.
"""

import json
import math
import os
import platform
import re
import sys
import time
from pathlib import Path

import torch

KEYS = (
    *("step", "loss", "aux_loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "hfu"),
    *("peak_memory_bytes", "comm_bytes"),
)


# ---- the record --------------------------------------------------------------------------------------------


class StepLog:
    """Times the steps of a run and, on the writing rank, records and shows them.

    run_dir: receives `config.json` and `metrics.jsonl`; None: nothing is written.
    config: everything needed to repeat the run, with `corpus_sha256`; versions, world size and FLOPs are
        added here.
    writer: True on exactly one rank: the one that writes and prints. The others only time.
    total_steps, first_step: steps run over range(first_step, total_steps). A fresh run (first_step 0)
        replaces an old record; a resumed one first drops the lines of steps >= first_step and what a killed
        run left half written.
    tokens_per_step: target tokens of the global batch.
    model_flops_per_step, hardware_flops_per_step: of the global batch over all ranks, see `mfu` and `hfu`.
    peak_flops, peak_source: FLOP/s of ONE device, and where the number comes from, see `peak_flops`.
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        config: dict,
        *,
        writer: bool,
        total_steps: int,
        tokens_per_step: int,
        model_flops_per_step: float,
        hardware_flops_per_step: float,
        peak_flops: float,
        peak_source: str = "",
        world_size: int = 1,
        first_step: int = 0,
        device: torch.device | str = "cpu",
    ):
        self.writer, self.total_steps, self.tokens_per_step = writer, total_steps, tokens_per_step
        self.model_flops, self.hardware_flops = model_flops_per_step, hardware_flops_per_step
        self.peak_flops, self.world_size, self.device = peak_flops, world_size, torch.device(device)
        self._file = self._bar = None
        self._began = math.nan
        if writer and run_dir is not None:
            run_dir = Path(run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            added = {
                "world_size": world_size,
                "tokens_per_step": tokens_per_step,
                "model_flops_per_step": model_flops_per_step,
                "hardware_flops_per_step": hardware_flops_per_step,
                "peak_flops": peak_flops,
                "peak_source": peak_source,
                "torch_version": torch.__version__,
                "python_version": platform.python_version(),
            }
            text = json.dumps(_plain(config | added), indent=2, sort_keys=True, allow_nan=False)
            _replace(run_dir / "config.json", text + "\n")
            path = run_dir / "metrics.jsonl"
            _replace(path, "".join(_lines_before(path, first_step)))
            self._file = path.open("a", encoding="utf-8")
        if writer and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def begin_step(self) -> None:
        """Start the clock, on CUDA once what is still queued is done: the step pays for itself only."""
        self._synchronize()
        self._began = time.perf_counter()

    def end_step(
        self,
        step: int,
        *,
        loss: float | torch.Tensor,
        grad_norm: float | torch.Tensor | None,
        lr: float,
        aux_loss: float | torch.Tensor = 0.0,
        peak_memory_bytes: int | None = None,
        comm_bytes: dict[str, int] | None = None,
    ) -> dict:
        """Stop the clock (on CUDA once the device is done), record the step and return its record.

        All numbers are of the whole run, but `peak_memory_bytes` and `comm_bytes` (by group) are the writing
        rank's. `tokens` counts from step 0 up to and including this step.
        """
        self._synchronize()
        seconds = time.perf_counter() - self._began
        utilisation = (seconds, self.world_size, self.peak_flops)
        record = {
            "step": step,
            "loss": float(loss),
            "aux_loss": float(aux_loss),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": float(lr),
            "tokens": (step + 1) * self.tokens_per_step,
            "step_time_s": seconds,
            "tokens_per_s": self.tokens_per_step / seconds,
            "mfu": mfu(self.model_flops, *utilisation),
            "hfu": hfu(self.hardware_flops, *utilisation),
            "peak_memory_bytes": peak_memory_bytes,
            "comm_bytes": dict(comm_bytes or {}),
        }
        if self._file is not None:
            self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
            self._file.flush()  # a killed run keeps every step it finished
        if self.writer:
            self._show(record)
        return record

    def close(self) -> None:
        """Close the file and the progress bar."""
        if self._file is not None:
            self._file.close()
        if self._bar is not None:
            self._bar.close()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _show(self, record: dict) -> None:
        step, norm = record["step"], record["grad_norm"]
        text = f"loss {record['loss']:.4f}  grad norm {'-' if norm is None else f'{norm:.4f}'}"
        text += f"  {record['tokens_per_s']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif step % max(1, self.total_steps // 20) == 0 or step == self.total_steps - 1:
            print(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  {text}", flush=True)


def read_metrics(path: Path) -> tuple[list[dict], bool]:
    """The steps of a `metrics.jsonl`, and whether its last line is half written (by a run that was killed).

    Raises ValueError with the number of the first other line that is not a step.
    """
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if (record := _parse(line)) is None:
            raise ValueError(f"line {number} is not the record of a step: {line[:60]!r}")
        records.append(record)
    return records, rest != ""


def _lines_before(path: Path, first_step: int) -> list[str]:
    """The lines of an earlier run that a run resumed at `first_step` keeps, each with its newline."""
    if first_step == 0 or not path.exists():
        return []
    *lines, _half_written = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = []
    for line in lines:
        record = _parse(line)
        if record is None:
            print(f"{path}: dropped a line that is not the record of a step: {line[:60]!r}", file=sys.stderr)
        elif record["step"] < first_step:
            kept.append(line + "\n")
    return kept


def _parse(line: str) -> dict | None:
    """The record in `line`, with "nan", "inf" and "-inf" as floats again; None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {k: special.get(v, v) if isinstance(v, str) else v for k, v in record.items()}


def _plain(value):
    """`value` as JSON can hold it. JSON has neither NaN nor infinity: they become "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the new one, whenever the process is killed."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ---- utilisation -------------------------------------------------------------------------------------------


def mfu(model_flops_per_step: float, step_time_s: float, world_size: int, peak_flops: float) -> float:
    """Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B), a fraction:

        MFU = model FLOPs per step / (step time * world size * peak FLOP/s of a device)

    Model FLOPs are 3 * forward FLOPs of the global batch, counted exactly, attention included: where the
    forward computes one product the backward computes two, for the inputs and for the weights. Recomputation
    counts nothing.
    """
    return model_flops_per_step / (step_time_s * world_size * peak_flops)


def hfu(hardware_flops_per_step: float, step_time_s: float, world_size: int, peak_flops: float) -> float:
    """Hardware FLOPs utilisation, a fraction: the formula of `mfu` over all FLOPs that the hardware executes.

    Hardware FLOPs are the model FLOPs plus the forward FLOPs that activation recomputation repeats.
    """
    return hardware_flops_per_step / (step_time_s * world_size * peak_flops)


# TFLOP/s of one device as torch sees it, dense (vendors print twice that, "with sparsity"). float32 is the
# rate without TF32. float64 is the tensor-core rate where there is one: torch's matrix products use it. A
# type that is missing is measured. The first pattern found in `torch.cuda.get_device_name()` counts.
_HALF = ("bfloat16", "float16")
_GPUS = (
    # NVIDIA A100 Tensor Core GPU datasheet (SXM and PCIe have the same peaks)
    (r"\bA100\b", dict.fromkeys(_HALF, 312) | {"tf32": 156, "float32": 19.5, "float64": 19.5}),
    # NVIDIA H100 Tensor Core GPU datasheet: columns PCIe, NVL, SXM
    (r"\bH100 PCIe\b", dict.fromkeys(_HALF, 756) | {"tf32": 378, "float32": 51, "float64": 51}),
    (r"\bH100 NVL\b", dict.fromkeys(_HALF, 835) | {"tf32": 417, "float32": 60, "float64": 60}),
    (r"\bH100\b", dict.fromkeys(_HALF, 989) | {"tf32": 494, "float32": 67, "float64": 67}),
    # NVIDIA H200 Tensor Core GPU datasheet: columns NVL, SXM
    (r"\bH200 NVL\b", dict.fromkeys(_HALF, 835) | {"tf32": 417, "float32": 60, "float64": 60}),
    (r"\bH200\b", dict.fromkeys(_HALF, 989) | {"tf32": 494, "float32": 67, "float64": 67}),
    # NVIDIA Blackwell datasheet, column HGX B200
    (r"(?<!G)\bB200\b", dict.fromkeys(_HALF, 2250) | {"tf32": 1100, "float32": 75, "float64": 37}),
    # NVIDIA L4, L40S and A10 datasheets
    (r"\bL4\b", dict.fromkeys(_HALF, 121) | {"tf32": 60, "float32": 30.3}),
    (r"\bL40S\b", dict.fromkeys(_HALF, 362) | {"tf32": 183, "float32": 91.6}),
    (r"\bA10\b", dict.fromkeys(_HALF, 125) | {"tf32": 62.5, "float32": 31.2}),
    # NVIDIA V100 datasheet: columns PCIe, SXM2, V100S; neither bfloat16 nor TF32
    (r"\bV100S\b", {"float16": 130, "float32": 16.4, "float64": 8.2}),
    (r"\bV100-PCIE\b", {"float16": 112, "float32": 14, "float64": 7}),
    (r"\bV100\b", {"float16": 125, "float32": 15.7, "float64": 7.8}),
    # NVIDIA Ampere GA102 and Ada GPU architecture whitepapers, tensor-core rates with float32 accumulation
    (r"\bRTX 3090\b(?! Ti)", dict.fromkeys(_HALF, 71) | {"tf32": 35.6, "float32": 35.6, "float64": 0.556}),
    (r"\bRTX 4090\b(?! D)", dict.fromkeys(_HALF, 165.2) | {"tf32": 82.6, "float32": 82.6, "float64": 1.29}),
    # AMD Instinct MI250X data sheet, matrix rates, halved: torch sees each of its two dies as a device
    (r"\bMI250X\b", dict.fromkeys(_HALF, 191.5) | {"float32": 47.85, "float64": 47.85}),
    # AMD Instinct MI300X data sheet
    (r"\bMI300X\b", dict.fromkeys(_HALF, 1307.4) | {"tf32": 653.7, "float32": 163.4, "float64": 163.4}),
)

_measured: dict[tuple, float] = {}


def peak_flops(
    device: torch.device | str, dtype: torch.dtype, override_tflops: float | None = None
) -> tuple[float, str]:
    """Peak FLOP/s of one device for matrix products in `dtype`, and where the number comes from.

    `override_tflops` (10^12 FLOP/s) wins; then the vendors' numbers. A CPU, an unknown GPU and a slice of one
    (MIG) are measured with matrix products (0.2 s, once a process, with the threads that torch has now). On
    CPUs that several ranks share, measure on all of them at the same time, or each will count the whole
    machine as its own.
    """
    device = torch.device(device)
    if override_tflops is not None:
        return override_tflops * 1e12, "given by --peak-tflops"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
            kind = "tf32"
        if (tflops := _vendor_tflops(name, kind)) is not None:
            return tflops * 1e12, f"{name}, {kind}: the vendor's number, dense"
    key = (str(device), kind, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _measure_matmul(device, dtype)
    return _measured[key], f"{name}, {kind}: measured, the fastest matrix product"


def _vendor_tflops(name: str, kind: str) -> float | None:
    """TFLOP/s from the table, or None."""
    if "MIG" in name:
        return None
    return next((table.get(kind) for pattern, table in _GPUS if re.search(pattern, name)), None)


def _measure_matmul(device: torch.device, dtype: torch.dtype, budget: float = 0.2) -> float:
    """FLOP/s of the fastest square matrix product in about `budget` seconds; sizes double while they fit."""

    def product(a: torch.Tensor, b: torch.Tensor) -> float:
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    largest = 8192 if device.type == "cuda" else 1024
    best, size, end = 0.0, 128, time.perf_counter() + budget
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = min(product(a, b) for _ in range(3))  # the first one also sets things up
        best = max(best, 2 * size**3 / seconds)
        if size == largest or time.perf_counter() + 32 * seconds > end:  # twice the size takes 8 times longer
            break
        size *= 2
    while time.perf_counter() + seconds < end:  # on a busy machine only a few of many tries run undisturbed
        seconds = product(a, b)
        best = max(best, 2 * size**3 / seconds)
    return best
