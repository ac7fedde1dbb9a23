"""The router of a layer with experts: which experts a token passes through, and what keeps all of them busy.

A router that is only trained to lower the loss soon sends most tokens to a few experts: those that get more tokens
learn faster, and are chosen even more. `--balance` offers two remedies:
  aux   an auxiliary loss for every sequence that grows with the imbalance (Switch: Fedus et al., arXiv:2101.03961; for
        each sequence: DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
  bias  no loss: a bias is added to the scores, only for the choice, and every step lowers that of busy experts (Wang
        et al., arXiv:2408.15664)
The z-loss (ST-MoE: Zoph et al., arXiv:2202.08906) keeps logits small. All statistics are those of single sequences or
of the whole global batch, so that nothing depends on micro-batches or on how many ranks there are.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import collectives
from common.layers import at_least_float32
from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel.capacity import SequenceParts, beyond_capacity

GATES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    top_k               experts of a token
    gate                softmax or sigmoid: what makes scores of logits
    groups, groups_per_token
                        the experts are divided into so many groups, and those of a token belong to so many
    normalize, scale    whether the gates of a token add up to 1; what they are multiplied by then
    aux_coef, z_coef    coefficients of the auxiliary loss and of the z-loss, 0 for none
    capacity_factor     an expert takes so many equal shares of a sequence's choices; 0 for all

    Raises ValueError for what does not fit together.
    """

    experts: int
    top_k: int
    gate: str = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    normalize: bool = True
    scale: float = 1.0
    aux_coef: float = 0.0
    z_coef: float = 0.0
    capacity_factor: float = 0.0

    def __post_init__(self):
        if self.gate not in GATES:
            raise ValueError(f"gate {self.gate!r} is none of {', '.join(GATES)}")
        if self.experts % self.groups or self.groups_per_token > self.groups:
            raise ValueError(f"{self.groups_per_token} of {self.groups} groups of {self.experts} experts")
        if self.top_k > (allowed := self.experts // self.groups * self.groups_per_token):
            raise ValueError(f"top_k {self.top_k} exceeds the {allowed} experts that a token may choose from")


class Router(nn.Module):
    """Chooses `top_k` of the experts for every token, and says how much each of them counts.

    weight      (experts, hidden)
    bias        (experts,), a buffer: added to the scores for the choice alone. Zero, unless `Balancing` moves it
    load        (experts,) int64: how many tokens have chosen each expert since the last `start_over`
    auxiliary   () float64: this rank's share of the auxiliary losses since then
    dropped     () int64: how many choices exceeded the capacity of their expert since then

    `choose` may be replaced: by one that ignores the scores, say, so that all experts get equally many tokens.

    Args:
        parts: of the sequences, on this rank and others.
        sequences: of the global batch. The auxiliary losses are means over them, as the loss is.
        scaler: of the loss. It multiplies the auxiliary losses as well.
        dtype: the training type.
    """

    def __init__(
        self,
        hidden: int,
        routing: Routing,
        parts: SequenceParts,
        sequences: int,
        scaler: LossScaler,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.routing, self.parts, self.sequences, self.scaler = routing, parts, sequences, scaler
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden))
        self.register_buffer("bias", torch.zeros(routing.experts, dtype=at_least_float32(dtype), device=device))
        self.start_over()

    def start_over(self) -> None:
        """Forget what has been counted."""
        self.load = torch.zeros(self.routing.experts, dtype=torch.int64, device=self.bias.device)
        self.auxiliary = torch.zeros((), dtype=torch.float64, device=self.bias.device)
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.bias.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (batch, seq, hidden) -> the chosen experts (batch * seq, k) int64 and their gates, in at least float32.

        A choice beyond the capacity of its expert is number `experts`, which does not exist, and its gate is 0.
        """
        logits, scores = self.score(x)
        chosen = self.choose(scores.detach())  # (batch, seq, k); no gradient passes through a choice
        gates = self.weigh(scores, chosen)
        dropped = beyond_capacity(chosen, self.routing.capacity_factor, self.routing.experts, self.parts)

        counts = self.count(chosen)
        auxiliary = self.auxiliary_loss(logits, scores, counts)
        gates = _Account.apply(gates.masked_fill(dropped, 0), auxiliary, self, counts.sum(0), dropped.sum())
        return chosen.masked_fill(dropped, self.routing.experts).flatten(0, 1), gates.flatten(0, 1)

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (batch, seq, hidden) -> logits and scores, both (batch, seq, experts), in at least float32."""
        dtype = at_least_float32(x.dtype)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        return logits, logits.softmax(-1) if self.routing.gate == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        """scores (..., experts) -> the best `top_k` experts of the allowed groups (..., k), the best one first.

        .1 .5 .6 | .9 .1 .0 | .8 .0 .1    three groups, whose two best add up to 1.1, 1.0 and 0.9: two are allowed
        chosen: 3, 2, 1                   the best three in them. Expert 6 is better than 2, but not allowed
        """
        scores, groups = scores + self.bias, self.routing.groups
        if self.routing.groups_per_token < groups:
            by_group = scores.unflatten(-1, (groups, -1))  # (..., groups, experts / groups)
            two_best = by_group.topk(min(2, by_group.shape[-1])).values  # a group is as good as its two best experts
            allowed = _best(two_best.sum(-1), self.routing.groups_per_token)
            forbidden = torch.ones_like(two_best[..., 0], dtype=torch.bool).scatter_(-1, allowed, False)
            scores = by_group.masked_fill(forbidden.unsqueeze(-1), -math.inf).flatten(-2)
        return _best(scores, self.routing.top_k)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the gates: scores (batch, seq, experts), chosen (batch, seq, k) -> (batch, seq, k)."""
        gates = scores.gather(-1, chosen)
        if self.routing.normalize:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        return gates * self.routing.scale

    def count(self, chosen: Tensor) -> Tensor:
        """chosen (batch, seq, k) -> (batch, experts): how many of a sequence's tokens here chose each expert."""
        counts = torch.zeros(len(chosen), self.routing.experts, dtype=torch.int64, device=chosen.device)
        return counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen).flatten(1))

    def auxiliary_loss(self, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        """Return these tokens' share of the auxiliary losses, whose sum over the global batch is the mean.

        For each sequence of T tokens this is alpha * sum_i f_i P_i (DeepSeek-V3, equations 17 to 20), where f_i is the
        number of tokens that chose expert i as a multiple of the mean, k T / E, and P_i the mean probability of
        expert i; and the mean over the tokens of the squared log-sum-exp of the logits.

        Args:
            logits, scores: (batch, seq, experts), of the tokens on this rank.
            counts: (batch, experts), how many of them chose each expert.
        """
        routing, tokens, factor = self.routing, self.parts.length(logits.shape[1]), 1 / self.sequences  # for a mean
        loss = torch.zeros((), dtype=scores.dtype, device=scores.device)
        if routing.aux_coef:
            counts = counts.clone()
            for group in self.parts.groups:
                collectives.all_reduce(counts, group)
            f = counts.to(scores.dtype) * (routing.experts / (routing.top_k * tokens))
            shares = scores if routing.gate == "softmax" else F.logsigmoid(logits).softmax(-1)  # sigmoids may be 0
            p = shares.sum(1) / tokens
            loss = loss + routing.aux_coef * factor * (f * p).sum()
        if routing.z_coef:
            loss = loss + routing.z_coef * factor * logits.logsumexp(-1).square().sum() / tokens
        return loss


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores along the last axis, the largest first. Of equal ones the first wins."""
    found = []
    for _ in range(count):  # `topk` does not say which of equal ones it takes, and a whole `sort` takes longer
        found.append(scores.max(-1, keepdim=True).indices)
        scores = scores.scatter(-1, found[-1], -math.inf)
    return torch.cat(found, -1)


class _Account(torch.autograd.Function):
    """Passes the gates on unchanged. Its backward adds up what was counted, and starts that of the auxiliary losses.

    Why is it counted in the backward? With recomputation a layer's forward runs twice per micro-batch, and in an
    evaluation it runs without any training. But a backward runs exactly once for each micro-batch of a training step.

    Why do the auxiliary losses start here? A layer returns hidden states alone, perhaps to another pipeline stage, so
    the auxiliary losses cannot reach the end of the model, where they would be added to the loss. It is enough that
    their own backward runs at some time, and starts with the same scale as the loss's.
    """

    @staticmethod
    def forward(ctx, gates, auxiliary, router, load, dropped):
        ctx.router, ctx.auxiliary, ctx.load, ctx.dropped = router, auxiliary.detach(), load, dropped
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient):
        router = ctx.router
        router.auxiliary += ctx.auxiliary
        router.load += ctx.load
        router.dropped += ctx.dropped
        return gradient, torch.full_like(ctx.auxiliary, router.scaler.scale), None, None, None
