"""Pipeline parallelism by hand: one executor for every schedule.

A schedule says in which order a rank works: F, the forward of a micro-batch through one of its stages; B, the backward;
or I and W, the two halves of the backward. `schedules/messages.py` has placed the sends and receives between these
actions. What remains here is what each of them does, and when memory is released:
  F  takes hidden states (in the first stage: tokens) and keeps its input and the graph until the backward
  B  takes the gradient of its output (in the last stage: none, it starts at the loss) and makes that of its input
  I  does the same, but defers the gradients of linear weights to W
Nothing here depends on which schedule it is, nor on how layers are divided or gradients are reduced.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from common import collectives
from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Group, Mesh
from common.tracing.tracer import Tracer
from step03_zero.zero import Zero
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from step05_pipeline.schedules.actions import Action, Output, Schedule
from step05_pipeline.schedules.messages import Transfer, place_messages
from step05_pipeline.weight_gradients import WeightGradStore, defer_weight_gradients

DELAYS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how many times --layer-delay each layer takes


@dataclass
class Step:
    """One step of a pipeline on this rank: what `run` was given, and what actions and messages leave for later ones, by
    their key: (chunk, micro-batch).
    """

    micro_batch: Callable[[int], tuple]
    target_tokens: int
    scale: float
    tracer: Tracer
    loss: torch.Tensor  # this rank's share, so far
    kept: dict[tuple[int, int], tuple] = field(default_factory=dict)  # key -> input and output of its forward
    deferred: dict[tuple[int, int], WeightGradStore] = field(default_factory=dict)  # by key, between I and W
    outputs: dict[Output, torch.Tensor] = field(default_factory=dict)  # computed here, and not yet used or sent
    pending_receives: dict[Output, tuple[torch.Tensor, collectives.Work]] = field(default_factory=dict)
    pending_sends: dict[str, tuple[torch.Tensor, collectives.Work]] = field(default_factory=dict)  # one per direction
    peak_in_flight: int = 0  # the most keys between F and B (or I)


class Pipeline:
    """Runs one rank's part of a schedule.

    Args:
        schedule: what every rank does, in order; this object executes the row of its own rank.
        stages: the parts of the model that this rank holds, in the order of their chunk numbers.
        zero_wrappers: one `Zero` per stage; it collects that stage's gradients.
    """

    def __init__(
        self, schedule: Schedule, stages: list[Decoder], zero_wrappers: list[Zero], config: TrainConfig, mesh: Mesh
    ):
        self.schedule, self.rank = schedule, mesh.pp_forward.rank
        self.config, self.mesh, self.stages, self.zero_wrappers = config, mesh, stages, zero_wrappers
        self.program = place_messages(schedule)[self.rank]
        self.stage_numbers = [schedule.stage_of(self.rank, chunk)[1] for chunk in range(len(stages))]
        # The last B or W of each chunk: after it the chunk's gradients are complete
        self.last_actions = {action.chunk: action for action in schedule.actions[self.rank] if action.kind in "BW"}
        split = config.tp if config.sequence_parallel else 1
        self.shape = config.micro_batch, config.rank_seq_len // split, config.model_config.hidden  # of every message
        # Of all tokens: with sequence parallelism, a later stage's input holds fewer. A later step sets those of a part
        self.positions = torch.arange(config.seq_len, device=mesh.device)
        self.step: Step | None = None  # the last one that has begun

    def run(
        self, micro_batch: Callable[[int], tuple], target_tokens: int, scale: float = 1.0, tracer: Tracer | None = None
    ) -> torch.Tensor:
        """Run forward and backward of all micro-batches of a step.

        Args:
            micro_batch: index -> (tokens, targets), each (micro_batch, seq_len), and perhaps a mask for the attention
                of all stages. Without one, only the first stage and the last call it.
            target_tokens: of the whole global batch, since every loss is a share of its mean.
            scale: a factor for the losses before the backward, see `LossScaler`.

        Returns this rank's share of the loss, () of float64: zero, unless the rank holds the last stage.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        self.step = Step(micro_batch, target_tokens, scale, tracer or Tracer(None, self.mesh, None), loss)
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
        for direction in ("forward", "backward"):
            self._complete_send(direction)
        return self.step.loss

    def finish(self) -> list[torch.Tensor]:
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
            if self.config.layer_delay:
                layers = len(self.stages[action.chunk].layers)
                least = DELAYS[action.kind] * layers * self.config.layer_delay * 1e-3
                time.sleep(max(0.0, start + least - self.clock()))

    def clock(self) -> float:
        """Seconds, for the time that an action takes: without its waits, in a later step where two take turns."""
        return time.perf_counter()

    def _forward(self, action: Action, stage_input: torch.Tensor | None) -> None:
        stage = self.stages[action.chunk]
        # Tokens enter at the embedding, targets at the head; but all stages need a later step's masks of documents
        needs_data = stage.has_embedding or stage.has_head or self.config.mask_documents
        x, targets, *mask = self.step.micro_batch(action.micro_batch) if needs_data else (None, None)
        if stage_input is not None:
            x = stage_input.detach().requires_grad_()  # the graph of this stage begins here
        y = stage(x, self.positions, *mask, targets=targets)
        if self.stage_numbers[action.chunk] < self.schedule.stages - 1:
            self.step.outputs[self.schedule.output_of(self.rank, action)] = y.detach()
        else:
            if not stage.returns_loss:  # as the head of a later step does
                y = vocab_parallel_cross_entropy_sum(y, targets, self.config.model_config.vocab, self.mesh.tp)
            share = y / self.step.target_tokens
            self.step.loss += share.detach()
            y = share * self.step.scale
        self.step.kept[action.chunk, action.micro_batch] = x, y
        self.step.peak_in_flight = max(self.step.peak_in_flight, len(self.step.kept))

    def _backward(self, action: Action, output_gradient: torch.Tensor | None) -> None:
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

    def _wait_for_input(self, action: Action) -> torch.Tensor | None:
        """Return the hidden states or the gradient that the action takes; None if it takes none."""
        needed = self.schedule.input_of(self.rank, action)
        if needed not in self.step.pending_receives:  # computed by another stage of this rank
            return self.step.outputs.pop(needed) if needed else None
        tensor, work = self.step.pending_receives.pop(needed)
        work.wait()
        return tensor

    def _receive(self, transfer: Transfer) -> None:
        tensor = torch.empty(self.shape, dtype=self.config.torch_dtype, device=self.mesh.device)
        work = collectives.receive(tensor, transfer.peer, self._group(transfer.output.direction), async_op=True)
        self.step.pending_receives[transfer.output] = tensor, work

    def _send(self, transfer: Transfer) -> None:
        direction = transfer.output.direction
        self._complete_send(direction)  # the previous one: an action has run since, so it is usually complete
        tensor = self.step.outputs.pop(transfer.output).contiguous()
        work = collectives.send(tensor, transfer.peer, self._group(direction), async_op=True)
        self.step.pending_sends[direction] = tensor, work

    def _complete_send(self, direction: str) -> None:
        """Wait for the pending send in this direction, if any, and free the tensor that it sent.

        The graph still refers to this tensor, but no operation saved it, because a stage ends in an addition
        (Megatron-LM: deallocate_pipeline_outputs).
        """
        if direction in self.step.pending_sends:
            tensor, work = self.step.pending_sends.pop(direction)
            work.wait()
            tensor.untyped_storage().resize_(0)

    def _group(self, direction: str) -> Group:
        return self.mesh.pp_forward if direction == "forward" else self.mesh.pp_backward
