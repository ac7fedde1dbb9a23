"""How fast one GPU trains models of 0.1 to 1.7 billion parameters: with step 8, and with transformers."""

import dataclasses
import gc
import importlib.util
import statistics
import time

import torch

from common.config import TrainConfig
from common.counts import count_flops
from common.launching.command_line import parse
from common.presets import HUGGINGFACE_NAMES
from step01_single_gpu.memory_meter import MemoryMeter
from step01_single_gpu.recording.utilisation import peak_flops
from tests.gpu_check.findings import Findings
from tests.gpu_check.launching import train_alone
from tests.gpu_check.profiles import TINY, note_kernels
from tests.gpu_check.rows import measure_rows
from tests.gpu_check.timing import ceilings
from tests.harness.ranks import steps_of

SEQ, STEPS, WARM = 4096, 10, 3  # steps: the first ones compile; the last is profiled, for which the one before warms up
MICRO_BATCHES = 8  # of a step
MODELS = {"smollm-1.7b": 1, "llama3-1b": 1, "smollm-360m": 2, "smollm-135m": 4}  # sequences of a micro-batch
OURS = {
    "eager": "--no-fused",
    "compiled": "--no-fused --compile",
    "fused": "--fused",
    "fused, attention too": "--fused --own-attention",
    "fused and full recomputation": "--fused --recompute full",
}
EAGER, COMPILED, LIGER = "transformers", "transformers compiled", "transformers with Liger"
TARGET = 0.55  # MFU of the first model with step 8's kernels, of the vendor's peak
LIKE_EAGER = 1e-2  # relative difference of the losses in bfloat16
TIME = 150  # seconds for a row
TABLE = "models"
HEADER = ["model", "how", "ms per step", "tokens/s", "MFU", "MFU, measured peak", "HFU", "peak GiB"]


def models(found: Findings) -> None:
    """Tokens/s, MFU, HFU and peak memory of four models: step 8 eager, compiled and fused, and transformers."""
    ways, there = list(OURS), [importlib.util.find_spec(name) for name in ("transformers", "liger_kernel")]
    ways += [EAGER, COMPILED] if there[0] else []
    names = [f"{model}, {way}" for model in MODELS for way in ways]
    if all(there):  # last: it changes transformers, and a row that fails starts a new process
        names += [f"{model}, {LIGER}" for model in MODELS]
    else:
        found.note("rows that are left out", "transformers or Liger Kernel is not installed")
    if found.quick:
        names = [f"{next(iter(MODELS))}, {way}" for way in ("eager", "compiled", "fused", EAGER) if way in ways]
    measure_rows(found, __name__, names, TIME)
    for model in MODELS:
        losses = {way: [line["loss"] for line in steps_of(found.folder / f"{model}, {way}")] for way in OURS}
        for way, curve in losses.items():
            if way != "eager" and curve and losses["eager"]:
                worst = max(abs(ours / eager - 1) for ours, eager in zip(curve, losses["eager"]))
                found.check(f"{model}: {way} as eager within {LIKE_EAGER:g}", worst < LIKE_EAGER, f"{worst:.1e}")
    table = next((line["value"] for line in found.lines if line["what"].startswith(TABLE)), [])
    times = {tuple(row[:2]): row[2] for row in table}
    for model in MODELS:
        theirs, ours = (times.get((model, way)) for way in ("fused", "fused, attention too"))
        if theirs and ours:
            found.note(f"{model}: ms per step by attention", f"PyTorch's, the default, {theirs}; ours {ours}")


def measure(found: Findings, name: str) -> None:
    """Train one model in one way, and add its row."""
    model, _, way = name.partition(", ")
    shape = TINY.format(2, 1, 64)
    if not found.quick:
        rows = MODELS[model]
        shape = f"--model {model} --dtype bfloat16 --micro-batch {rows} --global-batch {rows * MICRO_BATCHES}"
        shape += f" --seq-len {SEQ}"
    gc.collect()  # models refer to themselves, through their hooks
    torch._dynamo.reset()
    if found.device.type == "cuda":
        torch.cuda.empty_cache()
    config = parse(8, shape.split())
    longer(config)
    train = train_ours if way in OURS else train_theirs
    seconds, peak = train(found, name, way, shape if way in OURS else config)
    tokens, top = config.global_batch * config.seq_len, ceilings(found.device).get("TFLOP/s")
    used, flops = ["-"] * 3, count_flops(config.model_config, config.seq_len)
    if top:
        vendor, source = peak_flops(found.device, torch.bfloat16)
        executed = flops.hardware("full" if "recomputation" in way else "none")
        done = [each * config.global_batch / seconds for each in (flops.model, flops.model, executed)]
        shares = [each / peak for each, peak in zip(done, (vendor, top, vendor), strict=True)]
        used = [f"{each:.1%}" for each in shares]
        found.note("the peak of MFU and HFU", f"{vendor / 1e12:,.0f} TFLOP/s ({source}); measured {top / 1e12:,.0f}")
        if (model, way) == (next(iter(MODELS)), "fused"):
            reached = "reached" if shares[0] >= TARGET else "missed"
            found.note(f"at least {TARGET:.0%} MFU for {name}", f"{reached}, {shares[0]:.1%}")
    cells = [f"{1e3 * seconds:.1f}", f"{tokens / seconds:,.0f}", *used, f"{peak / 2**30:.1f}" if peak else "-"]
    found.row(f"{TABLE}, {config.seq_len} tokens per sequence", HEADER, [model, way, *cells])


def longer(config: TrainConfig) -> None:
    """Let sequences be as long as the flags say, however many positions the preset has."""
    config.model_config = dataclasses.replace(config.model_config, max_positions=config.seq_len)


def train_ours(found: Findings, name: str, way: str, shape: str) -> tuple[float, int | None]:
    """Train with step 8. Returns the median seconds of a step, and the peak bytes."""
    flags = f"{shape} {OURS[way]} --data synthetic --warmup 2 --steps {STEPS} --trace {STEPS - 1}:{STEPS - 1} --profile"
    torch._dynamo.utils.counters.clear()
    lines = train_alone(found, name, 8, flags, change=longer)
    if way == "compiled":
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.check(f"{name}: four functions, each for few shapes", 4 <= graphs <= 8, f"{graphs} graphs")
    seconds = statistics.median(line["step_time_s"] for line in lines[WARM : STEPS - 2])
    if name.startswith(next(iter(MODELS))):
        note_kernels(found, name, seconds)
    return seconds, lines[WARM]["peak_memory_bytes"]


def train_theirs(found: Findings, name: str, way: str, config: TrainConfig) -> tuple[float, int | None]:
    """Train Llama of transformers in a plain loop: weights, gradients and moments in bfloat16, unlike ours.

    Returns the median seconds of a step, and the peak bytes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if way == LIGER:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    shape = {theirs: getattr(config.model_config, ours) for ours, theirs in HUGGINGFACE_NAMES.items()}
    with found.device:
        model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa", use_cache=False))
        tokens = torch.randint(config.model_config.vocab, (config.micro_batch, config.seq_len))
    model = model.to(config.torch_dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if way == COMPILED else model
    count, times, meter = config.global_batch // config.micro_batch, [], MemoryMeter(found.device, on_cpu=False)
    for _ in range(STEPS - 1):
        start = time.perf_counter()
        with meter.measure() as memory:
            for _ in range(count):
                (run(input_ids=tokens, labels=tokens).loss / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            norm.item()  # waits for the device
            if found.device.type == "cuda":
                torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    found.check(f"{name}: finite gradients", bool(norm.isfinite()), f"norm {norm.item():.3g}")
    return statistics.median(times[WARM:]), memory.peak_bytes
