"""A collective and a matrix product cut into parts, so that one overlaps the other: asynchronous tensor parallelism
(Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023).

An all-gather followed by a product becomes a ring of tp steps: a rank multiplies the part of the sequence that it has
while the next part is in flight. A product followed by a reduce-scatter is the same ring in the other direction.

With 4 ranks, this is what rank 1 does. Parts of the sequence are 0 to 3, and sN is a sum for part N:

    gather_and_multiply                        multiply_and_scatter
    hop 0  multiply 1  | 2 arrives from 2      first  its summand of s0
    hop 1  multiply 2  | 3 arrives from 2      hop 1  its summand of s3 | s0 goes to rank 2, s3 arrives from rank 0: add
    hop 2  multiply 3  | 0 arrives from 2      hop 2  its summand of s2 | s3 goes to rank 2, s2 arrives from rank 0: add
    last   multiply 0                          hop 3  its summand of s1 | s2 goes to rank 2, s1 arrives from rank 0: add
"""

import torch

from common import collectives
from common.group import Group
from step04_tensor_parallel.linear import output


def gather_and_multiply(x: torch.Tensor, weights: tuple[torch.Tensor, ...], group: Group) -> list[torch.Tensor]:
    """Return the gathered sequence times each weight: x (batch, seq/tp, in), weight (out, in) -> (batch, seq, out)."""
    batch, part, _ = x.shape
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    results = [x.new_empty(batch, part * group.size, weight.shape[0]) for weight in weights]
    tokens = x.contiguous()

    def multiply(tokens: torch.Tensor, source: int) -> None:
        """Multiply the part of the sequence that rank `source` holds."""
        for result, weight in zip(results, weights, strict=True):
            result[:, source * part : (source + 1) * part] = output(tokens, weight)

    for hop in range(group.size - 1):
        received = torch.empty_like(tokens)
        work = collectives.exchange([(tokens, left)], [(received, right)], group, async_op=True)
        multiply(tokens, (group.rank + hop) % group.size)
        work.wait()
        tokens = received
    multiply(tokens, left)  # what arrived last
    return results


def multiply_and_scatter(x: torch.Tensor, weight: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's part of the sum: x (batch, seq, in/tp), weight (out, in/tp) -> (batch, seq/tp, out).

    Partial sums travel round the ring: each rank adds its own summand to what it has received, and sends it on.
    """
    part = x.shape[1] // group.size
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size

    def summand(target: int) -> torch.Tensor:
        """What this rank adds to the part of the sequence that rank `target` keeps."""
        return output(x[:, target * part : (target + 1) * part], weight)

    total = summand(left)
    for hop in range(1, group.size):
        received = torch.empty_like(total)
        work = collectives.exchange([(total, right)], [(received, left)], group, async_op=True)
        total = summand((left - hop) % group.size)
        work.wait()
        total += received
    return total
