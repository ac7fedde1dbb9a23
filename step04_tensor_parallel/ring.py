"""Communication and multiplication in chunks: what asynchronous tensor parallelism means (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023).

A gather followed by a multiplication is a ring of tp steps, each of which multiplies the part of the sequence that it
has while the next part is on its way; a multiplication followed by a reduce-scatter is the same ring backwards.
"""

import torch
import torch.nn.functional as F

from common import collectives
from common.process_groups import Group


def gather_and_multiply(x: torch.Tensor, weights: tuple[torch.Tensor, ...], group: Group) -> list[torch.Tensor]:
    """x (batch, seq/tp, hidden) -> (batch, seq, width) for each weight (width, hidden): gather, then F.linear."""
    batch, part, _ = x.shape
    results = [x.new_empty(batch, part * group.size, weight.shape[0]) for weight in weights]
    chunk = x.contiguous()
    for hop in range(group.size):
        source = (group.rank + hop) % group.size  # whose part this chunk is
        if hop < group.size - 1:
            coming = torch.empty_like(chunk)
            to, origin = (group.rank - 1) % group.size, (group.rank + 1) % group.size
            work = collectives.exchange([(chunk, to)], [(coming, origin)], group, async_op=True)
        for result, weight in zip(results, weights, strict=True):
            result[:, source * part : (source + 1) * part] = F.linear(chunk, weight)
        if hop < group.size - 1:
            work.wait()
            chunk = coming
    return results


def multiply_and_scatter(x: torch.Tensor, weight: torch.Tensor, group: Group) -> torch.Tensor:
    """x (batch, seq, width/tp) -> (batch, seq/tp, hidden): F.linear, then reduce-scatter: sums go round the ring."""
    part = x.shape[1] // group.size
    work = coming = None
    for hop in range(group.size):
        target = (group.rank - 1 - hop) % group.size  # whose part is being summed here
        total = F.linear(x[:, target * part : (target + 1) * part], weight)
        if work is not None:
            work.wait()
            total += coming
        if hop < group.size - 1:
            coming = torch.empty_like(total)
            to, origin = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            work = collectives.exchange([(total, to)], [(coming, origin)], group, async_op=True)
    return total
