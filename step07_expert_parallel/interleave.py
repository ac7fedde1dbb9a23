"""DualPipe's point: a forward and a backward of two micro-batches hide each other's all-to-alls (DeepSeek-V3,
arXiv:2412.19437, section 3.2.1).

Between attention, dispatch, experts and combine a micro-batch waits for its tokens to travel. Another micro-batch can
compute meanwhile. So a rank runs the two as two tasks that take turns: whenever one is about to wait for an all-to-all,
it hands over to the other.

Only one task runs at a time, and they switch at the same places on every rank. So all ranks still issue their
collectives in one order, and a GPU receives its kernels in one order, as if the two had been written as one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from common import collectives
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.messages import place_messages
from step05_pipeline.schedules.simulator import runs_as_one


class Turns:
    """Two tasks, of which one runs and the other waits for its turn."""

    def __init__(self):
        self.running, self.ended = 0, [False, False]
        self.may_run = [threading.Semaphore(0), threading.Semaphore(0)]

    def switch(self) -> None:
        """Let the other task run, unless it has ended, and return when it hands back or ends.

        Whichever thread calls this belongs to the running task: autograd may run a backward in a thread of its own.
        """
        mine, other = self.running, 1 - self.running
        if self.ended[other]:
            return
        phase, self.running = collectives.phase, other
        self.may_run[other].release()
        self.may_run[mine].acquire()
        collectives.phase = phase

    def end(self, task: int) -> None:
        """The task has ended: the other one runs on alone."""
        self.ended[task], self.running = True, 1 - task
        self.may_run[1 - task].release()


_turns: Turns | None = None
_second_thread = ThreadPoolExecutor(1, thread_name_prefix="second task")


def switch() -> None:
    """If two tasks take turns, let the other one run: the caller is about to wait for a message."""
    if _turns is not None:
        _turns.switch()


def take_turns(first: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
    """Run both, `first` first, and change whenever the running one calls `switch`."""
    global _turns
    turns = _turns = Turns()

    def task() -> None:
        turns.may_run[1].acquire()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # every thread has its own
        try:
            second()
        finally:
            turns.end(1)

    phase, waiting = collectives.phase, _second_thread.submit(task)
    try:
        first()
    finally:
        turns.end(0)
    waiting.result()
    _turns, collectives.phase = None, phase


class InterleavedPipeline(Pipeline):
    """A pipeline that runs every forward and the backward right behind it as one, if they are of different stages."""

    def __init__(self, *args):
        super().__init__(*args)
        self.program = place_messages(self.schedule, joint=True)[self.rank]
        actions = self.schedule.actions[self.rank]
        self.partners = {first: second for first, second in zip(actions, actions[1:]) if runs_as_one(first, second)}
        self.first: Action | None = None  # of a pair, until its partner comes

    def _act(self, action: Action) -> None:
        if self.first is None and action in self.partners:
            self.first = action
        elif self.first is None:
            super()._act(action)
        else:
            first, self.first = self.first, None
            act = super()._act

            def forward() -> None:
                switch()  # the backward begins with an all-to-all, behind which this computes its attention
                act(first)

            take_turns(forward, lambda: act(action), self.mesh.device)
