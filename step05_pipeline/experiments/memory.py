"""What a rank keeps: activations of the micro-batches in flight, and parameters of its stages."""

import gc
from collections import Counter
from contextlib import contextmanager

import torch

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import Training, checked, on_every_case
from common.model_config import ModelConfig
from common.presets import PRESETS
from common.process_groups import Mesh
from step01_single_gpu.running.memory_meter import MemoryMeter
from step05_pipeline import cost, train
from step05_pipeline.config import schedule_of
from step05_pipeline.experiments.cluster import PUBLISHED_8B
from step05_pipeline.experiments.tools import ORDER, SHAPE, pipeline_of
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate
from step05_pipeline.stages import split_layers

TAUGHT = {"afab": "AFAB", "1f1b": "1F1B", "interleaved": "interleaved", "zb-h1": "ZB-H1"}  # in the lesson


def activations(quick: bool) -> None:
    """Peak bytes that a rank keeps for backwards and weight gradients: micro-batches in flight, times one of them."""
    ranks, micro_batches = (2, 4) if quick else (4, 8)
    shape = SHAPE | {"layers": 2 * ranks, "seq_len": 128, "global_batch": micro_batches}
    flags = [shape | {"pp": ranks, "dp": 1, "schedule": name} for name in ORDER]
    found = on_ranks(ranks, on_every_case, keep, flags, title="activations", jobs=len(flags))
    one = on_ranks(1, on_every_case, keep, [shape | {"schedule": "1f1b"}])[0][0]["kept"]
    model, size = TrainConfig(**shape).model_config, (shape["micro_batch"], shape["seq_len"], torch.float32)
    whole = cost.stage_activations(model, 0, model.layers, *size)
    rows = [("one rank", "1", *compared(whole, one))]
    figures = {}
    for index, (name, case) in enumerate(zip(ORDER, flags)):
        schedule = schedule_of(TrainConfig(**case))
        stages = split_layers(model, schedule.stages, shape["seq_len"])
        kept = [cost.stage_activations(model, *each, *size) for each in stages]
        stored = [cost.stage_store(model, *each, *size) for each in stages]
        in_flight = simulate(schedule).in_flight
        measured = [found[rank][index]["kept"] for rank in range(ranks)]
        alive = [found[rank][index]["alive"] for rank in range(ranks)]
        expected = [cost.peak_kept(schedule, rank, kept, stored) for rank in range(ranks)]
        if alive != in_flight:
            raise AssertionError(f"{name}: {alive} micro-batches were in flight, not {in_flight}")
        for rank in range(ranks):
            rows.append((f"{name}, rank {rank}", in_flight[rank], *compared(expected[rank], measured[rank])))
        figures[name] = [each / whole for each in measured]
    header = ("", "in flight", "predicted", "measured", "ratio")
    print_table(f"{ranks} ranks, {micro_batches} micro-batches: peak bytes kept for the backward", header, rows)
    cells = []
    for index, name in enumerate(ORDER):
        peaks = [found[rank][index]["allocated"] for rank in range(ranks)]
        cells.append((name, *(f"{each:,}" for each in peaks), f"{max(figures[name]):.2f}"))
    header = ("", *(f"rank {rank}" for rank in range(ranks)), "fullest, kept / one rank's")
    print_table("peak of the allocator in a step: activations, gradients, messages, temporaries, bytes", header, cells)
    draw_tradeoff(figures, ranks, micro_batches)


def keep(mesh: Mesh, flags: dict) -> dict[str, int]:
    """On a rank, of one step: peak bytes kept for the backward, micro-batches in flight, the allocator's peak."""
    watcher = Watcher()
    run = Training(train, *checked(mesh, **flags))
    watcher.of(run.parts[0])
    with watcher.hooks():
        run.gradients(tracer=watcher)
    alive = run.parts[0].step.peak_in_flight
    run = Training(train, *checked(mesh, **flags))  # once more without hooks, which keep things longer
    gc.collect()  # what the first one leaves is not to be freed in the region
    with MemoryMeter("cpu").measure() as measured:
        run.gradients()
    return {"kept": watcher.peak, "alive": alive, "allocated": measured.peak_bytes}


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    __slots__ = ("_watcher", "tensor")

    def __init__(self, watcher: "Watcher", tensor: torch.Tensor):
        self._watcher, self.tensor = watcher, tensor
        watcher.saved[_place(tensor)] += 1

    def __del__(self):
        place = _place(self.tensor)
        self._watcher.saved[place] -= 1
        if not self._watcher.saved[place]:
            del self._watcher.saved[place]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Watcher:
    """In the place of the pipeline's tracer: after each action it adds up the storages that are kept for a backward.

    Kept is what autograd has saved, and what lies between I and W, each storage once, parameters not at all.
    """

    def __init__(self):
        self.peak, self.saved, self._pipeline, self._parameters = 0, Counter(), None, set()

    def of(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._parameters = {_place(parameter) for stage in pipeline.stages for parameter in stage.parameters()}

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor)

    @contextmanager
    def phase(self, name: str, **arguments):
        yield
        if self._pipeline:
            stores = self._pipeline.step.deferred.values()
            stored = {_place(tensor) for store in stores for _, *tensors, _ in store for tensor in tensors}
            self.peak = max(self.peak, sum(size for _, size in (self.saved.keys() | stored) - self._parameters))


def draw_tradeoff(shares: dict[str, list[float]], ranks: int, micro_batches: int) -> None:
    """A dot for each schedule of the lesson: what its fullest rank keeps, and how long its ranks wait."""
    figure, axis = new_figure(width=7.4, height=4.2)
    for name, label in TAUGHT.items():
        schedule, costs = pipeline_of(name, ranks, micro_batches)
        kept, bubble = max(shares[name]), simulate(schedule, costs).bubble
        axis.plot(kept, bubble, "o", color=COLOURS["measured"], markersize=11)
        font = {"fontsize": 13, "fontweight": "bold"}
        label = f"{label}: {kept:.2f}"
        axis.annotate(label, (kept, bubble), xytext=(9, -4), textcoords="offset points", **font)
    arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 2}
    axis.annotate("", (1.72, 5.5), (1.95, 6.7), arrowprops=arrow)
    axis.text(1.97, 6.7, "better", fontsize=12, va="center")
    axis.set(xlim=(0.8, 2.6), ylim=(0, 10.5), ylabel="bubble, in units (a rank works for 24)")
    axis.set_xlabel("kept by the fullest rank, in micro-batches of the whole model", fontsize=11)
    axis.yaxis.label.set_fontsize(11)
    save_figure(figure, "tradeoff")


# ---- parameters, and who gets how many layers ------------------------------------------------------------------------


def balance(quick: bool) -> None:
    """PREDICTED: layers, parameters and work of each stage of Llama 3, with and without counting the head."""
    for name, ranks in (("llama3-8b", 8), ("llama3-1b", 4), ("llama3-70b", 16)):
        model, seq, m = PRESETS[name], 8192, 4 * ranks
        head = head_in_layers(model, seq)
        even = [(model.layers * i // ranks, model.layers * (i + 1) // ranks) for i in range(ranks)]
        rows = []
        for label, stages in (("as many layers each", even), ("head counted", split_layers(model, ranks, seq))):
            work = [last - first for first, last in stages]
            work[-1] += head
            line = simulate(build_schedule("1f1b", ranks, m), Costs(F=1, I=1, W=1, stages=tuple(work)))
            layers = " ".join(str(last - first) for first, last in stages)
            worst = max(cost.stage_parameters(model, *each) for each in stages) * 2 / 2**30
            slowest = max(work) * ranks / sum(work)
            cells = (layers, f"{work[-1]:.2f}", f"{slowest:.3f}", f"{line.efficiency:.1%}", f"{worst:.2f}")
            rows.append((label, *cells))
        ideal = simulate(build_schedule("1f1b", ranks, m)).efficiency
        rows.append(("equal stages, if there were", "", "", "1.000", f"{ideal:.1%}", ""))
        header = ("", "layers", "work of the last", "slowest / mean", "efficiency, 1f1b", "GiB of the fullest")
        title = f"predicted: {name}, pp {ranks}, {seq:,} tokens, {m} micro-batches; the head is worth {head:.2f} layers"
        print_table(title, header, rows)
    model, (whole, worst) = PRESETS["llama3-8b"], PUBLISHED_8B.values()
    rows = []
    for label, published, first, last in (("one GPU", whole, 0, 32), ("pp 8, stage 0 of 4 layers", worst, 0, 4)):
        size = 2 * cost.stage_parameters(model, first, last) / 2**30
        rows.append((label, f"{published:.2f}", f"{size:.2f}"))
    rows.append(("an eighth of all", "", f"{2 * count_parameters(model).total / 2**30 / 8:.2f}"))
    print_table("GiB of parameters", ("llama3-8b, bfloat16", "published", "predicted"), rows)


def head_in_layers(model: ModelConfig, seq: int) -> float:
    """The head's FLOPs in layers."""
    flops = count_flops(model, seq)
    return flops.head * model.layers / (flops.linear + flops.attention_core)
