"""Two tasks that take turns, with which DualPipe's pairs of a forward and a backward are run (`overlap.py`).

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

_second_thread = ThreadPoolExecutor(1, thread_name_prefix="second task")


class Turns:
    """Two tasks, of which one runs and the other waits for its turn. A `tracer` notes in whose turn a phase was.

    For example, a forward and a backward of `OverlappedPipeline`, from top to bottom; an arrow is a `switch`:

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

    def __init__(self, device: torch.device, tracer: Tracer | None = None):
        self.device, self.tracer, self.running, self.ended = device, tracer or Tracer(), 0, [False, False]
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
