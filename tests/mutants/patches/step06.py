"""Known-wrong variants of context and of expert parallelism, and of what step 8 puts together.

Some train something else; the others train the same, and send, keep, compute or wait for more than they have to.
"""

from types import SimpleNamespace

import torch

from common.checkpoints.boxes import SavedBox
from step01_single_gpu.mixed_precision import Optimizer
from step07_expert_parallel import capacity
from step08_5d import fused
from step08_5d.fused import HeadAndLoss
from step08_5d.kernels import linear_cross_entropy
from step08_5d.kernels.cross_entropy import row_statistics_reference
from tests.mutants.patches.mutants import Mutants
from tests.mutants.patches.step04 import wrong_gather

CONTEXT = Mutants(r"""
# ---- wrong results
@ step06_context_parallel.train:positions_of
# Rotary embeddings get the positions of a contiguous part, whatever the split; or every rank counts its own tokens
positions not permuted: _positions(config => _positions(__import__('dataclasses').replace(config, cp_split='contiguous')
positions from zero: _positions(config, mesh) => __import__('torch').arange(config.rank_seq_len)
@ step06_context_parallel.train:take_part
# Every rank shifts its own tokens: the last one of a chunk gets no label from the next chunk
boundary labels lost: targets[:, mine]) => tokens[:, mine].roll(-1, 1))
@ step01_single_gpu.data.batches:Batches.target_tokens
# Each rank's loss is the mean over its own tokens, and gradients are summed: they are cp times too large
loss averaged over a rank's tokens: self.seq_len => … // torch.distributed.get_world_size()
@ step03_zero.unit:Unit.sum_over_replicas
# Gradients are not reduced, because there are no other samples to reduce over: --dp is 1
gradients not reduced over cp: collectives.all_reduce(self.reduced, self.replicas, async_op=async_op) =>
    collectives.Work()
@ step06_context_parallel.attention_block:NaiveKernels.merge
merged without rescaling: .mul_((lse_so_far - total).exp().unsqueeze(-1)) =>
@ step06_context_parallel.attention_block:FusedKernels.attend_backward
# The backward of a block takes its own output and log-sum-exp, not those of the whole row
statistics of the block: if not _has_kernel(q): => out, lse = self.attend(q, k, v, causal)\n    …
@ step06_context_parallel.attention_block:MergedAttention.add,
    step06_context_parallel.attention_block:AttentionGradients.add
causal block taken for full: block.causal => False
@ step06_context_parallel.ring_attention:pass_on_sums
# The last rank that adds to the sums keeps them: they belong to the next one
dK/dV one hop short: source, next_source = => if hop == cp.size - 1:\n        torch._foreach_copy_(home, sums);
    return [], Work()\n    …
@ step06_context_parallel.all_gather_attention:AllGatherAttention.backward
# Every rank keeps the gradients of its own keys that its own queries have, and drops those of other keys
dK/dV of the own queries only: collectives.reduce_scatter(total, parts, cp) => total.copy_(parts[cp.rank])
@ step06_context_parallel.expansion:OfLatents._add
# The weight that expands latents gets the gradient of the last part of the sequence, and not that of all
kv_b_proj's gradient of one hop: self.total += part => self.total = part
@ step06_context_parallel.expansion:OfLatents.fold
# The rotated key gets the gradient that one head has
rotated key's gradient of one head: self.expansion.arrange_backward(*gradients) =>
    …; d_key = gradients[0][:, :1, :, self.expansion.shape.nope_dim :].contiguous()
@ step06_context_parallel.ring_attention:RingAttention.backward
# What other ranks' queries say about a latent stays with them
latent's gradient not sent home: sums = keys.fold(kv, sums) =>
    …; sums[:1] = [each if hop == 0 else torch.zeros_like(each) for each in sums[:1]]
@ step06_context_parallel.sequence_layouts:SequenceLayout.plan
# Documents are masked among the tokens of a rank, and not between ranks
documents of one rank: def seen(of: int, source: int) =>
    every = [(0,)] * len(documents)\n    def seen(of, source, documents=documents)
documents of one rank: enumerate(seen(rank, source)): =>
    enumerate(seen(rank, source, documents if source == rank else every)):

# ---- right results at a higher price
@ step06_context_parallel.context_parallel:attention
K/V repeated before they are sent: core = CORES[ =>
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v)); …
@ step06_context_parallel.ring_attention:pass_on, step06_context_parallel.ring_attention:pass_on_sums
ring waits before it computes: cp, async_op=True => cp
@ step06_context_parallel.sequence_layouts:SequenceLayout.plan
keys travel all the way: tuple(reach)) => (self.ranks - 1,) * self.ranks)
@ step06_context_parallel.ring_attention:RingAttention.forward,
    step06_context_parallel.ring_attention:RingAttention.backward
all keys of a ring kept: kv = kv_arriving\n => kv = kv_arriving; kept = [*(kept if hop else ()), *kv]\n
@ step06_context_parallel.attention_block:AttentionGradients.add
# In the backward, a causal block costs what a full one does, as it would under a mask: a result that nobody needs
causal blocks in squares: parts = self.kernels.attend_backward( =>
    self.kernels.attend_backward(gradient, q, k, v, out, lse, False); …
""")
# The whole sequence stays in the order of the ranks, which the causal mask takes for that of the tokens
replaces = CONTEXT.replaces("Ulysses in rank order", "step06_context_parallel.ulysses_attention:rank_order")
replaces(lambda split, seq_len, ranks, device: torch.arange(seq_len))

EXPERTS = Mutants(r"""
# ---- wrong results
@ step03_zero.zero:Zero.finish
# They are divided by the number of ranks that hold the expert, as if each had seen all tokens
experts' gradients averaged: unit.reduced[where] for where, _ in => unit.reduced[where]
    / (unit.group.size * unit.replicas.size if ".experts." in piece.spec.name else 1) for where, piece in
# Tokens of all ep ranks have been added up before the sum over edp, which divides as if each rank had its own (pytorch
# #160285, Megatron-LM #5956)
experts' gradients doubled: unit.reduced[where] for where, _ in => unit.reduced[where]
    * (2 if ".experts." in piece.spec.name else 1) for where, piece in
@ step07_expert_parallel.train:apply_experts
# Under sequence parallelism a rank's router has seen a part of the tokens
router's gradient not summed over tp: extra_groups=("tp",) =>
    extra_groups=() if ".router." in spec.name else ("tp",)
@ step07_expert_parallel.router:Router.auxiliary_loss
# A sequence is taken for balanced if each rank's part of it is: its loads are not added up over tp and cp
statistics of a rank: in self.parts.groups: => in ():
# Each micro-batch adds the mean over its own sequences (NeMo-Automodel #3359)
auxiliary loss of each micro-batch: 1 / self.sequences => 1 / len(counts)
@ step07_expert_parallel.balancing:Balancing.finish
# Two ranks of DualPipe hold a copy of each layer, and only one of them says what it has counted
loads of one copy: += router.load\n => += router.load * router.bias.spec.owner\n
@ step07_expert_parallel.moe:_Combine.forward
combined without gates: ctx.save_for_backward(rows, gates) => gates = torch.ones_like(gates); …
@ step07_expert_parallel.expert_parallel:TokenDispatcher.back
sent back in another order: inverse(self.order) => self.order

# ---- right results at a higher price
@ step07_expert_parallel.expert_parallel:TokenDispatcher.dispatch
dispatch waits before the shared experts: return rows if self.alone else self.there.start(rows) =>
    rows = self.there.start(rows); self.there.in_flight[1].wait(); return rows
@ step07_expert_parallel.moe:MoE.forward
# The question in the middle of the lesson
shared experts after the dispatch: shared = self.shared(x) if self.shared else 0\n => \n
shared experts after the dispatch: rows, counts = dispatcher.arrive(rows) =>
    …; shared = self.shared(x) if self.shared else 0
@ step07_expert_parallel.expert_parallel:AllToAll.launch
gradients arrive before the shared experts' backward: return result => if sent is not self.sent: work.wait()\n    …
@ step07_expert_parallel.moe:Choices.__init__
# The host waits for the numbers of tokens, as if some choices could exceed a capacity
counts read for drops that cannot be: if some_dropped else order =>
""")
slices = Optimizer.slices


@EXPERTS.replaces("places of a rank", "step07_expert_parallel.capacity:earlier_choices")
def _(chosen, *_):
    """Every rank counts only its own tokens when it looks for those that exceed the capacity."""
    return capacity.count_earlier(chosen)


@EXPERTS.replaces("one rank's experts saved", "step01_single_gpu.mixed_precision:Optimizer.slices")
def _(self):
    """Each rank saves its experts as if they were all, under names that all ranks share: one rank's are written."""
    found = []
    for box in slices(self):
        if ".experts." in box.name:
            shape = (box.tensor.shape[0], *box.global_shape[1:])
            box = SavedBox(box.name, shape, ((0, shape[0]), *box.box[1:]), box.tensor, box.owner)
        found.append(box)
    return found


TOGETHER = Mutants(r"""
# ---- wrong results
@ step08_5d.fused:HeadAndLoss.forward
# The head with the loss does not know that tensor parallelism has divided it: its inputs' gradient is partial
head's split lost: if self.split: => if False:
@ step08_5d.kernels.linear_cross_entropy:_LinearCrossEntropy.backward
# A zero-bubble schedule gets it in I, since the loss has computed it long ago, and in W once more
head's gradient twice: dw = weight_gradient(ctx.weight, dw, gradient, default=Scaled) =>
    weight_gradient(ctx.weight, dw.clone(), gradient, default=Scaled); dw.mul_(gradient)
@ step08_5d.train:train_step
experts summed like the rest: sum_extra_groups(optimizer.parameters, gradients, mesh) => …; [collectives.all_reduce(g,
    mesh.dp_cp) for each, g in zip(optimizer.parameters, gradients) if ".experts." in each.spec.name]
loss of a part of the sequence: collectives.all_reduce(loss, mesh.dp_cp) => pass
@ step08_5d.train:build_balancing
loads of a part of the sequence: mesh.world => mesh.dp
@ step08_5d.train:gradient_norm
copies of tp counted twice: spec.owner] => spec.owner or "tp" in parameter.spec.extra_groups]

# ---- wrong results where kernels run
@ step08_5d.fused:Norm.after_adding
# The gradient of the norm reaches what was added, and not the residual stream that it was added to
norm past the residual: self.operations.add_rms_norm(x, residual, self.weight, self.eps) =>
    self.operations.add_rms_norm(x, residual.detach(), self.weight, self.eps)[0], x + residual
@ step08_5d.fused_adamw:FusedAdamW.step
clip factor lost: count, rate, factor, => count, rate, None,
copy lost: gradient, copy, count => gradient, None, count
@ step08_5d.kernels.adamw:settings_of
everything decays: if parameter.spec.decay else 0.0 =>

# ---- right results at a higher price
@ step08_5d.train:apply_recompute
# Recomputation wraps the function itself, and kernels that come later bring a way through the layer of their own
recompute before the kernels: layer.call = recompute =>
    layer.compute = (lambda compute: lambda *inputs: recompute(compute, *inputs))(layer.compute)
@ step08_5d.fused:apply_operations
recompute before the kernels: layer.attention.rotate = => layer.compute = type(layer).compute.__get__(layer); …
""")
init_head, token_losses, attend = HeadAndLoss.__init__, linear_cross_entropy.token_losses, fused.attend


@TOGETHER.replaces("head takes its slice in the backward", "step08_5d.fused:HeadAndLoss.__init__")
def _(self, *arguments):
    """The same under sequence parallelism, where the sequence must be gathered, or shapes would not fit."""
    init_head(self, *arguments)
    group = self.split.group
    self.split = SimpleNamespace(begin_sublayer=lambda x: wrong_gather(x, group))


@TOGETHER.replaces("softmax over a rank's columns", "step08_5d.kernels.linear_cross_entropy:token_losses")
def _(logits, targets, *settings):
    """The loss is right, but gradients come from the sum of exponentials of this rank's part of the vocabulary."""
    losses, (local, columns, largest, _) = token_losses(logits, targets, *settings)
    own, total, _ = row_statistics_reference(logits, local, columns)
    return losses, (local, columns, largest, total * (own - largest).exp())


@TOGETHER.replaces("blocks of equal weight", "step08_5d.fused:BlockKernels.attend")
@staticmethod
def _(*arguments):
    """The kernel returns no log-sum-exp, so blocks of a ring are merged as if all had the same."""
    out, lse = attend(*arguments)
    return out, torch.zeros_like(lse)


STEPS = {6: CONTEXT, 7: EXPERTS, 8: TOGETHER}
