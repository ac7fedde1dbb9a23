"""What one rank does in a step of step 5's real train_step, seen from outside."""

import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch

import step05_pipeline.train as step05
from common import collectives
from common.config import TrainConfig
from common.experiments.training_step import Training
from common.measure.storages import live_bytes
from common.tracing.tracer import Tracer
from step05_pipeline import pipeline as executor
from tests.harness.observing import configure, mesh_of, sent_so_far

BASE = "--layers 8 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu"
BASE += " --global-batch 8 --micro-batch 1 --steps 2 --no-tie-embeddings --peak-tflops 1"


class Mark(NamedTuple):
    """A moment: actions begun before it, its place among all moments, whether the trace is within an action."""

    actions: int
    number: int
    inside: bool


@dataclass
class Observation:
    """One step of one rank.

    actions: (kind, micro-batch, chunk) as they ran; parity shows that each is what it says.
    phases: (name, action) of all phases of the trace.
    reads: the actions that have read tokens and targets.
    in_flight, stores: peaks of the number of graphs whose tensors autograd still keeps, and of stores with a tensor.
    claimed: `peak_in_flight` of the pipeline.
    communicators: by group, the name of what torch made for the messages between stages.
    outputs: peak of the number of outputs that were sent in a direction, and not freed when the next one was.
    """

    actions: list[tuple[str, int, int]] = field(default_factory=list)
    phases: list[tuple[str, str]] = field(default_factory=list)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    calls: list[collectives.Call] = field(default_factory=list)
    communicators: dict[str, str] = field(default_factory=dict)
    in_flight: int = 0
    stores: int = 0
    claimed: int = 0
    outputs: int = 0
    left: int = 0  # bytes of everything sent, and of everything deferred, that were not free when all actions were done
    weights: tuple[int, ...] = ()  # bytes behind the parameters: when all actions were done, when the step was
    on_wire: int | None = None  # bytes that the step sent, as the kernel counts

    def of(self, op: str, *groups: str) -> list[collectives.Call]:
        return [call for call in self.calls if call.op == op and call.group in groups]


class _Kept:
    """What autograd keeps instead of a tensor: it lives as long as the graph needs the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Watch:
    """Watches the steps of a run on this rank; it is their tracer. What it says at the end is of the last one."""

    def __init__(self, run: Training):
        self.run, self.pipeline, self.tracer = run, run.parts[0], Tracer(None, run.mesh, None)
        self.marks, self.micro_batch, self.inside = 0, None, False
        run.batches.micro_batch = partial(self.read, run.batches.micro_batch)
        for chunk, stage in enumerate(self.pipeline.stages):
            for layer in stage.layers.values():  # of what a graph keeps, that of one operation: no weights are in it
                layer.attention.core = self.keeping(layer.attention.core, chunk)

    def step(self, number: int) -> Observation:
        self.seen, self.kept = Observation(), defaultdict(weakref.WeakSet)  # by (micro-batch, chunk)
        self.stores, self.sent = [], defaultdict(list)  # weak references to the tensors of each; storages, by group
        seen, before = self.seen, sent_so_far(self.run.mesh)
        with collectives.record(self.mark) as seen.calls:
            self.run.take(number, self)
        seen.on_wire = None if before is None else sent_so_far(self.run.mesh) - before
        seen.weights += (live_bytes(self.parameters()),)
        seen.claimed = self.pipeline.step.peak_in_flight
        groups = self.pipeline.groups.items()
        seen.communicators = {f"pp_{direction}": group.handle.group_name for direction, group in groups}
        return seen

    def read(self, real, *arguments) -> tuple[torch.Tensor, ...]:
        self.seen.reads.append(self.seen.actions[-1])
        return real(*arguments)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for stage in self.pipeline.stages for parameter in stage.parameters()]

    def mark(self) -> Mark:
        self.marks += 1
        return Mark(len(self.seen.actions), self.marks, self.inside)

    @contextmanager
    def phase(self, name: str, action: str = ""):
        self.seen.phases.append((name, action))
        if action:
            micro_batch, _, chunk = action[1:].partition(".")
            self.micro_batch = int(micro_batch)
            self.seen.actions.append((action[0], self.micro_batch, int(chunk or 0)))
        elif name == "optimizer":  # all actions are done
            sent = sum(each.nbytes() for several in self.sent.values() for each in several)
            self.seen.left = sent + sum(map(_living_bytes, self.stores))
            self.seen.weights = (live_bytes(self.parameters()),)
        with self.tracer.phase(name, action=action):
            self.inside = bool(action)
            yield
            self.inside = False

    def keeping(self, core, chunk: int):
        def keep(tensor: torch.Tensor) -> _Kept:
            kept = _Kept(tensor)
            self.kept[self.micro_batch, chunk].add(kept)
            self.seen.in_flight = max(self.seen.in_flight, sum(map(bool, self.kept.values())))
            return kept

        def forward(*inputs):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
                return core(*inputs)

        return forward

    @contextmanager
    def defer(self, weights, real=executor.defer_weight_gradients):
        with real(weights) as store:
            yield store
        self.stores.append([weakref.ref(tensor) for _, *tensors, _ in store for tensor in tensors])
        self.seen.stores = max(self.seen.stores, sum(_living_bytes(each) > 0 for each in self.stores))

    def send(self, tensor, peer, group, real=collectives.send, **named):
        sent = self.sent[group.name]
        self.seen.outputs = max(self.seen.outputs, sum(each.nbytes() > 0 for each in sent))
        sent.append(tensor.untyped_storage())
        return real(tensor, peer, group, **named)


def _living_bytes(references: list[weakref.ref]) -> int:
    return sum(tensor.nbytes for reference in references if (tensor := reference()) is not None)


def prepare(flags: str, world: int | None = None) -> TrainConfig:
    """The configuration of `BASE` and `flags`."""
    return configure(5, f"{BASE} {flags}", world)


def observe(flags: str) -> Observation:
    """Take the steps of these flags on this rank and watch them. Whatever the last one had to reset was reset."""
    config = prepare(flags)
    watch = Watch(Training(step05, config, mesh_of(config)))
    deferring = mock.patch.object(executor, "defer_weight_gradients", watch.defer)
    with deferring, mock.patch.object(collectives, "send", watch.send):
        return [watch.step(number) for number in range(config.steps)][-1]
