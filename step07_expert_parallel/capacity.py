"""--capacity-factor: an expert takes so many tokens of a sequence, and later choices of it are dropped.

GShard (arXiv:2006.16668) and Switch (arXiv:2101.03961) bound the work of an expert in this way. Without this option
nothing is dropped.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from common import collectives
from common.group import Group
from step06_context_parallel.sequence_layouts import rank_order
from step07_expert_parallel.expert_parallel import inverse


@dataclass(frozen=True)
class SequenceParts:
    """Which ranks have the other parts of this rank's sequences. All parts have the same length.

    cp      ranks that each have the tokens that `split` says (see step 6's `sequence_layouts`)
    tp      ranks that have neighboring parts of what a rank of `cp` has
    """

    cp: Group
    tp: Group
    split: str = "contiguous"

    @property
    def groups(self) -> tuple[Group, Group]:
        """What to add up over, or to gather from first to last."""
        return self.tp, self.cp

    def length(self, part: int) -> int:
        """The tokens of a whole sequence of which a rank has `part`."""
        return part * self.cp.size * self.tp.size


def beyond_capacity(chosen: Tensor, factor: float, experts: int, parts: SequenceParts) -> Tensor:
    """chosen (batch, seq, k) -> which choices are dropped, bool of the same shape. With a factor of 0 none is."""
    if not factor:
        return torch.zeros_like(chosen, dtype=torch.bool)
    _, seq, top_k = chosen.shape
    return earlier_choices(chosen, parts) >= capacity(factor, experts, top_k, parts.length(seq))


def capacity(factor: float, experts: int, top_k: int, tokens: int) -> int:
    """How many of a sequence's tokens an expert takes: its equal share of choices times the factor, rounded up.

    The factor is the decimal number that was typed: 1.1 * 50 is 55, but 55.000000000000007 in floating point.
    """
    evenly = Fraction(top_k * tokens, experts)
    return min(math.ceil(Fraction(str(factor)) * evenly), tokens)


def earlier_choices(chosen: Tensor, parts: SequenceParts) -> Tensor:
    """chosen (batch, seq, k) -> the same shape: how many earlier tokens of the sequence chose the same expert.

    Earlier tokens may be on other ranks, which therefore exchange their choices: k small numbers for a token.
    """
    whole, cp, tp = chosen, parts.cp, parts.tp
    for group in parts.groups:
        all_parts = whole.new_empty(group.size, *whole.shape)
        collectives.all_gather(all_parts, whole.contiguous(), group)
        whole = all_parts.movedim(0, 1).flatten(1, 2)  # (batch, seq * group.size, k)
    places = rank_order(parts.split, whole.shape[1], cp.size, chosen.device)
    earlier = count_earlier(whole[:, inverse(places)])[:, places]  # counted in the order of positions
    start = (cp.rank * tp.size + tp.rank) * chosen.shape[1]
    return earlier[:, start : start + chosen.shape[1]]


def count_earlier(chosen: Tensor) -> Tensor:
    """chosen (batch, seq, k), in the order of positions -> the same shape: how many earlier tokens chose the same.

    For example, four tokens choose the experts 0 0 1 0. With a capacity of 2, the last choice is dropped:

        experts  0 0 0 1    sorted
        order    0 1 3 2    whose choices these are
        first    0 0 0 3    so their places in their runs are 0 1 2 0
        result   0 1 0 2    the same, in the order of the tokens
    """
    flat = chosen.flatten(1)  # a token chooses an expert once at most
    experts, order = flat.sort(stable=True)
    first = torch.searchsorted(experts, experts)  # where the run of the same expert begins
    places = torch.arange(flat.shape[1], device=flat.device) - first
    return torch.empty_like(flat).scatter_(1, order, places).view_as(chosen)
