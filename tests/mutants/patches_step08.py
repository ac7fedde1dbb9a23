"""Known-wrong variants of what step 8 puts together. The suite must reject every one of them.

The first train something else on any device, the next ones where kernels run, and the last one trains the same.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch

import step08_5d.train as step08
from common import collectives
from step07_expert_parallel.balancing import Balancing
from step08_5d import fused
from step08_5d.fused import LossHead, Norm
from step08_5d.kernels import adamw, linear_cross_entropy
from step08_5d.kernels.cross_entropy import row_statistics_reference
from tests.mutants import Mutants
from tests.mutants.patches_step04 import wrong_gather
from tests.mutants.patches_step05 import count_twice

MUTANTS = Mutants()
apply_kernels, apply_recompute, sum_extra_groups = step08.apply_kernels, step08.apply_recompute, step08.sum_extra_groups
init_head, init_balancing, after_adding = LossHead.__init__, Balancing.__init__, Norm.after_adding
token_losses, weight_gradient = linear_cross_entropy.token_losses, linear_cross_entropy.weight_gradient
attend, update = fused.attend, adamw.adamw


# ---- wrong results ---------------------------------------------------------------------------------------------------


@MUTANTS.replaces("head's split lost", LossHead, "__init__")
def _(self, *arguments):
    """The head with the loss does not know that tensor parallelism has divided it: its inputs' gradient is partial."""
    init_head(self, *arguments)
    self.split = None


@MUTANTS.replaces("head takes its slice in the backward", LossHead, "__init__")
def _(self, *arguments):
    """The same under sequence parallelism, where the sequence must be gathered, or shapes would not fit."""
    init_head(self, *arguments)
    group = self.split.group
    self.split = SimpleNamespace(begin_sublayer=lambda x: wrong_gather(x, group))


@MUTANTS.replaces("softmax over a rank's columns", linear_cross_entropy, "token_losses")
def _(logits, targets, *settings):
    """The loss is right, but gradients come from the sum of exponentials of this rank's part of the vocabulary."""
    losses, (local, columns, largest, _) = token_losses(logits, targets, *settings)
    own, total, _ = row_statistics_reference(logits, local, columns)
    return losses, (local, columns, largest, total * (own - largest).exp())


@MUTANTS.replaces("head's gradient twice", linear_cross_entropy, "weight_gradient")
def _(weight, gradient, factor, multiply):
    """A zero-bubble schedule gets it in I, since the loss has computed it long ago, and in W once more."""
    weight_gradient(weight, gradient.clone(), factor, multiply)
    return multiply(gradient, factor)


@MUTANTS.replaces("experts summed like the rest", step08, "sum_extra_groups")
def _(parameters, gradients, mesh):
    """Gradients of experts are added up over dp and cp, where here every rank has experts of its own."""
    sum_extra_groups(parameters, gradients, mesh)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if ".experts." in parameter.spec.name:
            collectives.all_reduce(gradient, mesh.dp_cp)


@MUTANTS.replaces("loads of a part of the sequence", Balancing, "__init__")
def _(self, stages, config, mesh, scaler):
    """Biases follow the loads that are added up over dp, and not over those who share a sequence."""
    init_balancing(self, stages, config, replace(mesh, world=mesh.dp), scaler)


@MUTANTS.replaces("copies of tp counted twice", step08, "gradient_norm")
def _(*arguments):
    """Norms and routers, which all ranks of tp hold, enter the gradient norm tp times."""
    return count_twice("tp", *arguments)


def all_reduce(tensor, group, *rest, **options):
    return collectives.all_reduce(tensor, group, *rest, **options) if group.name != "dp_cp" else None


# What the record calls the loss is that of the first part of each sequence
MUTANTS.replaces("loss of a part of the sequence", step08, "collectives")(SimpleNamespace(all_reduce=all_reduce))


# ---- wrong results where kernels run ---------------------------------------------------------------------------------


@MUTANTS.replaces("norm past the residual", Norm, "after_adding")
def _(self, x, residual):
    """The gradient of the norm reaches what was added, and not the residual stream that it was added to."""
    normed, _ = after_adding(self, x, residual.detach())
    return normed, x + residual


@MUTANTS.replaces("blocks of equal weight", fused, "attend")
def _(*arguments):
    """The kernel returns no log-sum-exp, so blocks of a ring are merged as if all had the same."""
    out, lse = attend(*arguments)
    return out, torch.zeros_like(lse)


@MUTANTS.replaces("clip factor lost", adamw, "adamw")
def _(*arguments, **settings):
    return update(*arguments[:7], None, *arguments[8:], **settings)


@MUTANTS.replaces("copy lost", adamw, "adamw")
def _(master, exp_avg, exp_avg_sq, gradient, copy, *rest, **settings):
    """Masters learn, and the model keeps the weights that it has."""
    update(master, exp_avg, exp_avg_sq, gradient, None, *rest, **settings)


@MUTANTS.replaces("everything decays", adamw, "adamw")
def _(*arguments, **settings):
    """The kernel gets one setting for matrices and norms."""
    update(*arguments, **settings | {"weight_decay": 0.1})


# ---- right results at a higher price ---------------------------------------------------------------------------------


@MUTANTS.replaces("recompute before the kernels", step08, "apply_kernels")
def _(model, config, mesh):
    """Kernels bring a way through the layer of their own, and it takes the place of the one that is recomputed."""
    apply_recompute(model, config.recompute)
    apply_kernels(model, config, mesh)


MUTANTS.replaces("recompute before the kernels", step08, "apply_recompute")(lambda *_: None)
