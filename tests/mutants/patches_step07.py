"""Known-wrong variants of experts and of expert parallelism. The suite must reject every one of them.

The first train something else; those below train the same, and wait, send or keep more than they have to.
"""

import step07_expert_parallel.train as step07
from common.checkpoints.boxes import SavedBox
from step01_single_gpu.mixed_precision import Optimizer
from step03_zero.zero import Zero
from step07_expert_parallel import capacity
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.expert_parallel import AllToAll, Journey
from step07_expert_parallel.moe import Choices, _Combine
from step07_expert_parallel.router import Router
from tests.mutants import Mutants

MUTANTS = Mutants()
edits, replaces = MUTANTS.edits, MUTANTS.replaces
slices = Optimizer.slices

# ---- wrong results ---------------------------------------------------------------------------------------------------

# They are divided by the number of ranks that hold the expert, as if each had seen all tokens
holders = '(unit.group.size * unit.replicas.size if ".experts." in piece.spec.name else 1)'
mean = "unit.reduced[where] for where, _ in", f"unit.reduced[where] / {holders} for where, piece in"
edits("experts' gradients averaged", Zero, "finish", mean)
# Under sequence parallelism a rank's router has seen a part of the tokens
but_router = 'extra_groups=("tp",)', 'extra_groups=() if ".router." in spec.name else ("tp",)'
edits("router's gradient not summed over tp", step07, "apply_experts", but_router)
# A sequence is taken for balanced if each rank's part of it is: its loads are not added up over tp and cp
edits("statistics of a rank", Router, "auxiliary_loss", ("in self.groups:", "in ():"))
# Every rank counts only its own tokens when it looks for those that exceed the capacity
replaces("places of a rank", capacity, "earlier_choices")(lambda chosen, *_: capacity.count_earlier(chosen))
# Two ranks of DualPipe hold a copy of each layer, and only one of them says what it has counted
owned = "+= router.load\n", "+= router.load * router.bias.spec.owner\n"
edits("loads of one copy", Balancing, "finish", owned)
# A token is the plain sum of the outputs of its experts
kept = "ctx.save_for_backward(rows, gates)"
edits("combined without gates", _Combine, "forward", (kept, f"gates = torch.ones_like(gates); {kept}"))
# The permutation that sorts by expert is applied once more, instead of its inverse
edits("sent back in another order", Journey, "back", ("inverse(self.order)", "self.order"))


@replaces("one rank's experts saved", Optimizer, "slices")
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

# The all-to-all is over before anything else is computed
started = "return rows if self.alone else self.there.start(rows)"
waited = "rows = self.there.start(rows); self.there.in_flight[1].wait(); return rows"
edits("dispatch waits before the shared experts", Journey, "start", (started, waited))
# An all-to-all in the backward is waited for where it is started
result = "return result", "if sent is not self.sent: work.wait()\n    return result"
edits("gradients arrive before the shared experts' backward", AllToAll, "launch", result)
# The host waits for the numbers of tokens, as if some choices could exceed a capacity
edits("counts read for drops that cannot be", Choices, "__init__", (" if some_dropped else order", ""))
