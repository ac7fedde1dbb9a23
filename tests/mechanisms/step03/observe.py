"""What one rank holds, sends and does, and when, in a step of step 3's real train(), noted by watching it from outside.

Watched are the modules, the parameters and the collectives, so nearly everything holds for any implementation. Only the
sums by kind ask the mechanism what its tensors are for, and `others` tells what it did not say.
"""

import gc
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

import step03_zero.train
from common import collectives
from common.command_line import parse
from common.config import TrainConfig
from common.experiments import tcp_bytes as wire
from common.measure.allocator import live_bytes
from common.process_groups import Degrees, Mesh, build_mesh, environment
from common.record.run_record import RunRecord
from tests.mutants.patches import patched

STEPS = 2  # of them the last one is watched: moments exist, and whatever a step has to reset was reset
BASE = "--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu"
BASE += f" --global-batch 12 --micro-batch 2 --steps {STEPS} --no-tie-embeddings --peak-tflops 1"

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
    calls: (op, group, elements, dtype, bytes, position of issue, position of the wait).
    phases, at_issue: the phase of the step in which each of the calls was issued, and what was held then.
    held: bytes by kind, right before the update and after the step.
    """

    events: list[str] = field(default_factory=list)
    calls: list[tuple] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    at_issue: list[Sample] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    on_wire: int | None = None  # bytes that this rank's sockets sent

    def of(self, op: str) -> list[tuple]:
        """The calls of one kind, in order."""
        return [call for call in self.calls if call[0] == op]

    def position(self, event: str) -> int:
        assert self.events.count(event) == 1, f"{event} occurs {self.events.count(event)} times"
        return self.events.index(event)


class Watch:
    """Watches the last step of one run of step 3's train()."""

    def __init__(self):
        self.seen, self.recording = Observation(), False
        gc.collect()
        gc.freeze()  # what the process holds so far is neither collected (it is large) nor listed any more

    def attach(self, model, zero, optimizer) -> None:
        """Watch these, whose own hooks have been registered: those registered here run after them."""
        self.model, self.zero, self.optimizer = model, zero, optimizer
        starts = [model.embedding, *model.layers.values(), model.norm]
        ends = [model.embedding, *model.layers.values(), model.head]
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            start.register_forward_pre_hook(lambda *_, i=index: self.note(f"forward {i}"))
            end.register_forward_hook(lambda module, inputs, output, i=index: self.after_forward(i, output))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.note("gradient"))
        update = optimizer.step

        def step(gradients, *rest) -> None:
            if self.recording:
                self.hold("before the update", gradients)
            update(gradients, *rest)

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

    def sample(self) -> int:
        """Take a sample; its number. It is the clock of the recorded calls."""
        buckets = [unit.bucket for unit in self.zero.units]
        whole = tuple(0 if bucket is None else live_bytes([bucket.flat]) for bucket in buckets)
        self.seen.samples.append(Sample(len(self.seen.events), live_bytes(self.model.parameters()), whole))
        return len(self.seen.samples) - 1

    # ---- the step ----

    @contextmanager
    def step(self):
        """Around the step that is to be watched."""
        sent, self.recording = _sent_so_far(), True
        with collectives.record(clock=self.sample) as calls:
            yield
        self.recording = False
        if sent is not None:
            self.seen.on_wire = _sent_so_far() - sent
        for call in calls:
            issue = self.seen.samples[call.issue]
            wait = -1 if call.wait_start is None else self.seen.samples[call.wait_start].at  # -1: nobody waited
            self.seen.calls.append((call.op, call.group, call.elements, call.dtype, call.bytes, issue.at, wait))
            self.seen.phases.append(call.phase)
            self.seen.at_issue.append(issue)
        self.hold("after the step")

    def hold(self, moment: str, gradients: list[torch.Tensor] = ()) -> None:
        """Bytes by kind. A storage counts as the first kind that has it."""
        units, kinds = self.zero.units, {}
        kinds["parameters"] = [*self.model.parameters(), *self.zero.shards]
        kinds["gradients"] = [*gradients, *(unit.bucket.flat for unit in units if unit.bucket)]
        kinds["gradients"] += [unit.reduced for unit in units]
        states = self.optimizer.inner.state.values()
        kinds["optimizer"] = [*self.optimizer.masters, *(each for state in states for each in state.values())]
        known, held = set(), {}
        for kind, tensors in kinds.items():
            mine = {address: size for address, size in _storages(tensors).items() if address not in known}
            known |= mine.keys()
            held[kind] = sum(mine.values())
        for _ in range(200):  # gloo's thread may still be about to let go of a message that has arrived
            gc.collect()
            everything = _storages(each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
            held["others"] = sum(size for address, size in everything.items() if address not in known)
            if held["others"] < OTHERS:
                break
            time.sleep(0.01)
        self.seen.held[moment] = held


@contextmanager
def watched(watch: Watch):
    """Watch what happens in here: one run of step 3's train()."""
    real_build, real_step = step03_zero.train.build, RunRecord.step

    def build(config, mesh):
        made = real_build(config, mesh)
        watch.attach(*made)
        return made

    @contextmanager
    def step(self, number):
        with real_step(self, number) as measured, watch.step() if number == STEPS - 1 else ExitStack():
            yield measured

    with mock.patch.object(step03_zero.train, "build", build), mock.patch.object(RunRecord, "step", step):
        yield


def prepare(flags: str) -> tuple[TrainConfig, Mesh]:
    """The configuration of `BASE` and `flags`, and this rank's place, as `run` makes them."""
    config = parse(3, [*BASE.split(), *flags.split()])
    config.resolve_and_check(environment().world_size)
    return config, build_mesh(Degrees.of(config), torch.device("cpu"), config.model_config.kv_heads)


def observe(flags: str, mutant: str | None = None) -> Observation:
    """Train on this rank and watch the last step."""
    config, mesh = prepare(flags)
    watch = Watch()
    with patched(mutant), watched(watch):
        step03_zero.train.train(config, mesh)
    return watch.seen


def observe_all(cases: list[str], mutants: list[str | None] | None = None) -> list[Observation]:
    """Every case in turn, on this rank of a world."""
    return [observe(flags, mutant) for flags, mutant in zip(cases, mutants or [None] * len(cases), strict=True)]


def _storages(tensors) -> dict[int, int]:
    """Address -> bytes of every storage that has memory."""
    storages = (each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor) and not each.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr()}


def _sent_so_far() -> int | None:
    """Bytes that this rank's sockets have sent, at a moment when all ranks have finished what they were at."""
    if not dist.is_initialized():
        return wire.sent_by_me()
    dist.barrier()
    sent = wire.sent_by_me()
    dist.barrier()  # a rank that ends closes sockets that others still read
    return sent
