"""How fast the kernels of step 8 are, and how fast one GPU trains models, beside PyTorch, transformers and Liger."""

import dataclasses
import functools
import gc
import shutil
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from common.config import TrainConfig
from common.counts import count_flops
from common.launching.command_line import parse
from common.measure.gpu_time import seconds_of
from common.presets import HUGGINGFACE_NAMES
from step01_single_gpu.running.gpu_kernels import classify_kernels, longest_kernels
from step01_single_gpu.running.memory_meter import MemoryMeter
from step01_single_gpu.running.utilisation import peak_flops
from step08_5d.gpu_ladder import machine
from step08_5d.kernels.launching import HAS_TRITON
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import train_alone
from tests.gpu_check.rivals import rivals
from tests.gpu_check.test_node import TINY, kineto_events
from tests.harness.ranks import steps_of
from tests.mechanisms.step08.kernels.case import BOTH, Case, Maker
from tests.mechanisms.step08.kernels.cases import KERNELS
from tests.mechanisms.step08.kernels.compare import tuple_of

MATMUL = 8192  # rows and columns of the matrices that show what the tensor cores can do


@functools.cache
def ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU reaches at most: bytes per second of a large copy, FLOP/s of a bfloat16 product. A CPU: nothing."""
    if device.type == "cpu":
        return {}
    a, b = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {"GB/s": machine.copy_ceiling(), "TFLOP/s": 2 * MATMUL**3 / seconds_of(torch.matmul, a, b)}


# ---- kernels ---------------------------------------------------------------------------------------------------------

TARGET = 0.8  # of the speed of a copy, for what waits for memory alone
TIMED = [name for name, kernel in KERNELS.items() if kernel.timed]
NAMES = ["ours", "eager", "torch.compile", "Liger", "PyTorch"]
KERNEL_HEADER = ["kernel", "pass", "unit", "ours", "of the ceiling", *NAMES[1:], "target"]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is missing")
@on_devices(TIMED, quick=["swiglu", "cross_entropy", "grouped_matmul of gradients"])
def test_kernel(found, item):
    kernel, top = KERNELS[item], ceilings(found.device)
    case = kernel.case(Maker(torch.bfloat16, found.device), *(kernel.sizes[0] if found.quick else kernel.timed))
    for each in case.inputs if case.gradients else ():
        each.requires_grad_()
    for unit, speed in top.items():
        found.note(f"ceiling, {unit}{' in bfloat16' if 'FLOP' in unit else ''}", f"{speed / machine.UNITS[unit]:,.0f}")
    compiled = torch.compile(case.reference, dynamic=False)
    functions = {"ours": case.ours, "eager": case.reference, "torch.compile": compiled} | rivals(item, case)
    for which, work in case.work.items():
        speed, errors, cells = {}, {}, ["-"] * 7
        for name, function in functions.items():
            try:
                call = prepared(case, function, which)
                call()  # a CPU only tries it
                speed[name] = work / seconds_of(call) if top else 0.0
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
                found.note(f"{item}, {which}: {name}", errors[name])
        if top:
            numbers = [f"{speed[name] / machine.UNITS[case.unit]:,.0f}" if name in speed else "-" for name in NAMES]
            share, target = speed.get("ours", 0.0) / top[case.unit], "-"
            if case.unit == "GB/s":
                target = "reached" if share >= TARGET and speed["ours"] >= speed.get("Liger", 0.0) else "missed"
            cells = [numbers[0], f"{share:.0%}", *numbers[1:], target]
        found.row("work per second in bfloat16", KERNEL_HEADER, [item, which, case.unit, *cells])
        assert "ours" not in errors, errors["ours"]


def prepared(case: Case, function: Callable, which: str) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A forward, a backward, or both."""

    def forward() -> tuple[torch.Tensor, ...]:
        return tuple_of(function(*case.inputs, *case.settings))

    def backward(outputs: tuple[torch.Tensor, ...], again: bool = False) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, case.inputs, gradients, retain_graph=again)

    if which not in ("backward", BOTH):
        return forward
    outputs = forward()
    gradients = [torch.ones_like(output) for output in outputs]  # here, or each call would also write them
    return lambda: backward(forward()) if which == BOTH else backward(outputs, again=True)


# ---- models ----------------------------------------------------------------------------------------------------------

STEPS, WARM = 10, 3  # the first ones compile; the last is profiled, for which the one before warms up
SEQ, SEQUENCES = 4096, 16  # tokens of a sequence; sequences of a step
PROFILED = ("fused", "fused, FP8 tiles")
OURS = {
    "eager": "--no-fused",
    "compiled": "--no-fused --compile",
    "fused": "--fused",
    "fused, attention too": "--fused --own-attention",
    "fused and full recomputation": "--fused --recompute full",
    "fused, FP8 tiles": "--fused --fp8 tile",
    "fused, FP8 rows": "--fused --fp8 row",
}
EAGER, COMPILED, LIGER = "transformers", "transformers compiled", "transformers with Liger"
MODELS = {  # sequences of a micro-batch, and the ways to train
    "2 x smollm-1.7b": (*OURS, EAGER, COMPILED),
    "1 x smollm-1.7b": ("fused",),  # sums are read and written once per micro-batch, and small products fill no GPU
    "4 x smollm-1.7b": ("fused",),
    "2 x llama3-1b": ("eager", "compiled", "fused", EAGER, COMPILED),
    "4 x smollm-360m": ("fused", COMPILED),
    "8 x smollm-135m": ("fused", COMPILED),
}
ITEMS = [f"{model}, {way}" for model, ways in MODELS.items() for way in ways]
ITEMS += ["2 x smollm-1.7b, " + LIGER, "2 x llama3-1b, " + LIGER]  # last, since it changes transformers
LIKE_EAGER, LIKE_EAGER_IN_FP8 = (
    1e-2,
    5e-2,
)  # relative difference of the losses in bfloat16; e4m3 has 4 bits fewer of mantissa
MODEL_HEADER = ["model", "how", "ms per step", "tokens/s", "MFU", "MFU, measured peak", "HFU", "peak GiB"]


@on_devices(ITEMS, quick=[f"2 x smollm-1.7b, {way}" for way in ("eager", "compiled", "fused", EAGER)])
def test_model(found, item):
    """Tokens/s, MFU, HFU and peak memory of a model; and losses like those of the eager one."""
    model, _, way = item.partition(", ")
    shape, (rows, name) = TINY.format(2, 1, 64), model.split(" x ")
    if not found.quick:
        shape = f"--model {name} --dtype bfloat16 --micro-batch {rows} --global-batch {SEQUENCES} --seq-len {SEQ}"
    gc.collect()  # models refer to themselves, through their hooks
    torch._dynamo.reset()
    if found.device.type == "cuda":
        torch.cuda.empty_cache()
    config = parse(8, shape.split())
    longer(config)
    train = train_ours if way in OURS else train_theirs
    seconds, memory = train(found, item, way, shape if way in OURS else config)
    tokens, flops = config.global_batch * config.seq_len, count_flops(config.model_config, config.seq_len)
    used, top = ["-"] * 3, ceilings(found.device).get("TFLOP/s")
    if top:
        vendor, source = peak_flops(found.device, torch.bfloat16)
        executed = flops.hardware("full" if "recomputation" in way else "none")
        pairs = (flops.model, vendor), (flops.model, top), (executed, vendor)
        used = [f"{each * config.global_batch / seconds / peak:.1%}" for each, peak in pairs]
        found.note("the peak of MFU and HFU", f"{vendor / 1e12:,.0f} TFLOP/s ({source}); measured {top / 1e12:,.0f}")
    cells = [f"{1e3 * seconds:.1f}", f"{tokens / seconds:,.0f}", *used, f"{memory / 2**30:.1f}" if memory else "-"]
    found.row(f"models, {config.seq_len} tokens per sequence", MODEL_HEADER, [model, way, *cells])
    eager, losses = ([line["loss"] for line in steps_of(found.folder / f"{model}, {each}")] for each in ("eager", way))
    if eager and way in OURS:
        assert losses == pytest.approx(eager, rel=LIKE_EAGER_IN_FP8 if "FP8" in way else LIKE_EAGER)


def longer(config: TrainConfig) -> None:
    """Let sequences be as long as the flags say, however many positions the preset has."""
    config.model_config = dataclasses.replace(config.model_config, max_positions=config.seq_len)


def train_ours(found: Findings, name: str, way: str, shape: str) -> tuple[float, int | None]:
    """Train with step 8. Returns the median seconds of a step, and the peak bytes."""
    flags = f"{shape} {OURS[way]} --data synthetic --warmup 2 --steps {STEPS}"
    if profiled := (way in PROFILED and not found.quick):
        flags += f" --trace {STEPS - 1}:{STEPS - 1} --profile"
    torch._dynamo.utils.counters.clear()
    lines = train_alone(found, name, 8, flags, change=longer)
    if way == "compiled":
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert 4 <= graphs <= 8, f"four functions, each for few shapes, are {graphs} graphs"
    if profiled:
        note_kernels(found, name)
    seconds = statistics.median(line["step_time_s"] for line in lines[WARM : STEPS - 2])
    return seconds, lines[WARM]["peak_memory_bytes"]


def note_kernels(found: Findings, name: str) -> None:
    """Write down where a profiled step's time goes, and delete the profile, which is large."""
    events = kineto_events(found, name)
    times = {kind: f"{1e3 * seconds:.2f}" for kind, seconds in classify_kernels(events).items()}
    found.row("where a profiled step's time goes, in ms", ["model and way", *times], [name, *times.values()])
    cells = [[f"{1e3 * seconds:.2f}", str(calls), kernel[:90]] for kernel, calls, seconds in longest_kernels(events)]
    found.note(f"{name}: the longest kernels of a step", [["ms", "calls", "kernel"], *cells])
    shutil.rmtree(found.folder / name / "profile")


def train_theirs(found: Findings, name: str, way: str, config: TrainConfig) -> tuple[float, int | None]:
    """The same with Llama of transformers, whose moments are bfloat16, in a plain loop."""
    transformers = pytest.importorskip("transformers")
    if way == LIGER:
        pytest.importorskip("liger_kernel.transformers").apply_liger_kernel_to_llama()
    shape = {theirs: getattr(config.model_config, ours) for ours, theirs in HUGGINGFACE_NAMES.items()}
    llama = transformers.LlamaConfig(**shape, attn_implementation="sdpa", use_cache=False)
    with found.device:
        model = transformers.LlamaForCausalLM(llama)
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
            assert norm.isfinite()  # waits for the device
            if found.device.type == "cuda":
                torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:]), memory.peak_bytes
