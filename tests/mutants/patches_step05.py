"""Known-wrong variants of the pipeline, as small patches. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep or wait for more than they have to.
"""

import functools
import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

import step05_pipeline.train as step05
from common import collectives, initialisation, weight_gradients
from common.collectives import Work
from step03_zero.zero import Unit, Zero
from step05_pipeline import stages
from step05_pipeline.pipeline import Pipeline
from tests.mutants.patches_step04 import swap, without_group

# ---- wrong results ---------------------------------------------------------------------------------------------------


def _missing_share(stack):
    """Every micro-batch's loss is the mean over its own tokens: gradients are as many times too large as there are
    micro-batches. The loss is reported right, and AdamW divides the factor away.
    """
    run = Pipeline.run

    def wrong(self, micro_batch, target_tokens, scale, tracer):
        return run(self, micro_batch, target_tokens, scale * self.schedule.micro_batches, tracer)

    swap(stack, Pipeline, "run", wrong)


def _loss_of_one_rank(stack):
    """The first rank reports its own share of the loss, which is nothing: the last stage has it."""

    def wrong(tensor, group, *rest):
        return Work() if group.name == "pp_forward" else collectives.all_reduce(tensor, group, *rest)

    swap(stack, step05, "collectives", SimpleNamespace(all_reduce=wrong))


def _reduced_too_early(stack):
    """Gradients are reduced with the first micro-batch: those of later ones stay on their rank."""

    @contextmanager
    def wrong(self, action):
        zero = self.zero_wrappers[action.chunk]
        with zero.no_sync():
            yield
        if action.micro_batch == 0:
            for unit in zero.units:
                collectives.all_reduce(unit.bucket.flat, zero.replicas)

    def complete(self):  # of the reduction after the last micro-batch: nothing to do any more
        unit, self.in_flight = self.in_flight, None
        if unit is not None:
            unit.complete()
            unit.work = Work()

    swap(stack, Pipeline, "_gradients_complete", wrong)
    swap(stack, Zero, "_complete", complete)


def _w_before_its_i(stack):
    """W comes a micro-batch too early: it finds what the I before has put off, and the last I's is never computed."""

    @torch.no_grad()
    def wrong(self, action):
        store = self.deferred.pop((action.chunk, action.micro_batch - 1), weight_gradients.WeightGradStore())
        with self._gradients_complete(action):
            for weight, gradient in store.compute():
                self.zero_wrappers[action.chunk].accumulate(weight, gradient)

    swap(stack, Pipeline, "_weight_gradients", wrong)


def _inputs_of_another_micro_batch(stack):
    """A layer keeps its input for W in one buffer, which the next micro-batch overwrites."""
    real, buffers = weight_gradients.weight_gradient, {}

    def wrong(weight, gradient, x):
        if weight_gradients._store is None:
            return real(weight, gradient, x)
        buffer = buffers.setdefault(weight, torch.empty_like(x)).copy_(x)
        weight_gradients._store.append((weight, gradient, buffer))
        return None

    swap(stack, weight_gradients, "weight_gradient", wrong)


def _norms_forgotten(stack):
    """Where backwards are split, W computes the gradients of the linear layers, and nobody those of the rest."""

    @contextmanager
    def wrong(self):
        with mock.patch.object(self, "accumulate", lambda *_: None):
            yield

    swap(stack, Zero, "only_accumulate", wrong)


def _stale_tied_gradient(stack):
    """A matrix that is embedding and head is updated on either end by that end's gradient alone."""
    without_group(stack, step05, "embed")


def _copies_drift(stack):
    """Two copies of the model, each updated by the gradients of its own micro-batches."""
    without_group(stack, step05, "mirror")


def _counted_twice(stack, group: str):
    real = step05.gradient_norm

    def wrong(parameters, gradients, world):
        counted = [
            SimpleNamespace(spec=replace(p.spec, owner=p.spec.owner or group in p.spec.extra_groups))
            for p in parameters
        ]
        return real(counted, gradients, world)

    swap(stack, step05, "gradient_norm", wrong)


def _tied_counted_twice(stack):
    """Both ends count the matrix that they share in the gradient norm."""
    _counted_twice(stack, "embed")


def _copies_counted_twice(stack):
    """Both copies of the model are counted in the gradient norm."""
    _counted_twice(stack, "mirror")


def _targets_crossed(stack):
    """The last stage takes micro-batches in another order than the first."""
    run = Pipeline.run

    def wrong(self, micro_batch, *rest):
        return run(self, lambda index: (micro_batch(index)[0], micro_batch(index ^ 1)[1]), *rest)

    swap(stack, Pipeline, "run", wrong)


def _gradients_crossed(stack):
    """Gradients come in the order of the micro-batches, and a stage takes its graphs from a stack."""
    backward = Pipeline._backward

    def wrong(self, action, gradient):
        if gradient is not None:
            mine = action.chunk, action.micro_batch
            newest = max(key for key in self.in_flight if key[0] == action.chunk)
            self.in_flight[mine], self.in_flight[newest] = self.in_flight[newest], self.in_flight[mine]
        backward(self, action, gradient)

    swap(stack, Pipeline, "_backward", wrong)


def _one_receive_buffer(stack):
    """Every message arrives in the same memory, also while an earlier one is kept for its backward."""

    buffers = {}

    def wrong(self, transfer):
        direction = transfer.output.direction
        tensor = buffers.setdefault(direction, torch.empty(self.shape, dtype=self.config.torch_dtype))
        work = collectives.receive(tensor, transfer.peer, self._group(direction), async_op=True)
        self.pending_receives[transfer.output] = tensor, work

    swap(stack, Pipeline, "_receive", wrong)


def _positions_of_the_slice(stack):
    """Under sequence parallelism, later stages count positions over what they are given: a part of the sequence."""
    initialise = Pipeline.__init__

    def wrong(self, *args):
        initialise(self, *args)
        for module, stage in zip(self.stages, self.stage_numbers, strict=True):
            if stage > 0:
                module.register_forward_pre_hook(lambda _, given: (given[0], given[1] % given[0].shape[1]))

    swap(stack, Pipeline, "__init__", wrong)


def _layers_counted_from_zero(stack):
    """Every stage draws its layers as if they were the first ones of the model."""
    real, decoder, offset = initialisation.random_box, stages.Decoder, [0]

    def build(config, core, first, last):
        offset[0] = first
        return decoder(config, core, first, last)

    def wrong(spec, *rest):
        name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - offset[0]}", spec.name)
        return real(replace(spec, name=name), *rest)

    swap(stack, stages, "Decoder", build)
    swap(stack, initialisation, "random_box", wrong)


def _weights_of_the_first_step(stack):
    """Stage 3 gathers the weights for all micro-batches, and keeps them over the update as well."""
    fetch, free, fetched = Unit.fetch, Unit.free, set()

    def wrong(self):
        if self in fetched:
            self.gathering = Work()
        else:
            fetch(self)
            fetched.add(self)
        return self.gathering

    swap(stack, Unit, "fetch", wrong)
    swap(stack, Unit, "free", lambda self: None if self in fetched else free(self))


# ---- right results at a higher price ---------------------------------------------------------------------------------


def _outputs_kept(stack):
    """What was sent keeps its memory until its backward, which does not look at it."""

    def wrong(self, direction):
        if direction in self.pending_sends:
            self.pending_sends.pop(direction)[1].wait()

    swap(stack, Pipeline, "_complete_send", wrong)


def _graph_kept_until_w(stack):
    """I retains the graph, as splitting by two calls of autograd does: activations live until W."""
    backward, weights = Pipeline._backward, Pipeline._weight_gradients
    retaining = functools.partial(torch.autograd.backward, retain_graph=True)
    graphs = {}

    def wrong(self, action, gradient):
        key = action.chunk, action.micro_batch
        if action.kind == "I":
            graphs[key] = self.in_flight[key]
        with mock.patch.object(torch.autograd, "backward", retaining):
            backward(self, action, gradient)

    def w(self, action):
        weights(self, action)
        del graphs[action.chunk, action.micro_batch]

    swap(stack, Pipeline, "_backward", wrong)
    swap(stack, Pipeline, "_weight_gradients", w)


def _reduced_at_the_end(stack):
    """All gradients are reduced after the whole pipeline has come to its end."""

    @contextmanager
    def wrong(self, action):
        with self.zero_wrappers[action.chunk].no_sync():
            yield

    swap(stack, Pipeline, "_gradients_complete", wrong)


def _gathered_for_each_micro_batch(stack):
    """Stage 3 frees the weights of a stage when it is done with a micro-batch, and gathers them for the next."""
    forward = Pipeline._forward

    def wrong(self, action, given):
        for unit in self.zero_wrappers[action.chunk].units:
            unit.fetch().wait()
            unit.free()
        forward(self, action, given)

    swap(stack, Pipeline, "_forward", wrong)


def _received_when_needed(stack):
    """A rank asks for its input when it has nothing else to do."""
    receive, wait = Pipeline._receive, Pipeline._wait_for_input
    asked = {}

    def later(self, transfer):
        asked[transfer.output] = transfer

    def wrong(self, action):
        needed = self.schedule.input_of(self.rank, action)
        if needed in asked:
            receive(self, asked.pop(needed))
        return wait(self, action)

    swap(stack, Pipeline, "_receive", later)
    swap(stack, Pipeline, "_wait_for_input", wrong)


def _sends_waited_for(stack):
    """A rank goes on only when its output has arrived."""
    send = Pipeline._send

    def wrong(self, transfer):
        send(self, transfer)
        self._complete_send(transfer.output.direction)

    swap(stack, Pipeline, "_send", wrong)


def _operands_kept(stack):
    """W leaves what it was computed from where it was."""

    def wrong(self):
        for weight, gradient, x in self:
            yield weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)

    weights, kept = Pipeline._weight_gradients, []

    def w(self, action):
        kept.append(self.deferred[action.chunk, action.micro_batch])
        weights(self, action)

    swap(stack, weight_gradients.WeightGradStore, "compute", wrong)
    swap(stack, Pipeline, "_weight_gradients", w)


def _weights_kept_after_the_step(stack):
    """Stage 3 leaves the gathered weights in memory while the optimizer works."""
    finish = Zero.finish

    def wrong(self):
        with mock.patch.object(Unit, "free", lambda unit: None):
            return finish(self)

    swap(stack, Zero, "finish", wrong)


def _wait_is_work(stack):
    """In the trace, an action includes the wait for its input."""
    wait = Pipeline._wait_for_input

    def wrong(self, action):
        with self.tracer.phase("forward", action=str(action)):
            return wait(self, action)

    swap(stack, Pipeline, "_wait_for_input", wrong)


def _one_communicator(stack):
    """Activations and their gradients share a communicator, where an early receive of the one holds up the other."""

    def wrong(self, direction):
        return replace(getattr(self.mesh, f"pp_{direction}"), handle=self.mesh.pp_forward.handle)

    swap(stack, Pipeline, "_group", wrong)


MUTANTS = {
    "missing share of micro-batches": _missing_share,
    "loss of one rank": _loss_of_one_rank,
    "reduced before the last micro-batch": _reduced_too_early,
    "W before its I": _w_before_its_i,
    "W with the input of another micro-batch": _inputs_of_another_micro_batch,
    "norms forgotten by split backwards": _norms_forgotten,
    "stale tied gradient": _stale_tied_gradient,
    "two copies drift apart": _copies_drift,
    "tied matrix counted twice": _tied_counted_twice,
    "two copies counted twice": _copies_counted_twice,
    "targets of another micro-batch": _targets_crossed,
    "gradients of another micro-batch": _gradients_crossed,
    "one receive buffer": _one_receive_buffer,
    "positions of the slice": _positions_of_the_slice,
    "layers counted from zero on every stage": _layers_counted_from_zero,
    "weights of the first step": _weights_of_the_first_step,
    "sent outputs kept": _outputs_kept,
    "graph kept until W": _graph_kept_until_w,
    "reduced at the end": _reduced_at_the_end,
    "gathered for each micro-batch": _gathered_for_each_micro_batch,
    "received when needed": _received_when_needed,
    "sends waited for": _sends_waited_for,
    "operands of weight gradients kept": _operands_kept,
    "weights kept after the step": _weights_kept_after_the_step,
    "wait counted as work": _wait_is_work,
    "one communicator for both directions": _one_communicator,
}
