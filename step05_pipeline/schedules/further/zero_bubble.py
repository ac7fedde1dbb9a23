"""Zero-bubble schedules beyond zb-h1 (split_backward.py, whose letters these are). On 3 ranks with 4 micro-batches:

zb-h2   rank 0  F0 F1 F2 F3 ...I0 W0 I1 W1 I2 W2 I3 W3
        rank 1  ...F0 F1 F2 I0 F3 I1 ...I2 W0 I3 W1 W2 W3
        rank 2  ......F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
"""

from step05_pipeline.schedules.actions import Action, expand_pattern
from step05_pipeline.schedules.split_backward import split_row


def zero_bubble_h2(p: int, m: int, v: int) -> list[list[Action]]:
    """Zero Bubble (section 2.2): more forwards at first. Bubble within a rank: (p - 1)(F + B - 3W).

    Counting micro-batches whose W is still due, every rank holds up to 2p - 1. Ranks finish one after another, in the
    order in which they began: the bubble only vanishes if each may start its next step without waiting for the others.
    """
    return [split_row(m, ahead=2 * (p - 1 - rank), weights_later=2 * rank) for rank in range(p)]


def zero_bubble_v(p: int, m: int, v: int) -> list[list[Action]]:
    """Qi et al. (arXiv:2405.15362, V-ZB), after Zero Bubble's ZB-V: no bubble within a rank if F = I = W and m >= 2p.

    Every rank holds as many activations as 1F1B's first rank: 2p of half the size.
    """
    n = max(m, 2 * p - 1)
    return [
        expand_pattern(
            (2 * (p - rank) - 1, "F.0"),  # until the first micro-batch returns on its way up
            (rank, "F.1 F.0"),
            (p - rank, "F.1 I.1 W"),
            (n - 2 * p + rank + 1, "F.0 I.0 W F.1 I.1 W"),
            (p - rank - 1, "I.0 W F.1 I.1 W"),
            (rank, "I.0 I.1"),
            (p - rank, "I.0 W"),
            micro_batches=m,
        )
        for rank in range(p)
    ]
