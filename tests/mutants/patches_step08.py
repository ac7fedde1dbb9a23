"""Known-wrong variants of what step 8 puts together. The suite must reject every one of them.

The first train something else on any device, the next ones where kernels run, and the last one trains the same.
"""

from types import SimpleNamespace

import torch

import step08_5d.train as step08
from step07_expert_parallel.balancing import Balancing
from step08_5d import fused
from step08_5d.fused import FusedAdamW, LossHead, Norm
from step08_5d.kernels import linear_cross_entropy
from step08_5d.kernels.cross_entropy import row_statistics_reference
from tests.mutants import Mutants
from tests.mutants.patches_step04 import counted_twice, wrong_gather

MUTANTS = Mutants()
edits, replaces = MUTANTS.edits, MUTANTS.replaces
init_head, token_losses, attend = LossHead.__init__, linear_cross_entropy.token_losses, fused.attend

# ---- wrong results ---------------------------------------------------------------------------------------------------

# The head with the loss does not know that tensor parallelism has divided it: its inputs' gradient is partial
edits("head's split lost", LossHead, "forward", ("if self.split:", "if False:"))


@replaces("head takes its slice in the backward", LossHead, "__init__")
def _(self, *arguments):
    """The same under sequence parallelism, where the sequence must be gathered, or shapes would not fit."""
    init_head(self, *arguments)
    group = self.split.group
    self.split = SimpleNamespace(begin_sublayer=lambda x: wrong_gather(x, group))


@replaces("softmax over a rank's columns", linear_cross_entropy, "token_losses")
def _(logits, targets, *settings):
    """The loss is right, but gradients come from the sum of exponentials of this rank's part of the vocabulary."""
    losses, (local, columns, largest, _) = token_losses(logits, targets, *settings)
    own, total, _ = row_statistics_reference(logits, local, columns)
    return losses, (local, columns, largest, total * (own - largest).exp())


# A zero-bubble schedule gets it in I, since the loss has computed it long ago, and in W once more
once = "dw = weight_gradient(ctx.weight, dw, gradient, Tensor.mul_)"
twice = "weight_gradient(ctx.weight, dw.clone(), gradient, Tensor.mul_); dw.mul_(gradient)"
edits("head's gradient twice", linear_cross_entropy._LinearCrossEntropy, "backward", (once, twice))
# Gradients of experts are added up over dp and cp, where here every rank has experts of its own
summed = "sum_extra_groups(optimizer.parameters, gradients, mesh)"
rest = "for each, gradient in zip(optimizer.parameters, gradients):\n            "
rest += 'collectives.all_reduce(gradient, mesh.dp_cp) if ".experts." in each.spec.name else None'
edits("experts summed like the rest", step08, "train_step", (summed, f"{summed}\n        {rest}"))
# Biases follow the loads that are added up over dp, and not over those who share a sequence
edits("loads of a part of the sequence", Balancing, "finish", ("self.mesh.world", "self.mesh.dp"))
# Norms and routers, which all ranks of tp hold, enter the gradient norm tp times
edits("copies of tp counted twice", step08, "gradient_norm", counted_twice("tp"))
# What the record calls the loss is that of the first part of each sequence
part = "collectives.all_reduce(loss, mesh.dp_cp)", "pass"
edits("loss of a part of the sequence", step08, "train_step", part)

# ---- wrong results where kernels run ---------------------------------------------------------------------------------

# The gradient of the norm reaches what was added, and not the residual stream that it was added to
norm = "self.pieces.add_rms_norm(x, residual, self.weight, self.eps)"
past = norm.replace("residual", "residual.detach()") + "[0], x + residual"
edits("norm past the residual", Norm, "after_adding", (norm, past))


@replaces("blocks of equal weight", fused, "attend")
def _(*arguments):
    """The kernel returns no log-sum-exp, so blocks of a ring are merged as if all had the same."""
    out, lse = attend(*arguments)
    return out, torch.zeros_like(lse)


edits("clip factor lost", FusedAdamW, "step", ("*numbers, factor,", "*numbers, None,"))
# Masters learn, and the model keeps the weights that it has
edits("copy lost", FusedAdamW, "step", ("gradient, copy, *numbers", "gradient, None, *numbers"))
# The kernel gets one setting for matrices and norms
edits("everything decays", FusedAdamW, "step", (" if parameter.spec.decay else of_others", ""))

# ---- right results at a higher price ---------------------------------------------------------------------------------

# Kernels bring a way through the layer of their own, and it takes the place of the one that is recomputed
order = "apply_kernels(stage, config, mesh)", "apply_recompute(stage, config.recompute)"
swapped = (order[0], "SWAPPED"), (order[1], order[0]), ("SWAPPED", order[1])
edits("recompute before the kernels", step08, "build", *swapped)
