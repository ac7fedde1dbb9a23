"""Schedules that split the backward. I computes the gradient of the input, which the previous stage is waiting for. W
computes the gradients of the weights, for which nobody is waiting, so it can fill what would be bubble.

Letters: p ranks, m micro-batches; F, I and W are the times of these actions, and B = I + W. n is the number of
micro-batches that a table is written for: m or, if those do not fill the pipeline, as many as do. `expand_pattern`
leaves out the surplus. On 3 ranks with 4 micro-batches, if F = I = W:

    zb-h1   rank 0  F0 F1 F2 ......I0 W0 F3 I1 W1 I2 W2 I3 W3
            rank 1  ...F0 F1 ...I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
            rank 2  ......F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from step05_pipeline.schedules.actions import Action, expand_pattern


def zero_bubble_h1(p: int, m: int, v: int) -> list[list[Action]]:
    """Zero Bubble (Qi et al., arXiv:2401.10241, section 2.1): 1F1B's order of F and I. Bubble: (p - 1)(F + B - 2W).

    That is the bubble if W takes no longer than F and than I. Rank k defers each W by k micro-batches. Counting
    micro-batches whose W is still due, every rank holds up to p, as many as 1F1B's first rank.
    """
    return [split_row(m, ahead=p - 1 - rank, weights_later=rank) for rank in range(p)]


def split_row(m: int, ahead: int, weights_later: int) -> list[Action]:
    """The actions of one rank: `ahead` forwards before the first I, and `weights_later` more I than W from then on."""
    n = max(m, ahead + weights_later)
    return expand_pattern(
        (ahead, "F"), (weights_later, "F I"), (n - ahead - weights_later, "F I W"), (ahead, "I W"), micro_batches=m
    )
