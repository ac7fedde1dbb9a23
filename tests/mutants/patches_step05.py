"""Known-wrong variants of the pipeline: what each gets wrong, and then how.

Those of the first half train another model. Those of the second train the right one, but send, keep or wait for more
than they should: no curve shows it.
"""

import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

from common import collectives
from common.collectives import Work
from common.weights import initialisation
from step03_zero.unit import Unit
from step03_zero.zero import Zero
from step04_tensor_parallel import linear
from step05_pipeline import stages, train
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.weight_gradients import WeightGradStore
from tests.mutants import Mutants

MUTANTS = Mutants()
initialise, run, forward, backward = Pipeline.__init__, Pipeline.run, Pipeline._forward, Pipeline._backward
weights, wait = Pipeline._weight_gradients, Pipeline._wait_for_input
receive, send = Pipeline._receive, Pipeline._send
fetch, free, finish, decoder = Unit.fetch, Unit.free, Zero.finish, stages.Decoder
backward_of_zero = Zero.backward
all_reduce, norm, sum_extra_groups = collectives.all_reduce, train.gradient_norm, train.sum_extra_groups
random_box, weight_gradient = initialisation.random_box, linear.weight_gradient
autograd_backward = torch.autograd.backward


# ---- wrong numbers ---------------------------------------------------------------------------------------------------


@MUTANTS.replaces("missing share of micro-batches", Pipeline, "run")
def _(self, micro_batch, target_tokens, scale, tracer):
    """Every micro-batch's loss is the mean over its own tokens: gradients are as many times too large as there are
    micro-batches. The loss is reported right, and AdamW divides the factor away.
    """
    return run(self, micro_batch, target_tokens, scale * self.schedule.micro_batches, tracer)


@MUTANTS.replaces("loss of one rank", train, "collectives")
class _:
    """The first rank reports its own share of the loss, which is nothing: the last stage has it."""

    @staticmethod
    def all_reduce(tensor, group, *rest):
        return Work() if group.name == "pp_forward" else all_reduce(tensor, group, *rest)


@MUTANTS.replaces("reduced before the last micro-batch", Pipeline, "_gradients_complete")
@contextmanager
def _(self, action):
    """Gradients are reduced with the first micro-batch: those of later ones stay on their rank."""
    zero = self.zero_wrappers[action.chunk]
    with zero.backward(last=False):
        yield
    if action.micro_batch == 0:
        for unit in zero.units:
            all_reduce(unit.bucket.flat, unit.replicas)


@MUTANTS.replaces("reduced before the last micro-batch", Zero, "_complete")
def _(self):  # the reduction after the last micro-batch has nothing to do any more
    units, self.in_flight = self.in_flight, []
    for unit in units:
        unit.complete()
        unit.summing = Work()


@MUTANTS.replaces("W before its I", Pipeline, "_weight_gradients")
def _(self, action):
    """W runs a micro-batch too early: it finds what the previous I has deferred, and the last I's is never computed."""
    mine = action.chunk, action.micro_batch
    self.step.deferred[mine] = self.step.deferred.pop((action.chunk, action.micro_batch - 1), WeightGradStore())
    weights(self, action)


@MUTANTS.replaces("W with the input of another micro-batch", linear, "weight_gradient")
def _(weight, gradient, x, buffers={}):  # noqa: B006
    """A layer keeps its input for W in one buffer, which the next micro-batch overwrites."""
    if hasattr(weight, "postpone"):
        x = buffers.setdefault(weight, torch.empty_like(x)).copy_(x)
    return weight_gradient(weight, gradient, x)


@MUTANTS.replaces("norms forgotten by split backwards", Zero, "backward")
@contextmanager
def _(self, last, complete=True):
    """Where backwards are split, W computes the gradients of the linear layers, and nobody those of the rest."""
    ignored = mock.patch.object(self, "accumulate", lambda *_: None)
    with backward_of_zero(self, last, complete), nullcontext() if complete else ignored:
        yield


def sum_all_but(group: str, parameters, gradients, mesh):
    kept = [(p, g) for p, g in zip(parameters, gradients, strict=True) if group not in p.spec.extra_groups]
    sum_extra_groups([p for p, _ in kept], [g for _, g in kept], mesh)


@MUTANTS.replaces("stale tied gradient", train, "sum_extra_groups")
def _(*arguments):
    """A matrix that is embedding and head is updated on either end by that end's gradient alone."""
    sum_all_but("embed", *arguments)


@MUTANTS.replaces("two copies drift apart", train, "sum_extra_groups")
def _(*arguments):
    """Two copies of the model, each updated by the gradients of its own micro-batches."""
    sum_all_but("mirror", *arguments)


def count_twice(group: str, parameters, gradients, world):
    specs = [replace(p.spec, owner=p.spec.owner or group in p.spec.extra_groups) for p in parameters]
    return norm([SimpleNamespace(spec=spec) for spec in specs], gradients, world)


@MUTANTS.replaces("tied matrix counted twice", train, "gradient_norm")
def _(*arguments):
    """Both ends count the matrix that they share in the gradient norm."""
    return count_twice("embed", *arguments)


@MUTANTS.replaces("two copies counted twice", train, "gradient_norm")
def _(*arguments):
    """Both copies of the model are counted in the gradient norm."""
    return count_twice("mirror", *arguments)


@MUTANTS.replaces("targets of another micro-batch", Pipeline, "run")
def _(self, micro_batch, *rest):
    """The last stage takes micro-batches in another order than the first."""
    return run(self, lambda index: (micro_batch(index)[0], micro_batch(index ^ 1)[1]), *rest)


@MUTANTS.replaces("gradients of another micro-batch", Pipeline, "_backward")
def _(self, action, gradient):
    """Gradients arrive in the order of the micro-batches, and a stage takes its graphs from a stack."""
    if gradient is not None:
        mine = action.chunk, action.micro_batch
        held = self.step.in_flight
        newest = max(key for key in held if key[0] == action.chunk)
        held[mine], held[newest] = held[newest], held[mine]
    backward(self, action, gradient)


@MUTANTS.replaces("one receive buffer", Pipeline, "_receive")
def _(self, transfer, buffers={}):  # noqa: B006
    """Every message arrives in the same memory, also while an earlier one is kept for its backward."""
    direction = transfer.output.direction
    tensor = buffers.setdefault(direction, torch.empty(self.shape, dtype=self.config.torch_dtype))
    work = collectives.receive(tensor, transfer.peer, self._group(direction), async_op=True)
    self.step.pending_receives[transfer.output] = tensor, work


@MUTANTS.replaces("positions of the slice", Pipeline, "__init__")
def _(self, *arguments):
    """Under sequence parallelism, later stages count positions over their input: a part of the sequence."""
    initialise(self, *arguments)
    for module, stage in zip(self.stages, self.stage_numbers, strict=True):
        if stage > 0:
            module.register_forward_pre_hook(lambda _, given: (given[0], given[1] % given[0].shape[1]))


first_layer = [0]  # of the stage that was built last


@MUTANTS.replaces("layers counted from zero on every stage", stages, "Decoder")
def _(config, core, first, last):
    """Every stage draws its layers as if they were the first ones of the model."""
    first_layer[0] = first
    return decoder(config, core, first, last)


@MUTANTS.replaces("layers counted from zero on every stage", initialisation, "random_box")
def _(spec, *rest):
    name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - first_layer[0]}", spec.name)
    return random_box(replace(spec, name=name), *rest)


fetched = set()  # units


@MUTANTS.replaces("weights of the first step", Unit, "fetch")
def _(self):
    """Stage 3 gathers the weights for all micro-batches, and keeps them over the update as well."""
    if self in fetched:
        self.gathering = Work()
    fetched.add(self)
    return fetch(self)


@MUTANTS.replaces("weights of the first step", Unit, "free")
def _(self):
    if self not in fetched:
        free(self)


# ---- right numbers at a higher price ---------------------------------------------------------------------------------


@MUTANTS.replaces("sent outputs kept", Pipeline, "_complete_send")
def _(self, direction):
    """What was sent keeps its memory until its backward, which does not look at it."""
    if direction in self.step.pending_sends:
        self.step.pending_sends.pop(direction)[1].wait()


graphs = {}


@MUTANTS.replaces("graph kept until W", Pipeline, "_backward")
def _(self, action, gradient):
    """I retains the graph, as splitting by two calls of autograd does: activations live until W."""
    key = action.chunk, action.micro_batch
    if action.kind == "I":
        graphs[key] = self.step.in_flight[key]
    with mock.patch.object(torch.autograd, "backward", lambda *each: autograd_backward(*each, retain_graph=True)):
        backward(self, action, gradient)


@MUTANTS.replaces("graph kept until W", Pipeline, "_weight_gradients")
def _(self, action):
    weights(self, action)
    del graphs[action.chunk, action.micro_batch]


@MUTANTS.replaces("operands of weight gradients kept", Pipeline, "_weight_gradients")
def _(self, action, kept=[]):  # noqa: B006
    """W leaves what it was computed from where it was."""
    kept.append(list(self.step.deferred[action.chunk, action.micro_batch]))
    weights(self, action)


@MUTANTS.replaces("reduced at the end", Pipeline, "_gradients_complete")
@contextmanager
def _(self, action):
    """All gradients are reduced after the whole pipeline has come to its end."""
    with self.zero_wrappers[action.chunk].backward(last=False):
        yield


@MUTANTS.replaces("gathered for each micro-batch", Pipeline, "_forward")
def _(self, action, stage_input):
    """Stage 3 frees the weights of a stage when it is done with a micro-batch, and gathers them for the next."""
    for unit in self.zero_wrappers[action.chunk].units:
        unit.fetch().wait()
        unit.free()
    forward(self, action, stage_input)


@MUTANTS.replaces("weights kept after the step", Zero, "finish")
def _(self):
    """Stage 3 leaves the gathered weights in memory while the optimizer works."""
    with mock.patch.object(Unit, "free", lambda unit: None):
        return finish(self)


asked = {}  # receives that have not been issued yet, by output


@MUTANTS.replaces("received when needed", Pipeline, "_receive")
def _(self, transfer):
    """A rank asks for its input when it has nothing else to do."""
    asked[transfer.output] = transfer


@MUTANTS.replaces("received when needed", Pipeline, "_wait_for_input")
def _(self, action):
    needed = self.schedule.input_of(self.rank, action)
    if needed in asked:
        receive(self, asked.pop(needed))
    return wait(self, action)


@MUTANTS.replaces("sends waited for", Pipeline, "_send")
def _(self, transfer):
    """A rank goes on only when its output has arrived."""
    send(self, transfer)
    self._complete_send(transfer.output.direction)


@MUTANTS.replaces("wait counted as work", Pipeline, "_wait_for_input")
def _(self, action):
    """In the trace, an action includes the wait for its input."""
    with self.step.tracer.phase("forward", action=str(action)):
        return wait(self, action)


@MUTANTS.replaces("one communicator for both directions", Pipeline, "_group")
def _(self, direction):
    """Activations and their gradients share a communicator, where an early receive of the one delays the other."""
    return replace(getattr(self.mesh, f"pp_{direction}"), handle=self.mesh.pp_forward.handle)
