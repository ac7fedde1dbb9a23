"""DualPipe's point: a forward and a backward of two micro-batches hide each other's all-to-alls (DeepSeek-V3,
arXiv:2412.19437, section 3.2.1).

Between attention, dispatch, experts and combine a micro-batch waits for its tokens to travel. Another micro-batch can
compute meanwhile. So a rank runs the two as two tasks that take turns (`turns.py`): whenever one is about to wait for
an all-to-all, it hands over to the other.
"""

from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.messages import MESSAGE_TIME, Program, place_messages
from step05_pipeline.schedules.simulator import Costs, runs_as_one, simulate
from step07_expert_parallel.moe import MoE
from step07_expert_parallel.turns import Turns


def programs_of_pairs(schedule: Schedule) -> tuple[Program, ...]:
    """`place_messages` where an F and a B that run as one are one action: no message is placed between them.

    For example, the first pairs of `dualpipe` on 2 ranks with 4 micro-batches, where odd ones pass through chunk 1. >f2
    sends the activations of micro-batch 2, <b0 receives the gradient of 0:

        place_messages    rank 0    F2  >f2  <f3  B1  >b1  <b0         rank 1    F3  <f2  >f3  B0  <b1  >b0
        in pairs          rank 0    F2 B1  >b1  >f2  <b0  <f3          rank 1    F3 B0  <b1  <f2  >b0  >f3
    """
    spans = []
    for row in simulate(schedule, Costs(FB=3.0, communication=MESSAGE_TIME)).spans:
        spans.append([])
        paired = False
        for (action, start, end), following in zip(row, [*row[1:], None], strict=True):
            paired = not paired and following is not None and runs_as_one(action, following[0])
            spans[-1].append((action, start, following[2] if paired else end))  # both end when the later one does
    return place_messages(schedule, tuple(map(tuple, spans)))


class OverlappedPipeline(Pipeline):
    """A pipeline that runs every forward and the backward right behind it as one, if they are of different stages."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.program = programs_of_pairs(self.schedule)[self.rank]
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

            self.turns = Turns(self.like.device, self.step.tracer)
            try:
                self.turns.run(forward, lambda: act(action))
            finally:
                self.turns = None

    def clock(self) -> float:
        """Without the time in which the action has waited for its turn."""
        return super().clock() - (self.turns.away[self.turns.running] if self.turns else 0.0)
