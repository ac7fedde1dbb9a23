"""Known-wrong variants of multi-token prediction: see tests/mutants/test_multi_token.py."""

from tests.mutants.patches.mutants import Mutants

MUTANTS = Mutants(r"""
@ step08_5d.train:mark_shared_parameters
# Both ends of the pipeline hold the embedding, though it is not tied to the head
second embedding goes its own way: extra_groups=(*spec.extra_groups, holders) =>
    extra_groups=spec.extra_groups if tied else (*spec.extra_groups, holders)
@ step08_5d.train:take_part
# Each rank shifts its own targets, and the last one at every border is that of another token
second targets of a part: whole[:, mine] => second_targets(tokens[:, mine], targets[:, mine])
@ step08_5d.multi_token:second_targets
last token not masked: second[:, -1] = IGNORED => pass
# The block reads the first token of the next document there
last token of a document not masked: second.masked_fill(tokens == end, IGNORED) => second
@ step08_5d.multi_token:Ends.forward
weight on both losses: factors[len(factors) // 2 :] *= self.weight => factors *= self.weight
# And the block's own one does nothing
final norm shared: torch.cat((self.norm(first), second)) => self.norm(x)
@ step08_5d.multi_token:SecondBlock.forward
final norm shared: self.shared_head["norm"](self.call(self.compute, x, embedded, *rope, *mask)) =>
    self.call(self.compute, x, embedded, *rope, *mask)
@ step08_5d.multi_token:SecondBlock.joined
hidden states come first: (self.enorm(embedded), self.hnorm(x)) => (self.hnorm(x), self.enorm(embedded))
@ step04_tensor_parallel.apply_tensor_parallel:share_the_rest
projection's gradient not summed over tp: if split.sequence_parallel: =>
    if split.sequence_parallel and "eh_proj" not in parameter.spec.name:
@ step08_5d.multi_token:SecondLoss.finish
second loss counted by all tensor ranks: if self.tp.rank == 0: => if True:
""")
