"""A mixture of experts: many SwiGLUs instead of one, and every token passes through a few.

Sparsely-gated experts: Shazeer et al., arXiv:1701.06538; in every layer of a transformer: Switch, arXiv:2101.03961;
the two shapes built here: Mixtral, arXiv:2401.04088, and DeepSeekMoE with shared experts, arXiv:2401.06066.

The layer copies each token once for each expert that it has chosen, and sorts the copies by expert, for `experts.py`.
Back at its place, a token's output is the sum of its experts' outputs, each times its gate.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.group import Group
from common.layers import at_least_float32
from step07_expert_parallel.expert_parallel import TokenDispatcher, inverse
from step07_expert_parallel.experts import Counts, Experts, to_host
from step07_expert_parallel.router import Router

# ---- to the experts and back -----------------------------------------------------------------------------------------


class Choices:
    """What tokens have chosen, sorted by expert and then by token: a row for each choice that is not dropped.

    counts    how many rows each expert has
    order     (rows,): which of the tokens * k choices a row is
    tokens    (rows,): which token it belongs to
    places    (rows,): the way back, from tokens to rows. It lists the rows of token 0, then those of token 1, ...
    starts    (tokens,): where in this list the rows of each token begin

    For example, three tokens choose two of the experts 0, 1, 2, and token 1's second choice is dropped (3):

        chosen   2 0 | 1 3 | 0 2       token 0 | token 1 | token 2; the choices have the numbers 0 to 5
        rows     0 1 2 3 4             sorted by expert: two rows for expert 0, one for 1, two for 2
        counts   2 1 2
        order    1 4 2 0 5             row 0 is choice 1, row 1 is choice 4, ...
        tokens   0 2 1 0 2             row 0 is of token 0, row 1 of token 2, ...
        places   3 0 | 2 | 1 4         token 0's rows are 3 and 0, token 1's row is 2, token 2's rows are 1 and 4
        starts   0     2   3
    """

    def __init__(self, chosen: Tensor, experts: int, some_dropped: bool, read: Callable[[Tensor], list] = to_host):
        """chosen: (tokens, k) int64. What chose number `experts` is dropped. read: see `Counts`."""
        flat, kept = chosen.flatten(), (chosen < experts).sum(-1)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        self.counts = Counts(counts[:experts], read)
        order = flat.argsort(stable=True)  # what is dropped comes last
        self.order = order[: sum(self.counts.on_host)] if some_dropped else order
        self.tokens = self.order // chosen.shape[1]
        number = (flat < experts).cumsum(0) - 1  # of a choice among those that are not dropped
        self.places, self.starts = inverse(number[self.order]), kept.cumsum(0) - kept

    def add_up(self, rows: Tensor, gates: Tensor | None = None) -> Tensor:
        """The sum of each token's rows times their gates: rows (rows, hidden), gates (rows,) -> (tokens, hidden).

        PyTorch's sum over a bag of words does this in one pass and always in the same order. On a GPU, `index_add_`
        does not keep to an order.
        """
        gates = None if gates is None else gates[self.places]
        return F.embedding_bag(self.places, rows, self.starts, per_sample_weights=gates, mode="sum")


class _Copy(torch.autograd.Function):
    """x (tokens, hidden) -> one row for each choice. Backward: a token's gradient is a sum of rows."""

    @staticmethod
    def forward(ctx, x, choices):
        ctx.choices = choices
        return x.index_select(0, choices.tokens)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.choices.add_up(gradient.to(at_least_float32(gradient.dtype))).to(gradient.dtype), None


class _Combine(torch.autograd.Function):
    """The mirror of it: a token's output is the sum of its rows, each times its gate, in the type of the gates.

    rows (rows, hidden), gates (rows,) -> (tokens, hidden). Only the rows are kept for the backward, in their own type.
    """

    @staticmethod
    def forward(ctx, rows, gates, choices):
        ctx.save_for_backward(rows, gates)
        ctx.choices = choices
        return choices.add_up(rows.to(gates.dtype), gates)

    @staticmethod
    def backward(ctx, gradient):
        rows, gates = ctx.saved_tensors
        gradient = gradient.index_select(0, ctx.choices.tokens)  # (rows, hidden)
        of_gates = (gradient * rows).sum(-1)
        return gradient.mul_(gates.unsqueeze(-1)).to(rows.dtype), of_gates, None


class MoE(nn.Module):
    """The layer: x (batch, seq, hidden) -> the gated sum of its tokens' experts, plus the shared experts.

    While tokens travel to experts on other ranks, this rank computes the shared ones.

    Args:
        experts: those of this rank, its part of the router's: rank j of `ep` has the j-th.
        shared: what all tokens pass through as well, if anything: x -> (batch, seq, hidden).

    Three attributes may be replaced:
      before_wait   is called before each wait for tokens of other ranks: somebody else may compute meanwhile
      read          brings the numbers of tokens to the host (see `Counts`)
      dispatcher    what takes rows to their experts and back: a class like `TokenDispatcher`
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None, ep: Group):
        super().__init__()
        self.router, self.experts, self.shared, self.ep = router, experts, shared, ep
        self.before_wait, self.read, self.dispatcher = lambda: None, to_host, TokenDispatcher

    def forward(self, x):
        chosen, gates = self.router(x)  # (tokens, k)
        routing = self.router.routing
        choices = Choices(chosen, routing.experts, routing.capacity_factor > 0, self.read)
        dispatcher = self.dispatcher(choices.counts, self.ep, self.before_wait)
        rows = dispatcher.dispatch(_Copy.apply(x.flatten(0, 1), choices))
        shared = self.shared(x) if self.shared else 0
        rows, counts = dispatcher.arrive(rows)
        rows = dispatcher.back(self.experts(rows, counts))
        return _Combine.apply(rows, gates.flatten()[choices.order], choices).to(x.dtype).view_as(x) + shared
