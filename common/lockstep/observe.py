"""One rank of a run: the real `train` of a step's train.py, for a few steps in float64, with a recorder in it."""

import contextlib
import copy
import functools
import os
from collections.abc import Callable
from types import ModuleType

from torch import nn

from common.config import TrainConfig
from common.errors import Diverged, UsageError
from common.lockstep.decoder import watch_decoder, watch_loss
from common.lockstep.notes import Seen
from common.lockstep.places import tokens_of
from common.lockstep.recorder import Recorder
from common.process_groups import GROUP_NAMES, Mesh, coordinates
from common.tracing.tracer import Tracer

PLAIN = {"dtype": "float64", "run_dir": None, "save_every": 0, "trace": None, "profile": False}
PLAIN |= {"memory_snapshot": False, "measure_memory": False, "peak_tflops": 1.0, "shapes": False, "compile": False}


def prepare(config: TrainConfig, steps: int) -> TrainConfig:
    """Let a run compute in float64, take so many steps and write nothing. Raises UsageError if that changes it."""
    if config.fp8 != "none":
        raise UsageError(f"--fp8 {config.fp8} rounds to 8 bits, but runs in lockstep compute in float64")
    if config.resume:
        raise UsageError("--resume: runs in lockstep begin at the beginning; --init-from takes other weights")
    for name, value in (PLAIN | {"steps": steps}).items():
        setattr(config, name, value)
    return config


def observe(train: ModuleType, config: TrainConfig, mesh: Mesh, whole: bool = False) -> Seen:
    """Train, and return what this rank has seen, up to a loss that is not finite.

    Args:
        train: a step's train.py, as a module.
        config: see `prepare`.
        whole: this is one process, with which ranks are to be compared.
    """
    run = _ObservedRun(train, config, whole)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        for name in ("build", "train_step"):
            stack.enter_context(_replaced(train, name, getattr(run, name)))
        quiet = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(contextlib.suppress(Diverged))  # all ranks stop alike, and have seen why
        train.train(config, mesh)
    return run.seen


@contextlib.contextmanager
def _replaced(owner: object, name: str, wrapper: Callable):
    """In this block, `owner.name` is `wrapper` with the real one as its first argument."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(functools.partial(wrapper, real)))
    try:
        yield
    finally:
        setattr(owner, name, real)


class _ObservedRun:
    """What stands around `build` and `train_step` of a train.py."""

    def __init__(self, train: ModuleType, config: TrainConfig, whole: bool):
        self.train, self.config, self.whole = train, config, whole
        self.seen, self.recorder = Seen(), None

    def build(self, build: Callable, config: TrainConfig, mesh: Mesh) -> tuple:
        parts = build(config, mesh)
        self.optimizer = next(each for each in parts if hasattr(each, "masters"))
        place, degrees = coordinates(mesh.rank, mesh.degrees), mesh.degrees
        groups = {name: getattr(mesh, name).ranks for name in GROUP_NAMES if getattr(mesh, name).size > 1}
        counts = {"micro-batches": config.accumulation_steps}
        place = {name: index for name, index in place.items() if getattr(degrees, name) > 1}
        self.seen = Seen(mesh.rank, place, groups, counts)
        self.recorder = recorder = Recorder(tokens_of(config, mesh), self.seen)
        pipeline = next((each for each in parts if hasattr(each, "stages")), None)
        models = pipeline.stages if pipeline else [each for each in parts if isinstance(each, nn.Module)]
        for model in models:
            watch_decoder(recorder, model, self.whole)
            if hasattr(self.train, "cross_entropy_sum"):  # a train.py that calls it itself
                watch_loss(recorder, self.train, "cross_entropy_sum", self.whole)
        for sums in pipeline.zero_wrappers if pipeline else [each for each in parts if hasattr(each, "accumulate")]:
            recorder.watch_sums(sums)
        if pipeline:
            recorder.replace(pipeline, "run", self._numbered)
        recorder.replace(self.optimizer, "step", self._with_gradients)
        return parts

    def train_step(self, train_step: Callable, step: int, *parts) -> dict:
        self.recorder.step, self.recorder.micro_batch = step, 0
        parts = [self._counted(each) if hasattr(each, "target_tokens") else each for each in parts]
        numbers = train_step(step, *parts)
        for name, number in numbers.items():
            self.recorder.note("number", name, number, ())
        self.recorder.note_pieces("update", self.optimizer.buffers, self.optimizer.buffers)
        return numbers

    def close(self) -> None:
        if self.recorder:
            self.recorder.close()

    def _counted(self, batches):
        """Batches of a run without a pipeline: whoever asks for a micro-batch works on that one from then on."""
        counted, recorder = copy.copy(batches), self.recorder

        def micro_batch(step: int, index: int, *more, **options):
            recorder.micro_batch = index
            return batches.micro_batch(step, index, *more, **options)

        if not hasattr(self.train, "schedule_of"):
            counted.micro_batch = micro_batch
        return counted

    def _numbered(self, run: Callable) -> Callable:
        """Of a pipeline, whose schedule says which micro-batch passes through a stage."""

        def run_numbered(forward: Callable, tracer: Tracer | None = None) -> None:
            def forward_numbered(stage, index: int, x):
                self.recorder.micro_batch = index
                return forward(stage, index, x)

            run(forward_numbered, tracer)

        return run_numbered

    def _with_gradients(self, step: Callable) -> Callable:
        """Of an optimizer: what it is given, and what it makes of it."""

        def step_noted(gradients: list, *more, **options) -> None:
            self.recorder.note_pieces("gradient", self.optimizer.parameters, gradients)
            step(gradients, *more, **options)
            self.recorder.note_pieces("update", self.optimizer.parameters, self.optimizer.parameters)

        return step_noted
