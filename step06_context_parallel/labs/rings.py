"""What the labs about ring attention draw, which tokens are whose, and attention by its definition."""

import torch
from torch import Tensor

from common.labs.ranks import Case


class Steep(Case):
    """A case with scores of some thousand, whose exponentials no float64 can hold."""

    def __str__(self) -> str:
        return f"{super().__str__()}, with scores of some thousand"


def drawn(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence."""
    random = torch.Generator().manual_seed(case.seed)
    q, *others = torch.randn(4, case.tokens, case.width, generator=random, dtype=torch.float64)
    return [q * (1000 if isinstance(case, Steep) else 1), *others]


def places(case: Case, rank: int) -> Tensor:
    """The positions of a rank's tokens, in zigzag."""
    parts = torch.arange(case.tokens).chunk(2 * case.ranks)
    return torch.cat((parts[rank], parts[-1 - rank]))


def attention(case: Case, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention by its definition, to keys that are `seen` (queries, keys): output, and log-sum-exp."""
    scores = q @ k.T * case.width**-0.5
    causal = torch.ones_like(scores, dtype=torch.bool).tril()
    scores = scores.masked_fill(~(causal if seen is None else seen), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
