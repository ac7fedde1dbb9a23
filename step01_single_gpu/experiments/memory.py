"""What a step holds and when, and running out of it."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from step01_single_gpu.cost import states
from step01_single_gpu.experiments import memory_timeline as timeline
from step01_single_gpu.experiments.tools import HEADER, MIB, OneProcess
from step01_single_gpu.memory_model.peak import predict_peak


def first_steps(quick: bool) -> None:
    """Memory over time in the first two steps, of two micro-batches each, and the peaks of the first four."""
    shape = {"vocab": 4096, "hidden": 256, "layers": 6, "ffn": 768, "tie_embeddings": True}
    config = TrainConfig(**shape, seq_len=128 if quick else 256, micro_batch=4, global_batch=8)
    run = OneProcess(config)
    result = timeline.record(run, 2 if quick else 4)
    predicted, rows = [], []
    for step in range(len(result.steps)):
        arguments = (config.model_config, 4, config.seq_len, torch.float32)
        peak = predict_peak(*arguments, accumulation=2, first_step=step == 0).peak
        seconds, sizes = result.peak(step)
        where = next((name for name, start, end in result.phases if start <= seconds <= end), "between")
        parts = (f"{size / MIB:.1f}" for size in sizes)
        rows.append((f"step {step + 1}", *compared(peak, sum(sizes), ",.1f", MIB), where, *parts))
        predicted.append(peak)
    header = (*HEADER, "in", *timeline.CATEGORIES)
    count = sum(p.numel() for p in run.parameters)
    print_table(f"Peak of each step in MiB and what it consists of ({count:,} parameters)", header, rows)
    figure, axis = new_figure(width=8.6, height=4.6)
    timeline.draw(result, predicted, 2, axis)
    save_figure(figure, "first_steps")


def bytes_held(quick: bool) -> None:
    """Bytes per parameter when the last backward of a step has ended, counted on the tensors that there are."""
    rows = []
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        config = TrainConfig(hidden=64, layers=2, seq_len=16, dtype=dtype, micro_batch=1, global_batch=2)
        count, found = count_parameters(config.model_config).total, held_after_backward(OneProcess(config))
        largest = found.pop("gradients of autograd, at most")
        cells = [f"{size / count:.2f}" for size in found.values()]
        rows.append((dtype, *cells, f"{sum(found.values()) / count:.2f}", f"{largest / count:.2f}"))
    print_table("bytes per parameter", ("", *found, "sum", "gradients of autograd, at most"), rows)


def held_after_backward(run: OneProcess) -> dict[str, int]:
    """Bytes by kind when the last backward of the second step has ended, and what autograd's gradients take at most."""
    seen, found, most = set(), {}, 0
    accumulate = run.gradient_sums.accumulate

    def size_of(tensors) -> int:
        """Bytes of storages that have not been counted yet."""
        new = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        new = {address: size for address, size in new.items() if address not in seen}
        seen.update(new)
        return sum(new.values())

    def noted(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        nonlocal most
        others = [each.grad for each in run.parameters if each.grad is not None]
        most = max(most, sum(each.untyped_storage().nbytes() for each in (gradient, *others)))
        accumulate(parameter, gradient)

    @contextlib.contextmanager
    def phase(name: str):
        if name == "optimizer":
            found["parameters"] = size_of(run.parameters)
            found["gradients of autograd"] = size_of(each.grad for each in run.parameters if each.grad is not None)
            found["their sums"] = size_of(run.gradient_sums.sums.values())
            found["master weights"] = size_of(run.optimizer.masters)
            found["moments"] = size_of(t for state in run.optimizer.state.values() for t in state.values())
        yield

    run.step()
    run.gradient_sums.accumulate = noted
    run.step(SimpleNamespace(phase=phase))
    return found | {"gradients of autograd, at most": most}


def out_of_memory(quick: bool) -> None:
    """A process whose memory is limited passes its first step and dies in the second."""
    config = TrainConfig(hidden=512, layers=6, ffn=1536, micro_batch=4, global_batch=4)
    arguments = (config.model_config, 4, config.seq_len, torch.float32)
    first, second = (predict_peak(*arguments, first_step=each).peak for each in (True, False))
    held = states(config.model_config, torch.float32)
    limit = first + held["moments"] // 2
    print(f"\npredicted peak in MiB: first step {first / MIB:.0f}, second {second / MIB:.0f}, limit {limit / MIB:.0f}")
    if sys.platform != "linux":
        return print("  only Linux limits the memory of a process: nothing is measured here")
    ((survived, phase, message),) = on_ranks(1, starve, config, limit - held["parameters"])
    print(f"  {survived} step survived; in the {phase} of the next one: {message}")


def starve(mesh, done, config: TrainConfig, spare: int) -> tuple[int, str, str]:
    """In a process of its own: train with `spare` bytes besides what it has now. Returns how that ends."""
    OneProcess(
        TrainConfig(hidden=64, layers=1, micro_batch=4, global_batch=4)
    ).step()  # libraries load what they need once
    run, phases = OneProcess(config), []

    @contextlib.contextmanager
    def phase(name: str):
        phases.append(name)
        yield

    import resource  # Windows has none

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, resource.RLIM_INFINITY))
    for step in range(5):
        try:
            run.step(SimpleNamespace(phase=phase))
        except RuntimeError as error:
            return step, phases[-1], str(error).splitlines()[0]
    return 5, "", "it never ran out"
