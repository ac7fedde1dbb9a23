"""Pipeline parallelism by hand: one executor for every schedule.

A schedule (`schedules.py`) says in which order a rank works: F, the forward of a micro-batch through one of its stages;
B, the backward; or I and W, the backward's two halves. `messages.py` has put the sends and receives between them. What
is left to do here is what each of them means, and when memory is given back:
  F  takes hidden states (the first stage: tokens), keeps its input and its output until the backward
  B  takes the gradient of its output (the last stage: the loss's own, 1), hands on that of its input
  I  does the same, but puts the gradients of linear weights off until W
Nothing here depends on which schedule it is, nor on how layers are cut or gradients reduced.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from common import collectives, weight_gradients
from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from step03_zero.zero import Zero
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from step05_pipeline.schedules.actions import Action, Output, Schedule
from step05_pipeline.schedules.messages import Message, Receive, place_messages

PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
DELAYS = {"F": 1, "B": 2, "I": 1, "W": 1}  # --layer-delay: how many of them a layer takes


class Pipeline:
    """Runs one rank's part of a schedule.

    Args:
        stages: this rank's, in the order of its chunks; `zero_wrappers` take their gradients.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: list[Decoder],
        zero_wrappers: list[Zero],
        config: TrainConfig,
        mesh: Mesh,
    ):
        self.schedule, self.rank = schedule, mesh.pp_forward.rank
        self.config, self.mesh, self.stages, self.zero_wrappers = config, mesh, stages, zero_wrappers
        self.program = place_messages(schedule)[self.rank]
        self.stage = [schedule.stage_of(self.rank, chunk)[1] for chunk in range(len(stages))]  # of each chunk
        # After the last one of a chunk its gradients are complete
        self.last_actions = {action.chunk: action for action in schedule.actions[self.rank] if action.kind in "BW"}
        split = config.tp if config.sequence_parallel else 1
        self.shape = config.micro_batch, config.seq_len // split, config.model_config.hidden  # of every message
        self.positions = torch.arange(config.seq_len, device=mesh.device)
        self.peak_alive = 0  # micro-batches between F and B (or I), over all chunks; of the last step

    def run(
        self, micro_batch: Callable[[int], tuple], target_tokens: int, scale: float = 1.0, tracer: Tracer | None = None
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches of a step. This rank's share of the loss, 0-d float64.

        Args:
            micro_batch: index -> (tokens, targets), each (micro_batch, seq_len).
            target_tokens: of the whole global batch: every loss is a share of its mean.
            scale: what losses are multiplied with before the backward.
        """
        self.micro_batch, self.target_tokens, self.scale = micro_batch, target_tokens, scale
        self.tracer = tracer or Tracer(None, self.mesh, None)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        self.alive: dict[tuple[int, int], tuple] = {}  # (chunk, micro-batch): input and output of its forward
        self.put_off: dict[tuple[int, int], list] = {}  # the same: weights' gradients between I and W
        # Hidden states and their gradients: made on this rank, or received into a buffer, with the receive under way
        self.made: dict[Output, torch.Tensor] = {}
        self.arriving: dict[Output, tuple[torch.Tensor, collectives.Work]] = {}
        self.leaving: dict[str, tuple[torch.Tensor, collectives.Work]] = {}  # by direction: the send under way
        self.peak_alive = 0
        with self.tracer.phase("forward"):
            for zero in self.zero_wrappers:
                zero.gather()
        for item in self.program:
            if isinstance(item, Action):
                self._act(item)
            elif isinstance(item, Receive):
                self._receive(item.message)
            else:
                self._send(item.message)
        for direction in list(self.leaving):
            self._sent(direction)
        return self.loss

    def finish(self) -> list[torch.Tensor]:
        """After `run`: the summed gradients, one for each shard of each stage."""
        return [gradient for zero in self.zero_wrappers for gradient in zero.finish()]

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        given = self._wait_for_input(action)  # that is the bubble, and no part of the action
        start = time.perf_counter()
        with self.tracer.phase(PHASES[action.kind], action=str(action)):
            if action.kind == "F":
                self._forward(action, given)
            elif action.kind == "W":
                self._weight_gradients(action)
            else:
                self._backward(action, given)
            if self.config.layer_delay:
                layers = len(self.stages[action.chunk].layers)
                least = DELAYS[action.kind] * layers * self.config.layer_delay * 1e-3
                time.sleep(max(0.0, start + least - time.perf_counter()))

    def _forward(self, action: Action, given: torch.Tensor | None) -> None:
        # The graph of a stage begins at what it is given
        x = self.micro_batch(action.micro_batch)[0] if given is None else given.detach().requires_grad_()
        y = self.stages[action.chunk](x, self.positions)
        if self.stage[action.chunk] < self.schedule.stages - 1:
            self.made[self.schedule.makes(self.rank, action)] = y.detach()
        else:
            _, targets = self.micro_batch(action.micro_batch)
            total = vocab_parallel_cross_entropy_sum(y, targets, self.config.model_config.vocab, self.mesh.tp)
            share = total / self.target_tokens
            self.loss += share.detach()
            y = share * self.scale
        self.alive[action.chunk, action.micro_batch] = x, y
        self.peak_alive = max(self.peak_alive, len(self.alive))

    def _backward(self, action: Action, gradient: torch.Tensor | None) -> None:
        x, y = self.alive.pop((action.chunk, action.micro_batch))
        if action.kind == "B":
            with self._gradients_complete(action):
                torch.autograd.backward(y, gradient)
        else:
            with self.zero_wrappers[action.chunk].only_accumulate(), weight_gradients.put_off() as later:
                torch.autograd.backward(y, gradient)
            self.put_off[action.chunk, action.micro_batch] = later
        if self.stage[action.chunk] > 0:
            self.made[self.schedule.makes(self.rank, action)] = x.grad

    @torch.no_grad()
    def _weight_gradients(self, action: Action) -> None:
        later = self.put_off.pop((action.chunk, action.micro_batch))
        with self._gradients_complete(action):
            for weight, gradient in weight_gradients.compute(later):
                self.zero_wrappers[action.chunk].accumulate(weight, gradient)

    @contextmanager
    def _gradients_complete(self, action: Action) -> Iterator[None]:
        """Around what completes a micro-batch's gradients of a stage.

        After the last one they are reduced at once, while the rest of the pipeline still works.
        """
        zero, last = self.zero_wrappers[action.chunk], action == self.last_actions[action.chunk]
        with zero.no_sync(not last):
            yield
        if last and not zero.each_micro_batch:
            zero.launch_rest()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _wait_for_input(self, action: Action) -> torch.Tensor | None:
        """Hidden states or their gradient, once they are there; None where an action needs none."""
        needed = self.schedule.needs(self.rank, action)
        if needed not in self.arriving:  # another stage of this rank has made it
            return self.made.pop(needed) if needed else None
        tensor, work = self.arriving.pop(needed)
        work.wait()
        return tensor

    def _receive(self, message: Message) -> None:
        tensor = torch.empty(self.shape, dtype=self.config.torch_dtype, device=self.mesh.device)
        work = collectives.receive(tensor, message.sender, self._group(message.direction), async_op=True)
        self.arriving[message.output] = tensor, work

    def _send(self, message: Message) -> None:
        self._sent(message.direction)  # the one before: an action has passed since
        tensor = self.made.pop(message.output).contiguous()
        work = collectives.send(tensor, message.receiver, self._group(message.direction), async_op=True)
        self.leaving[message.direction] = tensor, work

    def _sent(self, direction: str) -> None:
        """Wait for the send under way and free what it sent. The backward of a stage needs its output's shape only."""
        if direction in self.leaving:
            tensor, work = self.leaving.pop(direction)
            work.wait()
            tensor.untyped_storage().resize_(0)

    def _group(self, direction: str):
        return self.mesh.pp_forward if direction == "forward" else self.mesh.pp_backward
