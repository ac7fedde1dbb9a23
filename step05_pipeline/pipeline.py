"""Pipeline parallelism by hand: one executor for every schedule.

For one schedule alone, three loops are enough. Here is 1F1B on rank `rank` of `p`, with `m` micro-batches. A forward
puts its input and its output into a queue, from which a backward takes the oldest pair:

    ahead = min(m, p - 1 - rank)                       # forwards before the first gradient can arrive
    for _ in range(ahead):                             # fill
        send_output(forward(receive_input()))
    for _ in range(m - ahead):                         # steady: one forward, one backward
        send_output(forward(receive_input()))
        send_gradient(backward(receive_gradient()))
    for _ in range(ahead):                             # drain
        send_gradient(backward(receive_gradient()))

Two things are wrong with these loops. First, they hang if a send blocks until it is received: the last rank sends the
gradient of micro-batch 0 while the rank before it sends the output of micro-batch 1, and neither receives. Therefore
libraries that have such loops send and receive in one call. Second, every other schedule needs other loops: several
stages per rank, backwards in two halves, two copies of the model.

So here the order is data. A schedule lists the actions of a rank: F, the forward of a micro-batch through one of its
stages; B, the backward; or I and W, the two halves of the backward. `schedules/messages.py` has placed the sends and
receives between these actions, so that no schedule hangs. What remains here is one loop over this list, what each
action does, and when memory is released:
  F  calls the function that `run` was given, and keeps its input and the graph until the backward
  B  takes the gradient of its output (in the last stage: none, it starts at the loss) and makes that of its input
  I  does the same, but defers the gradients of linear weights to W
Nothing here depends on which schedule it is, on what a stage computes, or on how layers are divided. But gradients go
to a `Zero` of step 3, of any stage. It is told to `gather` when a step begins; `backward` says of every backward
whether it is the stage's `last` one of the step, and whether it is `complete`, since after an I more gradients follow;
`accumulate` takes those of a W; `launch_rest` starts the reduction while other ranks are still busy, unless
`each_micro_batch` has done so; and `finish` returns the sums. Step 2's `DataParallel` does not fit: it has no `gather`,
no `complete` and no `launch_rest`. In stage 0, `Zero` does what it does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from common import collectives
from common.group import Group
from common.tracing.tracer import Tracer
from step03_zero.zero import Zero
from step05_pipeline.schedules.actions import Action, Output, Schedule
from step05_pipeline.schedules.messages import Transfer, place_messages
from step05_pipeline.weight_gradients import WeightGradStore, defer_weight_gradients

# (stage, micro-batch, input or None in the first stage) -> what goes to the next stage; in the last one, the loss
Forward = Callable[[nn.Module, int, Tensor | None], Tensor]
DELAYS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long actions take at least, in delays of a stage


@dataclass
class Step:
    """One step of a pipeline on this rank: what `run` was given, and what actions and messages leave for later ones, by
    their key: (chunk, micro-batch).
    """

    forward: Forward
    tracer: Tracer
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # input, output of its F
    deferred: dict[tuple[int, int], WeightGradStore] = field(default_factory=dict)  # by key, between I and W
    outputs: dict[Output, Tensor] = field(default_factory=dict)  # computed here, and not yet used or sent
    pending_receives: dict[Output, tuple[Tensor, collectives.Work]] = field(default_factory=dict)
    pending_sends: dict[str, tuple[Tensor, collectives.Work]] = field(default_factory=dict)  # one per direction
    peak_in_flight: int = 0  # the most keys between F and B (or I)


class Pipeline:
    """Runs one rank's part of a schedule.

    Args:
        schedule: what every rank does, in order; this object executes the row of its own rank.
        stages: the parts of the model that this rank holds, in the order of their chunk numbers: modules of any kind.
        zero_wrappers: one `Zero` per stage, which collects that stage's gradients (see above).
        activations, gradients: the pipeline's ranks, in order, as two groups: messages of the one do not wait for
            those of the other.
        like: a tensor of every message's shape, type and device.
        free_sent: free what a stage returns as soon as it is sent. The graph still refers to it, so no operation may
            have saved it: right if stages end in an addition, as ours do (Megatron-LM: deallocate_pipeline_outputs).
        delays: seconds that a forward through each stage takes at least, for experiments.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: list[nn.Module],
        zero_wrappers: list[Zero],
        activations: Group,
        gradients: Group,
        like: Tensor,
        free_sent: bool = False,
        delays: Sequence[float] = (),
    ):
        self.schedule, self.rank = schedule, activations.rank
        self.stages, self.zero_wrappers, self.like = stages, zero_wrappers, like
        self.groups = {"forward": activations, "backward": gradients}  # by the direction of a message
        self.free_sent, self.delays = free_sent, delays
        self.program = place_messages(schedule)[self.rank]
        self.stage_numbers = [schedule.stage_of(self.rank, chunk)[1] for chunk in range(len(stages))]
        # The last B or W of each chunk: after it the chunk's gradients are complete
        self.last_actions = {action.chunk: action for action in schedule.actions[self.rank] if action.kind in "BW"}
        self.step: Step | None = None  # the last one that has begun

    def run(self, forward: Forward, tracer: Tracer | None = None) -> None:
        """Run forward and backward of all micro-batches of a step.

        Args:
            forward: called as forward(stage, index, x) for a micro-batch's way through one of `stages`. `x` is what
                the stage before has returned, or None in the first stage, which reads data of its own. For the last
                stage it returns a share of the loss, where the backward begins.
        """
        self.step = Step(forward, tracer or Tracer())
        with self.step.tracer.phase("forward"):
            for zero in self.zero_wrappers:
                zero.gather()
        for item in self.program:
            if isinstance(item, Action):
                self._act(item)
            elif item.kind == "receive":
                self._receive(item)
            else:
                self._send(item)
        for direction in self.groups:
            self._complete_send(direction)

    def finish(self) -> list[Tensor]:
        """Return the summed gradients after `run`, one for each shard of each stage."""
        return [gradient for zero in self.zero_wrappers for gradient in zero.finish()]

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        action_input = self._wait_for_input(action)  # on the CPU this wait is the bubble, and no part of the action
        start = self.clock()
        with self.step.tracer.phase("forward" if action.kind == "F" else "backward", action=str(action)):
            if action.kind == "F":
                self._forward(action, action_input)
            elif action.kind == "W":
                self._weight_gradients(action)
            else:
                self._backward(action, action_input)
            if self.delays:
                least = DELAYS[action.kind] * self.delays[action.chunk]
                time.sleep(max(0.0, start + least - self.clock()))

    def clock(self) -> float:
        """Seconds, for the time that an action takes. It may stand still while the action waits for its turn."""
        return time.perf_counter()

    def _forward(self, action: Action, received: Tensor | None) -> None:
        x = received.detach().requires_grad_() if received is not None else None  # the graph of this stage begins here
        y = self.step.forward(self.stages[action.chunk], action.micro_batch, x)
        if self.stage_numbers[action.chunk] < self.schedule.stages - 1:
            self.step.outputs[self.schedule.output_of(self.rank, action)] = y.detach()
        self.step.kept[action.chunk, action.micro_batch] = x, y
        self.step.peak_in_flight = max(self.step.peak_in_flight, len(self.step.kept))

    def _backward(self, action: Action, output_gradient: Tensor | None) -> None:
        key = action.chunk, action.micro_batch
        x, y = self.step.kept.pop(key)
        if action.kind == "B":
            with self._gradients_complete(action):
                torch.autograd.backward(y, output_gradient)
        else:
            zero, weights = self.zero_wrappers[action.chunk], self.stages[action.chunk].parameters()
            with zero.backward(last=False, complete=False), defer_weight_gradients(weights) as store:
                torch.autograd.backward(y, output_gradient)
            self.step.deferred[key] = store
        if self.stage_numbers[action.chunk] > 0:
            self.step.outputs[self.schedule.output_of(self.rank, action)] = x.grad

    @torch.no_grad()
    def _weight_gradients(self, action: Action) -> None:
        store = self.step.deferred.pop((action.chunk, action.micro_batch))
        with self._gradients_complete(action):
            for weight, gradient in store.compute():
                self.zero_wrappers[action.chunk].accumulate(weight, gradient)

    @contextmanager
    def _gradients_complete(self, action: Action) -> Iterator[None]:
        """Wrap the action that finishes one micro-batch's gradients for a stage: B, or W if the backward is split.

        For the stage's last one this also starts the data-parallel reduction, while other ranks are still busy.
        """
        zero, last = self.zero_wrappers[action.chunk], action == self.last_actions[action.chunk]
        with zero.backward(last):
            yield
        if last and not zero.each_micro_batch:
            zero.launch_rest()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _wait_for_input(self, action: Action) -> Tensor | None:
        """Return the hidden states or the gradient that the action takes; None if it takes none."""
        needed = self.schedule.input_of(self.rank, action)
        if needed not in self.step.pending_receives:  # computed by another stage of this rank
            return self.step.outputs.pop(needed) if needed else None
        tensor, work = self.step.pending_receives.pop(needed)
        work.wait()
        return tensor

    def _receive(self, transfer: Transfer) -> None:
        tensor = self.like.new_empty(self.like.shape)
        work = collectives.receive(tensor, transfer.peer, self.groups[transfer.output.direction], async_op=True)
        self.step.pending_receives[transfer.output] = tensor, work

    def _send(self, transfer: Transfer) -> None:
        direction = transfer.output.direction
        self._complete_send(direction)  # the previous one: an action has run since, so it is usually complete
        tensor = self._message(transfer.output)
        work = collectives.send(tensor, transfer.peer, self.groups[direction], async_op=True)
        self.step.pending_sends[direction] = tensor, work

    def _message(self, output: Output) -> Tensor:
        """Return what is to be sent. Raises ValueError if it is not like `like`: gloo would fill a part of a tensor."""
        tensor = self.step.outputs.pop(output).contiguous()
        if (tensor.shape, tensor.dtype) != (self.like.shape, self.like.dtype):
            what, wanted = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (tensor, self.like))
            raise ValueError(f"a message {output} is {what}, but the pipeline's `like` is {wanted}")
        return tensor

    def _complete_send(self, direction: str) -> None:
        """Wait for the pending send in this direction, if any, and free the tensor that it sent."""
        if direction in self.step.pending_sends:
            tensor, work = self.step.pending_sends.pop(direction)
            work.wait()
            if self.free_sent:
                tensor.untyped_storage().resize_(0)
