"""What one rank does in a step of step 5's real train(), noted by watching it from outside: modules, the graph that
autograd keeps, what is put off, and the collectives.
"""

import weakref
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

import step05_pipeline.train as step05
from common import collectives, weight_gradients
from common.command_line import parse
from common.config import TrainConfig
from common.measure import tcp_bytes as wire
from common.process_groups import Degrees, build_mesh, environment
from common.record.run_record import RunRecord
from step05_pipeline.pipeline import Pipeline
from tests.mutants.patches import patched

STEPS = 2  # of which the last one is watched: whatever a step has to reset was reset
BASE = "--layers 8 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu"
BASE += f" --global-batch 8 --micro-batch 1 --steps {STEPS} --no-tie-embeddings --peak-tflops 1"


@dataclass
class Call:
    """One collective. `issue` and `wait`: how many actions had begun when it was issued, and when it was waited for."""

    op: str
    group: str
    elements: int
    bytes: int
    phase: str
    peer: int | None  # global rank
    issue: int
    wait: int


@dataclass
class Observation:
    """One step of one rank.

    actions: (kind, micro-batch, chunk) as they ran: a forward is one of a stage's module, a backward is the graph that
        such a forward has left, a W is what such a backward has put off.
    in_flight, stores: peaks of the number of graphs whose tensors autograd still keeps, and of what is put off.
    claimed: `peak_alive` of the pipeline.
    unfreed: (micro-batch, chunk) whose output had memory when its backward came.
    left: bytes of everything sent that were not free when all actions were done.
    """

    actions: list[tuple[str, int, int]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    in_flight: int = 0
    stores: int = 0
    claimed: int = 0
    unfreed: list[tuple[int, int]] = field(default_factory=list)
    left: int = 0
    logged: int = 0  # bytes that the actions and messages of the step sent, as `collectives` counts
    on_wire: int | None = None  # and as the kernel does

    def of(self, op: str, *groups: str) -> list[Call]:
        return [call for call in self.calls if call.op == op and call.group in groups]


class _Kept:
    """What autograd keeps instead of a tensor: it lives as long as the graph needs the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Watch:
    """Is `collectives.recorder` during the watched step; the time is the number of actions that have begun."""

    def __init__(self):
        self.seen, self.calls, self.steps = Observation(), [], 0
        self.kept = defaultdict(weakref.WeakSet)  # by (micro-batch, chunk)
        self.stores = []  # (what was put off, by which backward)
        self.sent = []  # storages
        self.action, self.splitting = None, False

    # ---- recorder ----

    def clock(self) -> int:
        return len(self.seen.actions)

    def watch(self, handle, calls, done_at) -> None:
        pass

    # ---- forwards and backwards ----

    def attach(self, pipeline: Pipeline) -> None:
        for chunk, stage in enumerate(pipeline.stages):
            stage.register_forward_pre_hook(lambda *_, chunk=chunk: self.begin_forward(chunk))
            stage.register_forward_hook(lambda module, inputs, output, chunk=chunk: self.end_forward(chunk, output))
            for layer in stage.layers.values():  # of what a graph keeps, that of one operation: no weights are in it
                layer.attention.core = self.keeping(layer.attention.core, chunk)

    def begin_forward(self, chunk: int) -> None:
        self.seen.actions.append(("F", self.action.micro_batch, chunk))

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

    def end_forward(self, chunk: int, output: torch.Tensor) -> None:
        key, output_of = (self.action.micro_batch, chunk), weakref.ref(output)
        output.register_hook(lambda _: self.begin_backward(key, output_of()))

    def begin_backward(self, key: tuple[int, int], output: torch.Tensor | None) -> None:
        self.seen.actions.append(("I" if self.splitting else "B", *key))
        self.backward = key
        if output is not None and output.untyped_storage().nbytes():  # logits live in the graph only
            self.seen.unfreed.append(key)

    @contextmanager
    def put_off(self, real):
        with real() as later:
            self.splitting = True
            yield later
            self.splitting = False
        self.stores.append((later, self.backward))
        self.seen.stores = max(self.seen.stores, sum(bool(store) for store, _ in self.stores))

    def compute(self, real, later):
        (key,) = [key for store, key in self.stores if store is later]
        self.seen.actions.append(("W", *key))
        return real(later)

    def send(self, real, tensor, *rest, **named):
        self.sent.append(tensor.untyped_storage())
        return real(tensor, *rest, **named)

    # ---- the step ----

    def run(self, real, pipeline: Pipeline, *rest):
        self.steps += 1
        if self.steps < STEPS:
            return real(pipeline, *rest)
        self.attach(pipeline)
        collectives.recorder = self
        before, logged = _sent_so_far(), sum(collectives.sent_bytes.values())
        with ExitStack() as stack:
            for owner, name, function in (
                (weight_gradients, "put_off", self.put_off),
                (weight_gradients, "compute", self.compute),
                (collectives, "send", self.send),
            ):
                _wrap(stack, owner, name, function)
            loss = real(pipeline, *rest)
        self.seen.logged = sum(collectives.sent_bytes.values()) - logged
        after = _sent_so_far()
        self.seen.on_wire = None if before is None else after - before
        self.seen.left, self.seen.claimed = sum(each.nbytes() for each in self.sent), pipeline.peak_alive
        return loss

    def end_step(self) -> None:
        if collectives.recorder is self:
            collectives.recorder = None
            for call in self.calls:
                described = call.op, call.group, call.elements, call.bytes, call.phase, call.peer
                self.seen.calls.append(Call(*described, call.issue, call.wait_start))


def _wrap(stack: ExitStack, owner, name: str, function) -> None:
    """Replace a function by `function(the function, *its arguments)`."""
    real = getattr(owner, name)
    stack.enter_context(mock.patch.object(owner, name, lambda *args, **named: function(real, *args, **named)))


@contextmanager
def watched(watch: Watch):
    """Watch what happens in here: one run of step 5's train()."""

    def act(real, pipeline, action):
        watch.action = action
        return real(pipeline, action)

    def end_step(real, *args, **named):
        watch.end_step()
        return real(*args, **named)

    with ExitStack() as stack:
        _wrap(stack, Pipeline, "run", watch.run)
        _wrap(stack, Pipeline, "_act", act)
        _wrap(stack, RunRecord, "end_step", end_step)
        yield


def prepare(flags: str, world: int) -> TrainConfig:
    """The configuration of `BASE` and `flags`."""
    config = parse(5, [*BASE.split(), *flags.split()])
    config.resolve_and_check(world)
    return config


def observe(flags: str, mutant: str | None = None) -> Observation:
    """Train on this rank and watch the last step."""
    config = prepare(flags, environment().world_size)
    mesh = build_mesh(Degrees.of(config), torch.device("cpu"), config.model_config.kv_heads)
    watch = Watch()
    with patched(mutant), watched(watch):
        step05.train(config, mesh)
    return watch.seen


def observe_all(cases: list[str], mutants: list[str | None] | None = None) -> list[Observation]:
    """Every case in turn, on this rank of a world."""
    return [observe(flags, mutant) for flags, mutant in zip(cases, mutants or [None] * len(cases), strict=True)]


def _sent_so_far() -> int | None:
    """Bytes that this rank's sockets have sent, at a moment when all ranks have finished what they were at."""
    dist.barrier()
    sent = wire.sent_by_me()
    dist.barrier()  # a rank that ends closes sockets that others still read
    return sent
