"""DualPipe's point: a forward and a backward of two micro-batches hide each other's all-to-alls (DeepSeek-V3,
arXiv:2412.19437, section 3.2.1).

Between attention, dispatch, experts and combine a micro-batch waits for its tokens to travel. Another micro-batch can
compute meanwhile. So a rank runs the two as two tasks that take turns: whenever one is about to wait for an all-to-all,
it hands over to the other.

Only one task runs at a time, and they switch at the same places on every rank. So all ranks still issue their
collectives in one order, and a GPU receives its kernels in one order, as if the two had been written as one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from common import collectives
from common.tracing.tracer import Tracer
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.messages import place_messages
from step05_pipeline.schedules.simulator import runs_as_one
from step07_expert_parallel.moe import MoE

_second_thread = ThreadPoolExecutor(1, thread_name_prefix="second task")


class Turns:
    """Two tasks, of which one runs and the other waits for its turn.

    For example, a forward and a backward of `InterleavedPipeline`, from top to bottom; an arrow is a `switch`:

        the forward (0)                      the backward (1)
        at once                      ->
                                             launch an all-to-all
                                     <-      before waiting for it
        attention, launch another
        before waiting for it        ->
                                             wait for the first; experts; launch a third

    away   seconds that each of them has waited
    error  what one of them has raised, or None. The other one raises it, too: alone it would issue other collectives
           than other ranks do
    """

    def __init__(self, device: torch.device, tracer: Tracer):
        self.device, self.tracer, self.running, self.ended = device, tracer, 0, [False, False]
        self.may_run = [threading.Semaphore(0), threading.Semaphore(0)]
        self.away, self.error = [0.0, 0.0], None

    def switch(self) -> None:
        """Let the other task run, unless it has ended, and return when it hands back or ends.

        Whichever thread calls this belongs to the running task: autograd may run a backward in a thread of its own.
        """
        mine, other = self.running, 1 - self.running
        if not self.ended[other]:
            phase, self.running, left = collectives.phase, other, time.perf_counter()
            with self.tracer.interrupted():
                self.may_run[other].release()
                self.may_run[mine].acquire()
            collectives.phase = phase
            self.away[mine] += time.perf_counter() - left
        if self.error:
            raise self.error

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both, `first` first, and change whenever the running one calls `switch`. An error of either is raised."""
        modes = _get_current_dispatch_mode_stack()  # such as the simulated device of --compute

        def run_second() -> None:
            self.may_run[1].acquire()
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # every thread has its own, as it has its own modes
            if not self.error:
                with self._task(1), ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    second()

        phase, waiting = collectives.phase, _second_thread.submit(run_second)
        try:
            with self._task(0):
                first()
            waiting.result()
        finally:
            wait([waiting])
            collectives.phase = phase

    @contextmanager
    def _task(self, number: int) -> Iterator[None]:
        """Around a task. When it has ended, the other one runs on alone."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended[number], self.running = True, 1 - number
            self.may_run[1 - number].release()


class InterleavedPipeline(Pipeline):
    """A pipeline that runs every forward and the backward right behind it as one, if they are of different stages."""

    def __init__(self, *args):
        super().__init__(*args)
        self.program = place_messages(self.schedule, joint=True)[self.rank]
        actions = self.schedule.actions[self.rank]
        self.partners = {first: second for first, second in zip(actions, actions[1:]) if runs_as_one(first, second)}
        self.first: Action | None = None  # of a pair, until its partner comes
        self.turns: Turns | None = None  # while a pair runs
        for module in (module for stage in self.stages for module in stage.modules()):
            if isinstance(module, MoE):
                module.before_wait = self.switch

    def switch(self) -> None:
        """If two tasks take turns, let the other one run: the caller is about to wait for a message."""
        if self.turns is not None:
            self.turns.switch()

    def _act(self, action: Action) -> None:
        if self.first is None and action in self.partners:
            self.first = action
        elif self.first is None:
            super()._act(action)
        else:
            first, self.first = self.first, None
            act = super()._act

            def forward() -> None:
                self.switch()  # the backward begins with an all-to-all, behind which this computes its attention
                act(first)

            self.turns = Turns(self.mesh.device, self.step.tracer)
            try:
                self.turns.run(forward, lambda: act(action))
            finally:
                self.turns = None

    def clock(self) -> float:
        """Without the time in which the action has waited for its turn."""
        return super().clock() - (self.turns.away[self.turns.running] if self.turns else 0.0)
