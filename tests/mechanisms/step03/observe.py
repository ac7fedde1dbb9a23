"""What one rank holds, sends and does, and when, in a step of step 3's real train_step, noted by watching from outside.

Watched are the modules, the parameters and the collectives, so nearly everything holds for any implementation. Only the
sums by kind ask the mechanism what its tensors are for, and `others` tells what it did not say.
"""

import gc
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from common import collectives
from common.config import TrainConfig
from common.experiments.training_step import Training
from common.measure.storages import live_bytes
from common.process_groups import Mesh
from step03_zero import train as step03
from tests.harness.observing import configure, mesh_of, sent_so_far
from tests.parity.runs import boxes_of

BASE = "--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu"
BASE += " --global-batch 12 --micro-batch 2 --steps 2 --no-tie-embeddings --peak-tflops 1"

OTHERS = 4096  # bytes that a rank may hold besides: the loss, a few scalars, the last batch of tokens


@dataclass
class Sample:
    """Memory at one moment, in bytes."""

    at: int  # events so far
    resident: int  # parameters as the modules see them; in stage 3 beyond the shards
    gradients: tuple[int, ...]  # whole (unreduced) gradients, unit by unit in the order of their reduction


@dataclass
class Observation:
    """One step of one rank. Positions count `events`: what is at position p happened before events[p].

    events: "forward i", "forward i done", "backward i" of region i (embedding, layers, norm with head), and "gradient".
    calls: with the sample taken at each mark.
    held: bytes by kind, right before the update and after the step.
    """

    events: list[str] = field(default_factory=list)
    calls: list[collectives.Call] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    on_wire: int | None = None  # bytes that this rank's sockets sent
    result: dict = field(default_factory=dict)  # of both steps: this rank's part of it, as `assemble` takes it

    def of(self, op: str) -> list[collectives.Call]:
        """The calls of one kind, in order."""
        return [call for call in self.calls if call.op == op]

    def position(self, event: str) -> int:
        assert self.events.count(event) == 1, f"{event} occurs {self.events.count(event)} times"
        return self.events.index(event)


class Watch:
    """Watches the last of some steps."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.seen, self.recording = mesh, Observation(), False
        gc.collect()
        gc.freeze()  # what the process holds so far is neither collected (it is large) nor listed any more

    def attach(self, model, zero, optimizer) -> None:
        """Watch these, whose own hooks have been registered: those registered here run after them."""
        self.parameters, self.zero, self.optimizer = list(model.parameters()), zero, optimizer
        starts = [model.embedding, *model.layers.values(), model.norm]
        ends = [model.embedding, *model.layers.values(), model.head]
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            start.register_forward_pre_hook(lambda *_, i=index: self.note(f"forward {i}"))
            end.register_forward_hook(lambda module, inputs, output, i=index: self.after_forward(i, output))
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self.note("gradient"))
        update = optimizer.step

        def step(gradients, *rest, **named) -> None:
            if self.recording:
                self.hold("before the update", gradients)
            update(gradients, *rest, **named)

        optimizer.step = step

    # ---- events ----

    def after_forward(self, index: int, output: torch.Tensor) -> None:
        self.note(f"forward {index} done")
        if output.requires_grad:
            output.register_hook(lambda _: self.note(f"backward {index}"))

    def note(self, event: str) -> None:
        if self.recording:
            self.sample()
            self.seen.events.append(event)

    def sample(self) -> Sample:
        """Take a sample. It is the clock of the recorded calls."""
        buckets = [unit.bucket for unit in self.zero.units]
        whole = tuple(0 if bucket is None else live_bytes([bucket.flat]) for bucket in buckets)
        self.seen.samples.append(Sample(len(self.seen.events), live_bytes(self.parameters), whole))
        return self.seen.samples[-1]

    # ---- the step ----

    @contextmanager
    def step(self):
        """Around the step that is to be watched."""
        sent, self.recording = sent_so_far(self.mesh), True
        with collectives.record(clock=self.sample) as self.seen.calls:
            yield
        self.recording = False
        if sent is not None:
            self.seen.on_wire = sent_so_far(self.mesh) - sent
        self.hold("after the step")

    def hold(self, moment: str, gradients: list[torch.Tensor] = ()) -> None:
        """Bytes by kind. A storage counts as the first kind that has it."""
        units, kinds = self.zero.units, {}
        kinds["parameters"] = [*self.parameters, *self.zero.shards]
        kinds["gradients"] = [*gradients, *(unit.bucket.flat for unit in units if unit.bucket)]
        kinds["gradients"] += [unit.reduced for unit in units if unit.reduced is not None]
        states = self.optimizer.state.values()
        kinds["optimizer"] = [*self.optimizer.masters, *(each for state in states for each in state.values())]
        known, held = [], {}
        for kind, tensors in kinds.items():
            before = live_bytes(known)
            known += tensors
            held[kind] = live_bytes(known) - before
        for _ in range(200):  # gloo's thread may still be about to let go of a message that has arrived
            gc.collect()
            everything = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
            held["others"] = live_bytes(known + everything) - live_bytes(known)
            if held["others"] < OTHERS:
                break
            del everything
            time.sleep(0.01)
        self.seen.held[moment] = held


def prepare(flags: str) -> tuple[TrainConfig, Mesh]:
    """The configuration of `BASE` and `flags`, and this rank's place, as `run` makes them."""
    config = configure(3, f"{BASE} {flags}")
    return config, mesh_of(config)


def observe(flags: str) -> Observation:
    """Take two steps on this rank and watch the second, in which moments exist and all was reset that has to be."""
    config, mesh = prepare(flags)
    watch, run = Watch(mesh), Training(step03, config, mesh)
    watch.attach(*run.parts)
    numbers = [run.take(0)]
    with watch.step():
        numbers.append(run.take(1))
    curve = [(each["loss"], each["grad_norm"]) for each in numbers]
    watch.seen.result = {"curve": curve, "boxes": boxes_of(run.optimizer.parameters)}
    return watch.seen
