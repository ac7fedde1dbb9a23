"""Known-wrong variants of the pipeline: what each gets wrong, and then how.

Those of the first half train another model. Those of the second train the right one, but send, keep or wait for more
than they should: no curve shows it.
"""

import re
from dataclasses import replace

from common.weights import initialisation
from step03_zero.unit import Unit
from step03_zero.zero import Zero
from step04_tensor_parallel import linear
from step05_pipeline import stages, train
from step05_pipeline.pipeline import Pipeline
from tests.mutants import Mutants
from tests.mutants.patches_step03 import GIVEN_BACK, REPLICAS
from tests.mutants.patches_step04 import counted_twice, without_group

MUTANTS = Mutants()
edits, replaces = MUTANTS.edits, MUTANTS.replaces
decoder, random_box = stages.Decoder, initialisation.random_box
UNTIL_LAST = "with zero.backward(last):", "with zero.backward(last=False):"

# ---- wrong numbers ---------------------------------------------------------------------------------------------------

# Every micro-batch's loss is the mean over its own tokens: gradients are as many times too large as there are
# micro-batches. The loss is reported right, and AdamW divides the factor away
scale = "self.step.scale", "self.step.scale * self.schedule.micro_batches"
edits("missing share of micro-batches", Pipeline, "_forward", scale)
# The first rank reports its own share of the loss, which is nothing: the last stage has it
edits("loss of one rank", train, "train_step", ("collectives.all_reduce(loss, mesh.pp_forward)", "pass"))
# Gradients are reduced with the first micro-batch, and not after the last one: those of later ones stay on their rank
name = "reduced before the last micro-batch"
last = "if last and not zero.each_micro_batch:\n        zero.launch_rest()"
first = "for unit in zero.units if action.micro_batch == 0 else ():\n        "
first += "collectives.all_reduce(unit.bucket.flat, unit.replicas)"
edits(name, Pipeline, "_gradients_complete", UNTIL_LAST, (last, first))
edits(name, Unit, "sum_over_replicas", (REPLICAS, "collectives.Work()"))
# W runs a micro-batch too early: it finds what the previous I has deferred, and the last I's is never computed
early = "action.micro_batch))", "action.micro_batch - 1), WeightGradStore())"
edits("W before its I", Pipeline, "_weight_gradients", early)
# A layer keeps its input for W in one buffer, which the next micro-batch overwrites
buffer = "weight.__dict__.setdefault('buffer', torch.empty_like(x)).copy_(x)"
postponed = "(weight, gradient, x, multiply))", f"(weight, gradient, {buffer}, multiply))"
edits("W with the input of another micro-batch", linear, "weight_gradient", postponed)
# Where backwards are split, W computes the gradients of the linear layers, and nobody those of the rest
name = "norms forgotten by split backwards"
noted = "self.last_micro_batch = last\n", "self.last_micro_batch, self.complete = last, complete\n"
edits(name, Zero, "backward", noted)
index = "index = self.index_of[parameter]"
edits(name, Zero, "accumulate", (index, f"if not self.complete: return\n    {index}"))
# A matrix that is embedding and head is updated on either end by that end's gradient alone
edits("stale tied gradient", train, "sum_extra_groups", without_group("embed"))
# Two copies of the model, each updated by the gradients of its own micro-batches
edits("two copies drift apart", train, "sum_extra_groups", without_group("mirror"))
# Both ends count the matrix that they share in the gradient norm; or both copies of the model are counted
edits("tied matrix counted twice", train, "gradient_norm", counted_twice("embed"))
edits("two copies counted twice", train, "gradient_norm", counted_twice("mirror"))
# The last stage takes micro-batches in another order than the first
batch = "x, targets, *context = self.step.micro_batch(action.micro_batch)"
other = "(x, *_), (_, targets, *context) = map(self.step.micro_batch, (action.micro_batch, action.micro_batch ^ 1))"
edits("targets of another micro-batch", Pipeline, "_forward", (batch, other))
# Gradients arrive in the order of the micro-batches, and a stage takes its graphs from a stack
newest = "max(each for each in self.step.in_flight if each[0] == action.chunk)"
stack = "in_flight.pop(key)", f"in_flight.pop(key if output_gradient is None else {newest})"
edits("gradients of another micro-batch", Pipeline, "_backward", stack)
# Every message arrives in the same memory, also while an earlier one is kept for its backward
memory = "torch.empty(self.shape, dtype=self.config.torch_dtype, device=self.mesh.device)"
same = f"self.__dict__.setdefault(transfer.output.direction, {memory})"
edits("one receive buffer", Pipeline, "_receive", (memory, same))
# Under sequence parallelism, later stages count positions over their input: a part of the sequence
edits("positions of the slice", Pipeline, "_forward", ("[self.positions]", "[self.positions % x.shape[1]]"))

first_layer = [0]  # of the stage that was built last


@replaces("layers counted from zero on every stage", stages, "Decoder")
def _(config, core, first, last):
    """Every stage draws its layers as if they were the first ones of the model."""
    first_layer[0] = first
    return decoder(config, core, first, last)


@replaces("layers counted from zero on every stage", initialisation, "random_box")
def _(spec, *rest):
    name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - first_layer[0]}", spec.name)
    return random_box(replace(spec, name=name), *rest)


# Stage 3 gathers the weights for all micro-batches, and keeps them over the update as well
name, gone = "weights of the first step", "self.gathering = None"
edits(name, Unit, "start_over", ("self.gathering = ", "self.gathering = getattr(self, 'gathering', None)\n    "))
edits(name, Unit, "free", (gone, f"if self.gathering: return\n    {gone}"))

# ---- right numbers at a higher price ---------------------------------------------------------------------------------

# What was sent keeps its memory until its backward, which does not look at it
edits("sent outputs kept", Pipeline, "_complete_send", (f"tensor.{GIVEN_BACK}", "pass"))
# I retains the graph, as splitting by two calls of autograd does: activations live until W
call, store = "as store:\n            torch.autograd.backward(y, output_gradient", "self.step.deferred[key] = store"
retained = (f"{call})", f"{call}, retain_graph=True)"), (store, f"{store}; store.graph = x, y")
edits("graph kept until W", Pipeline, "_backward", *retained)
# W leaves what it was computed from where it was
computed = "with self._gradients_complete(action):"
kept = f"self.kept = [*getattr(self, 'kept', []), *store]\n    {computed}"
edits("operands of weight gradients kept", Pipeline, "_weight_gradients", (computed, kept))
# All gradients are reduced after the whole pipeline has come to its end
edits("reduced at the end", Pipeline, "_gradients_complete", UNTIL_LAST, ("if last and", "if False and"))
# Stage 3 frees the weights of a stage when it is done with a micro-batch, and gathers them for the next
again = "for unit in self.zero_wrappers[action.chunk].units:\n        unit.fetch().wait()\n        unit.free()\n    "
edits("gathered for each micro-batch", Pipeline, "_forward", (batch, again + batch))
# Stage 3 leaves the gathered weights in memory while the optimizer works
built = "self.gathering = self.bucket", "built = hasattr(self, 'bucket'); self.gathering = self.bucket"
stays = "if self.stage == 3:", "if self.stage == 3 and not built:"
edits("weights kept after the step", Unit, "start_over", built, stays)
# A rank asks for its input when it has nothing else to do
name, needed = "received when needed", "if needed not in"
edits(name, Pipeline, "run", ("self._receive(item)", "self.__dict__.setdefault('asked', {})[item.output] = item"))
late = f"if needed in getattr(self, 'asked', {{}}): self._receive(self.asked.pop(needed))\n    {needed}"
edits(name, Pipeline, "_wait_for_input", (needed, late))
# A rank goes on only when its output has arrived
sent = "self.step.pending_sends[direction] = tensor, work"
edits("sends waited for", Pipeline, "_send", (sent, f"{sent}; self._complete_send(direction)"))
# In the trace, an action includes the wait for its input
phase = "with self.step.tracer.phase('forward', action=str(action)): work.wait()"
edits("wait counted as work", Pipeline, "_wait_for_input", ("work.wait()", phase))


@replaces("one communicator for both directions", Pipeline, "_group")
def _(self, direction):
    """Activations and their gradients share a communicator, where an early receive of the one delays the other."""
    return replace(getattr(self.mesh, f"pp_{direction}"), handle=self.mesh.pp_forward.handle)
