"""Data parallelism by hand: every rank runs the whole model on its own samples, and gradients are summed over ranks.

Three ways to do it, which differ in when an all-reduce starts and how much it carries:
  naive    after the whole backward, parameter by parameter: computation and communication take turns
  overlap  in a hook, as soon as a parameter's gradient is complete: the backward of the layers below goes on meanwhile
  bucket   the same, but a bucket of parameters at a time: fewer and larger messages
           (Li et al., "PyTorch Distributed", arXiv:2006.15704, section 3.2)

All three share one mechanism. Every gradient has a fixed place in a flat buffer, its bucket (a bucket holds a single
parameter in modes naive and overlap), and micro-batches are added up there in float32 or wider. Buckets follow the
reverse order of the forward, which is roughly the order in which the backward computes gradients, and they are always
launched in that order: bucket i never overtakes bucket i-1, even if a rank did not use some parameter at all. This
matters because every rank must issue the same collectives in the same order. Here the order cannot depend on data.

Ranks need no broadcast at the start: an initial weight is a function of (seed, name, index) alone and so equal
everywhere. Nothing is divided by the number of ranks: each rank's loss is its share of the global mean already.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from common import collectives
from common.group import Group
from common.layers import at_least_float32
from step01_single_gpu.mixed_precision import Add, take_gradients


class Bucket:
    """The gradients of some parameters, end to end in a flat buffer, in which micro-batches are added up.

    flat     the buffer, in at least float32, of `size` elements (default: as many as the parameters have)
    views    parameter -> its part of `flat`, in its shape
    filled   the parameters whose view holds a gradient of this step; the others' views hold anything
    missing  the parameters whose gradient of the last micro-batch has not been computed yet
    work     the all-reduce in flight
    """

    def __init__(self, parameters: list[nn.Parameter], size: int | None = None):
        self.parameters, sizes = parameters, [parameter.numel() for parameter in parameters]
        dtype = at_least_float32(parameters[0].dtype)
        self.flat = torch.empty(size or sum(sizes), dtype=dtype, device=parameters[0].device)
        parts = self.flat[: sum(sizes)].split(sizes)
        self.views = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.start_over()

    def start_over(self) -> None:
        """Be ready for the gradients of another step."""
        self.filled: set[nn.Parameter] = set()
        self.missing = set(self.parameters)
        self.work: collectives.Work | None = None

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor | Add) -> None:
        """Add one micro-batch's gradient of one parameter, or a part of it: see step 1's `TakesGradients`."""
        first = parameter not in self.filled
        if callable(gradient):
            gradient(self.views[parameter], first)
        elif first:  # it overwrites what the previous step left: no pass over the memory to zero it
            self.views[parameter].copy_(gradient)
        else:
            self.views[parameter].add_(gradient)
        self.filled.add(parameter)

    def zero_unused(self) -> None:
        """Write zeros for the parameters that this rank has not used: they are its share of the sum over ranks."""
        for parameter in self.views.keys() - self.filled:
            self.views[parameter].zero_()


class DataParallel:
    """Takes gradients from autograd, sums them over micro-batches and over the ranks of `group`.

    Args:
        parameters: in the order of the forward.
        mode: naive, overlap or bucket, see above.
        bucket_mb: size of a bucket in MB (10^6 bytes) for mode bucket. A larger parameter has a bucket of its own.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Group, mode: str = "bucket", bucket_mb: float = 25.0):
        self.parameters, self.group, self.mode = parameters, group, mode
        self.buckets = [Bucket(some) for some in fill_buckets(parameters, mode, bucket_mb)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.next_bucket = 0  # index of the bucket to launch next
        self.synchronising = True  # buckets may be launched
        for parameter in parameters:
            # A parameter's `spec` (common/parameter.py) says which of the ranks that hold it counts and saves it
            parameter.spec.owner &= group.rank == 0
        take_gradients(parameters, self)

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's backward. Before the `last` one of a step, gradients are only added up, as in
        `no_sync` of PyTorch's DDP.
        """
        self.synchronising = last
        try:
            yield
        finally:
            self.synchronising = True

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor | Add, whole: bool = True) -> None:
        """See step 1's `TakesGradients`. In the last micro-batch this may launch buckets."""
        bucket = self.bucket_of[parameter]
        if bucket.work is not None:
            raise RuntimeError(f"{parameter.spec.name}: a gradient came after its bucket was launched")
        bucket.add(parameter, gradient)
        if self.synchronising and whole:
            bucket.missing.discard(parameter)
            if self.mode != "naive":
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Launch, in order, every next bucket that is complete."""
        while self.next_bucket < len(self.buckets) and not self.buckets[self.next_bucket].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self.next_bucket]
        overlapping = self.mode != "naive"
        bucket.zero_unused()
        bucket.work = collectives.all_reduce(bucket.flat, self.group, async_op=overlapping)
        self.next_bucket += 1

    def finish(self) -> list[torch.Tensor]:
        """Launch what the last backward has left, wait for all, and return the summed gradients, one per parameter.

        They are views of the buckets and valid until the next backward.
        """
        while self.next_bucket < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            bucket.work.wait()  # in mode naive our Work (PyTorch returns None) has completed already
            bucket.start_over()
        self.next_bucket = 0
        return [self.bucket_of[parameter].views[parameter] for parameter in self.parameters]


def fill_buckets(parameters: list[nn.Parameter], mode: str, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Group the parameters, in reverse order of the forward, into buckets of at most `bucket_mb` each.

    A larger parameter gets a bucket to itself, and so does every parameter in modes naive and overlap.
    """
    limit = round(bucket_mb * 1e6, 3) if mode == "bucket" else 0  # 3 digits: it may be infinite
    sizes = [parameter.numel() * at_least_float32(parameter.dtype).itemsize for parameter in parameters]
    return [[parameters[index] for index in bucket] for bucket in pack(sizes, limit)]


def pack(sizes: list[float], limit: float) -> list[list[int]]:
    """The same for any sizes: which parameters, by their place in the forward, each bucket of at most `limit` holds."""
    buckets, room = [], 0
    for index in reversed(range(len(sizes))):
        if sizes[index] > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets
