"""What one rank does in a step of step 5's real train(), seen from outside."""

import weakref
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import torch

import step05_pipeline.train as step05
from common import collectives
from common.config import TrainConfig
from common.measure.storages import live_bytes
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from step05_pipeline import pipeline as executor
from step05_pipeline.pipeline import Pipeline
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
    in_flight, stores: peaks of the number of graphs whose tensors autograd still keeps, and of stores with a tensor.
    claimed: `peak_in_flight` of the pipeline.
    communicators: by group, the name of what torch made for the messages between stages.
    outputs: peak of the number of outputs that were sent in a direction, and not freed when the next one was.
    """

    actions: list[tuple[str, int, int]] = field(default_factory=list)
    phases: list[tuple[str, str]] = field(default_factory=list)
    calls: list[collectives.Call] = field(default_factory=list)
    communicators: dict[str, str] = field(default_factory=dict)
    in_flight: int = 0
    stores: int = 0
    claimed: int = 0
    outputs: int = 0
    left: int = 0  # bytes of everything sent, and of everything deferred, that were not free when all actions were done
    weights: tuple[int, int] = (0, 0)  # bytes behind the parameters: when all actions were done, when the step was
    on_wire: int | None = None  # bytes that the actions and messages of the step sent, as the kernel counts

    def of(self, op: str, *groups: str) -> list[collectives.Call]:
        return [call for call in self.calls if call.op == op and call.group in groups]


class _Kept:
    """What autograd keeps instead of a tensor: it lives as long as the graph needs the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Watch:
    """Watches a run on this rank; `observe` puts its methods around those of train().

    What it says at the end is of the last step: whatever a step has to reset was reset.
    """

    def __init__(self, mesh: Mesh):
        self.mesh, self.watched, self.marks, self.calls = mesh, None, 0, []
        self.action, self.inside = None, False
        self.begin()

    def begin(self) -> None:
        self.seen, self.first_call = Observation(), len(self.calls)
        self.kept = defaultdict(weakref.WeakSet)  # by (micro-batch, chunk)
        self.stores = []  # weak references to the tensors of each
        self.sent = defaultdict(list)  # storages, by group

    def mark(self) -> Mark:
        self.marks += 1
        return Mark(len(self.seen.actions), self.marks, self.inside)

    # ---- what graphs and stores keep ----

    def attach(self, pipeline: Pipeline) -> None:
        for chunk, stage in enumerate(pipeline.stages):
            for layer in stage.layers.values():  # of what a graph keeps, that of one operation: no weights are in it
                layer.attention.core = self.keeping(layer.attention.core, chunk)

    def keeping(self, core, chunk: int):
        def keep(tensor: torch.Tensor) -> _Kept:
            kept = _Kept(tensor)
            self.kept[self.action.micro_batch, chunk].add(kept)
            self.seen.in_flight = max(self.seen.in_flight, sum(map(bool, self.kept.values())))
            return kept

        def forward(*inputs):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
                return core(*inputs)

        return forward

    @contextmanager
    def defer(self, real, weights):
        with real(weights) as store:
            yield store
        self.stores.append([weakref.ref(tensor) for _, *tensors, _ in store for tensor in tensors])
        self.seen.stores = max(self.seen.stores, sum(_living_bytes(each) > 0 for each in self.stores))

    # ---- the trace, the messages, the step ----

    def act(self, real, pipeline, action):
        self.action = action
        return real(pipeline, action)

    @contextmanager
    def phase(self, real, tracer, name, **arguments):
        self.seen.phases.append((name, arguments.get("action", "")))
        if "action" in arguments:
            self.seen.actions.append((self.action.kind, self.action.micro_batch, self.action.chunk))
        with real(tracer, name, **arguments):
            self.inside = "action" in arguments
            yield
            self.inside = False

    def send(self, real, tensor, peer, group, **named):
        sent = self.sent[group.name]
        self.seen.outputs = max(self.seen.outputs, sum(each.nbytes() > 0 for each in sent))
        sent.append(tensor.untyped_storage())
        return real(tensor, peer, group, **named)

    def run(self, real, pipeline: Pipeline, *rest):
        if pipeline is not self.watched:
            self.watched = pipeline
            self.attach(pipeline)
        self.begin()
        before = sent_so_far(self.mesh)
        loss = real(pipeline, *rest)
        self.seen.on_wire = None if before is None else sent_so_far(self.mesh) - before
        sent = sum(each.nbytes() for several in self.sent.values() for each in several)
        self.seen.left = sent + sum(map(_living_bytes, self.stores))
        self.seen.claimed = pipeline.step.peak_in_flight
        groups = {f"pp_{each}": pipeline._group(each) for each in ("forward", "backward")}
        self.seen.communicators = {name: group.handle.group_name for name, group in groups.items()}
        return loss

    def finish(self, real, pipeline: Pipeline):
        parameters = [parameter for stage in pipeline.stages for parameter in stage.parameters()]
        before, gradients = live_bytes(parameters), real(pipeline)
        self.seen.weights = before, live_bytes(parameters)
        return gradients


def _living_bytes(references: list[weakref.ref]) -> int:
    return sum(tensor.nbytes for reference in references if (tensor := reference()) is not None)


def _calling(function, real):
    """What stands for `real`: `function(real, *its arguments)`."""
    return lambda *args, **named: function(real, *args, **named)


def prepare(flags: str, world: int | None = None) -> TrainConfig:
    """The configuration of `BASE` and `flags`."""
    return configure(5, f"{BASE} {flags}", world)


def observe(flags: str) -> Observation:
    """Train on this rank and watch the last step."""
    config = prepare(flags)
    watch = Watch(mesh_of(config))
    watched = [(Pipeline, "run", watch.run), (Pipeline, "finish", watch.finish), (Pipeline, "_act", watch.act)]
    watched += [(executor, "defer_weight_gradients", watch.defer), (Tracer, "phase", watch.phase)]
    watched += [(collectives, "send", watch.send)]
    with ExitStack() as stack:
        for owner, name, function in watched:
            stack.enter_context(mock.patch.object(owner, name, _calling(function, getattr(owner, name))))
        watch.calls = stack.enter_context(collectives.record(watch.mark))
        step05.train(config, watch.mesh)
    watch.seen.calls = watch.calls[watch.first_call :]
    return watch.seen
