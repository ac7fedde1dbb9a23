"""Data parallelism by hand: every rank runs the whole model on its own samples, and gradients are summed over ranks.

Three ways to do it, which differ in when an all-reduce starts and how much it carries:
  naive    after the whole backward, parameter by parameter: computation and communication take turns
  overlap  in a hook, as soon as a parameter's gradient is complete: the backward of the layers below goes on meanwhile
  bucket   the same, but a bucket of parameters at a time: fewer and larger messages
           (Li et al., "PyTorch Distributed", arXiv:2006.15704, section 3.2)

All three are one mechanism. Gradients lie in flat buckets (one parameter each for naive and overlap) and accumulate
there in at least float32. Buckets fill in about the order of the backward, which is the reverse of the forward's,
and are launched in one fixed order: bucket i never before bucket i-1, also where a rank does not use a parameter at
all. So all ranks issue the same collectives in the same order, whatever their data did.

Ranks need no broadcast at the start: an initial weight is a function of (seed, name, index) alone and so equal
everywhere. Nothing is divided by the number of ranks: each rank's loss is its share of the global mean already.
"""

from contextlib import contextmanager

import torch
from torch import nn

from common import collectives
from common.model import at_least_float32
from common.process_groups import Group


class Bucket:
    """Gradients of some parameters in one flat buffer."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, dtype = parameters, at_least_float32(parameters[0].dtype)
        self.flat = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        parts = self.flat.split([p.numel() for p in parameters])
        self.views = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.missing = set(parameters)  # whose gradient of the last micro-batch has not come yet
        self.work = None  # the all-reduce under way


class DataParallel:
    """Takes gradients from autograd, sums them over micro-batches and over the ranks of `group`.

    Args:
        parameters: in the order of the forward.
        mode: naive, overlap or bucket, see above.
        bucket_mb: size of a bucket in MB (10^6 bytes) for mode bucket. A larger parameter has a bucket of its
        own.
        buckets: made elsewhere, in the order of their launch (step 3); None: `Bucket`s of the size above.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: Group,
        mode: str = "bucket",
        bucket_mb: float = 25.0,
        buckets: list | None = None,
    ):
        self.parameters, self.group, self.mode = parameters, group, mode
        self.buckets = buckets or [Bucket(some) for some in fill_buckets(parameters, mode, bucket_mb)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.filled: set[nn.Parameter] = set()  # whose view holds a gradient of this step
        self.launched = 0  # buckets launched in this step: always the first ones
        self.synchronising = True
        for parameter in parameters:
            parameter.spec.owner &= group.rank == 0  # every rank holds a replica; the first one counts and saves it
            parameter.register_post_accumulate_grad_hook(self._take)

    @contextmanager
    def no_sync(self, active: bool = True):
        """While `active`, gradients only accumulate: every micro-batch but the last of a step runs in here."""
        self.synchronising = not active
        try:
            yield
        finally:
            self.synchronising = True

    def _take(self, parameter: nn.Parameter) -> None:
        # The hook receives the parameter, not its gradient: reducing the argument would reduce weights
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # a Function that returned None for a weight fires the hook all the same
            self.accumulate(parameter, gradient)

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient of one parameter; in the last one this may launch buckets."""
        bucket = self.bucket_of[parameter]
        if bucket.work is not None:
            raise RuntimeError(f"{parameter.spec.name}: a gradient came after its bucket was launched")
        if parameter in self.filled:
            bucket.views[parameter].add_(gradient)
        else:  # the first one overwrites what the step before left: no pass over the memory to zero it
            bucket.views[parameter].copy_(gradient)
            self.filled.add(parameter)
        if self.synchronising:
            bucket.missing.discard(parameter)
            if self.mode != "naive":
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Launch, in order, every next bucket that is complete."""
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self._launch(self.buckets[self.launched])

    def _launch(self, bucket: Bucket) -> None:
        for parameter in bucket.views.keys() - self.filled:  # unused on this rank: its share of the sum is zero
            bucket.views[parameter].zero_()
        bucket.work = collectives.all_reduce(bucket.flat, self.group, async_op=self.mode != "naive")
        self.launched += 1

    def finish(self) -> list[torch.Tensor]:
        """After the last backward: launch what is left, wait for all. The summed gradients, one for each parameter.

        They are views of the buckets and valid until the next backward.
        """
        for bucket in self.buckets[self.launched :]:
            self._launch(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.work, bucket.missing = None, set(bucket.parameters)
        self.filled.clear()
        self.launched = 0
        return [self.bucket_of[parameter].views[parameter] for parameter in self.parameters]


def fill_buckets(parameters: list[nn.Parameter], mode: str, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Group the parameters, in reverse order of the forward, into buckets of at most `bucket_mb` each.

    A larger parameter gets a bucket to itself, and so does one whose spec asks for it (`own_bucket`). In modes naive
    and overlap every parameter does.
    """
    limit = bucket_mb * 1e6 if mode == "bucket" else 0.0
    buckets, room = [], 0.0
    for parameter in reversed(parameters):
        size = parameter.numel() * at_least_float32(parameter.dtype).itemsize
        alone = parameter.spec.own_bucket
        if not buckets or size > room or alone:
            buckets.append([])
            room = 0.0 if alone else limit
        buckets[-1].append(parameter)
        room -= size
    return buckets
