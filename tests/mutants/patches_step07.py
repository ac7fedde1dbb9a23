"""Known-wrong variants of experts and of expert parallelism. The suite must reject every one of them.

The first train something else; those below train the same, and wait, send or keep more than they have to.
"""

from dataclasses import replace

import torch

import step07_expert_parallel.train as step07
from common.checkpoints.boxes import SavedBox
from step01_single_gpu.mixed_precision import Optimizer
from step03_zero.zero import Zero
from step07_expert_parallel import capacity, expert_parallel
from step07_expert_parallel.balancing import Balancing, routers_of
from step07_expert_parallel.expert_parallel import AllToAll, Journey
from step07_expert_parallel.moe import Choices, _Combine
from step07_expert_parallel.router import Router
from tests.mutants import Mutants

MUTANTS = Mutants()
finish, slices, apply_experts, combine = Zero.finish, Optimizer.slices, step07.apply_experts, _Combine.forward
auxiliary_loss, finish_balancing = Router.auxiliary_loss, Balancing.finish
start, launch, choose = Journey.start, AllToAll.launch, Choices.__init__

# ---- wrong results ---------------------------------------------------------------------------------------------------


@MUTANTS.replaces("experts' gradients averaged", Zero, "finish")
def _(self):
    """They are divided by the number of ranks that hold the expert, as if each had seen all tokens."""
    gradients = iter(finish(self))
    return [
        next(gradients) / (unit.group.size * unit.replicas.size if ".experts." in piece.spec.name else 1)
        for unit in self.units
        for _, piece in unit.pieces
    ]


@MUTANTS.replaces("router's gradient not summed over tp", step07, "apply_experts")
def _(model, config, mesh):
    """Under sequence parallelism a rank's router has seen a part of the tokens."""
    apply_experts(model, config, mesh)
    for _, router in routers_of([model]):
        router.weight.spec = replace(router.weight.spec, extra_groups=())


@MUTANTS.replaces("statistics of a rank", Router, "auxiliary_loss")
def _(self, *args):
    """A sequence is taken for balanced if each rank's part of it is: its loads are not added up over tp and cp."""
    groups, self.groups = self.groups, ()
    loss = auxiliary_loss(self, *args)
    self.groups = groups
    return loss


@MUTANTS.replaces("places of a rank", capacity, "earlier_choices")
def _(chosen, *_):
    """Every rank counts only its own tokens when it looks for those that exceed the capacity."""
    return capacity.count_earlier(chosen)


@MUTANTS.replaces("loads of one copy", Balancing, "finish")
def _(self, skip=None):
    """Two ranks of DualPipe hold a copy of each layer, and only one of them says what it has counted."""
    for _, router in self.routers:
        router.load *= router.bias.spec.owner
    return finish_balancing(self, skip)


@MUTANTS.replaces("combined without gates", _Combine, "forward")
@staticmethod
def _(ctx, rows, gates, choices):
    """A token is the plain sum of the outputs of its experts."""
    return combine(ctx, rows, torch.ones_like(gates), choices)


@MUTANTS.replaces("sent back in another order", Journey, "back")
def _(self, rows):
    """The permutation that sorts by expert is applied once more, instead of its inverse."""
    return self.home.finish(self.home.start(expert_parallel._Permute.apply(rows, self.order)))


@MUTANTS.replaces("one rank's experts saved", Optimizer, "slices")
def _(self):
    """Each rank saves its experts as if they were all, under names that all ranks share: one rank's are written."""
    found = []
    for box in slices(self):
        if ".experts." in box.name:
            shape = (box.tensor.shape[0], *box.global_shape[1:])
            box = SavedBox(box.name, shape, ((0, shape[0]), *box.box[1:]), box.tensor, box.owner)
        found.append(box)
    return found


# ---- right results at a higher price ---------------------------------------------------------------------------------


@MUTANTS.replaces("dispatch waits before the shared experts", Journey, "start")
def _(self, rows):
    """The all-to-all is over before anything else is computed."""
    result = start(self, rows)
    self.there.in_flight[1].wait()
    return result


@MUTANTS.replaces("gradients arrive before the shared experts' backward", AllToAll, "launch")
def _(self, x, sent, received):
    """An all-to-all in the backward is waited for where it is started."""
    result = launch(self, x, sent, received)
    if sent is not self.sent:
        self.in_flight[1].wait()
    return result


@MUTANTS.replaces("counts read for drops that cannot be", Choices, "__init__")
def _(self, chosen, experts, some_dropped):
    """The host waits for the numbers of tokens, as if some choices could exceed a capacity."""
    choose(self, chosen, experts, some_dropped=True)
