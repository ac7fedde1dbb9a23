"""A unit of ZeRO: how weights and gradients travel. When they do is decided by zero.py and by_layer.py.

For example, a layer has matrices A (6 numbers) and B (5), which 4 ranks divide: 12 places, 3 for each rank.

    weights   A0 A1 A2 | A3 A4 A5 | B0 B1 B2 | B3 B4 --    the parameters A and B are views, and -- is padding
    shard of   rank 0     rank 1     rank 2     rank 3     the optimizer on rank 3 sees one piece, B[3:5]

If A had 7 numbers, the shard of rank 2 would hold two pieces: A[6:7] and B[0:2].
"""

import math
from dataclasses import replace

from torch import nn

from common import collectives
from common.group import Group
from step02_data_parallel.data_parallel import Bucket

# By device, in elements: every shard begins at a multiple of it. CUDA kernels read 16 bytes at a time where they can,
# and memory comes in lines of 128 bytes: 64 elements of 16 bits
ALIGNMENT = {"cuda": 64}


class Unit:
    """Parameters that are gathered, reduced and freed together, end to end in a flat buffer padded to N equal shards.

    weights     all of them; the parameters are views. In stage 3 without memory, except between `fetch` and `free`
    shard       this rank's 1/N of the weights: a part of `weights`, or in stage 3 a tensor of its own
    pieces      for each parameter that the shard touches: which slice of the shard, and that slice with a spec
    all_gather  brings the shards together; may be replaced, for example by one that sends fewer bits
    gathering   the all-gather of the weights, in flight or done; None: they are absent, or out of date
    bucket      the gradients of the unit from the first one on; stages 2 and 3 drop it once it is reduced; or None
    reduced     this rank's 1/N of the summed gradients: a part of the bucket, or in stages 2 and 3 a tensor of its own
    scattering  the reduce-scatter of the bucket, in flight; or None
    summing     the all-reduce of `reduced` over the replicas, which follows the step's last reduce-scatter; or None
    """

    def __init__(self, parameters: list[nn.Parameter], stage: int, group: Group, replicas: Group):
        self.parameters, self.stage, self.group, self.replicas = parameters, stage, group, replicas
        align = ALIGNMENT.get(parameters[0].device.type, 1)
        size = math.ceil(sum(parameter.numel() for parameter in parameters) / (group.size * align)) * align
        self.mine = slice(group.rank * size, (group.rank + 1) * size)  # where in the unit this rank's shard is
        self.weights = parameters[0].data.new_empty(size * group.size)
        self.shard = self.weights[self.mine] if stage < 3 else self.weights.new_empty(size)
        self.pieces, start = [], 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.data = self.weights[start:stop].view(parameter.shape)
            low, high = max(start, self.mine.start), min(stop, self.mine.stop)
            if low < high:
                where = slice(low - self.mine.start, high - self.mine.start)
                piece = self.shard[where]
                piece.spec = replace(parameter.spec, flat_range=(low - start, high - start))
                self.pieces.append((where, piece))
            start = stop
        self.all_gather = collectives.all_gather
        self.start_over()

    def start_over(self) -> None:
        """Forget the gradients, and the gathered weights: the optimizer is about to change the shard."""
        self.gathering = self.bucket = self.reduced = self.scattering = self.summing = None
        if self.stage == 3:
            self.free()

    # ---- weights ----

    def fetch(self) -> collectives.Work:
        """Begin to gather the weights, unless that has happened already. Whoever uses them waits for the result."""
        if self.gathering is None:
            if self.stage == 3:
                self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())
            self.gathering = self.all_gather(self.weights, self.shard, self.group, async_op=True)
        return self.gathering

    def free(self) -> None:
        """Release the memory of the gathered weights (stage 3 only). The storage shrinks to zero bytes, but its views
        stay: the parameters, and what autograd saved for the backward, are valid again when `fetch` refills it.
        """
        self.gathering = None
        self.weights.untyped_storage().resize_(0)

    # ---- gradients ----

    def make_bucket(self) -> Bucket:
        """Return the bucket for this step's gradients, which is allocated when the first one is to be stored."""
        self.bucket = self.bucket or Bucket(self.parameters, self.weights.numel())
        return self.bucket

    def reduce_scatter(self) -> None:
        """Begin to sum the gradients over the group; this rank gets its shard of the sum."""
        bucket = self.make_bucket()  # a new one where this rank has used none of the parameters
        bucket.zero_unused()
        self.scattering = collectives.reduce_scatter(bucket.flat[self.mine], bucket.flat, self.group, async_op=True)

    def complete(self) -> None:
        """Wait for the reduce-scatter. Stages 2 and 3 add the shard of the sum to `reduced` and free the bucket."""
        self.scattering.wait()
        self.scattering, summed = None, self.bucket.flat[self.mine]
        if self.stage < 2:
            self.reduced = summed
        else:
            self.reduced = summed.clone() if self.reduced is None else self.reduced.add_(summed)
            self.bucket.flat.untyped_storage().resize_(0)  # at once: a thread of gloo refers to it a moment longer
            self.bucket = None

    def sum_over_replicas(self, async_op: bool) -> None:
        """Begin to sum `reduced` over the copies of the model. (In stage 0 this is the whole sum, that of step 2.)"""
        self.summing = collectives.all_reduce(self.reduced, self.replicas, async_op=async_op)
