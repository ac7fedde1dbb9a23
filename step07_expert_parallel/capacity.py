"""--capacity-factor: an expert takes so many tokens of a sequence, and later choices of it are dropped.

GShard (arXiv:2006.16668) and Switch (arXiv:2101.03961) bound the work of an expert in this way. Without this option
nothing is dropped.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from common import collectives
from common.config import TrainConfig
from common.group import Group
from step06_context_parallel.sequence_layouts import rank_order
from step07_expert_parallel.expert_parallel import inverse


def beyond_capacity(chosen: Tensor, config: TrainConfig, tp: Group, cp: Group) -> Tensor:
    """chosen (batch, seq, k) -> which choices are dropped, bool of the same shape."""
    if not config.capacity_factor:
        return torch.zeros_like(chosen, dtype=torch.bool)
    return earlier_choices(chosen, config, tp, cp) >= capacity(config)


def capacity(config: TrainConfig) -> int:
    """How many tokens of a sequence an expert takes: its equal share times the factor, rounded up.

    The factor is the decimal number that was typed: 1.1 * 50 is 55, but 55.000000000000007 in floating point.
    """
    evenly = Fraction(config.model_config.top_k * config.seq_len, config.model_config.experts)
    return min(math.ceil(Fraction(str(config.capacity_factor)) * evenly), config.seq_len)


def earlier_choices(chosen: Tensor, config: TrainConfig, tp: Group, cp: Group) -> Tensor:
    """chosen (batch, seq, k) -> the same shape: how many earlier tokens of the sequence chose the same expert.

    Earlier tokens may be on other ranks, which therefore exchange their choices: k small numbers for a token.
    """
    whole = chosen
    for group in (tp, cp):  # the ranks of `tp` hold neighboring parts of what a rank of `cp` has
        parts = whole.new_empty(group.size, *whole.shape)
        collectives.all_gather(parts, whole.contiguous(), group)
        whole = parts.movedim(0, 1).flatten(1, 2)  # (batch, seq * group.size, k)
    places = rank_order(config.cp_split, whole.shape[1], cp.size, chosen.device)
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
