"""Known-wrong variants of data parallelism, and `patched` for those of every step.

Each is a mistake that was found in real code (teaching repositories, and bug reports of large frameworks). The first
ones train something else; the last ones train the right model and let communication wait: no curve shows it.
"""

import contextlib

import torch

from common import collectives
from common.data.batches import Batches
from step02_data_parallel.data_parallel import DataParallel
from tests.mutants import (
    Mutants,
    patches_asynchrony,
    patches_narrow,
    patches_step03,
    patches_step04,
    patches_step05,
    patches_step06,
    patches_step07,
    patches_step08,
)

WRONG_NUMBERS, LATE = Mutants(), Mutants()
finish, backward, micro_batch = DataParallel.finish, DataParallel.backward, Batches.micro_batch


@WRONG_NUMBERS.replaces("hook takes the parameter", DataParallel, "accumulate")
def _(self, parameter, gradient):
    """The post-accumulate hook's argument is taken for the gradient: weights are averaged, gradients stay local."""
    self.bucket_of[parameter].add(parameter, gradient)
    if self.synchronising:
        collectives.all_reduce(parameter.data, self.group)
        parameter.data.div_(self.group.size)


@WRONG_NUMBERS.replaces("only the last micro-batch reduced", DataParallel, "accumulate")
def _(self, parameter, gradient):
    """A tensor hook reduces the gradient it is given: under accumulation that is the last micro-batch's alone."""
    if self.synchronising:
        collectives.all_reduce(gradient, self.group)
    self.bucket_of[parameter].add(parameter, gradient)


@WRONG_NUMBERS.replaces("reduced on every micro-batch", DataParallel, "accumulate")
def _(self, parameter, gradient):
    """Every backward counts as the last one: sums that were reduced already are added to and reduced again."""
    bucket = self.bucket_of[parameter]
    bucket.add(parameter, gradient)
    collectives.all_reduce(bucket.views[parameter], self.group)


@WRONG_NUMBERS.replaces("hook takes the parameter", DataParallel, "_launch_next")
@WRONG_NUMBERS.replaces("only the last micro-batch reduced", DataParallel, "_launch_next")
@WRONG_NUMBERS.replaces("reduced on every micro-batch", DataParallel, "_launch_next")
def _(self):
    """The three above communicate in their own way: buckets are not reduced any more."""
    self.buckets[self.next_bucket].work = collectives.Work()
    self.next_bucket += 1


@WRONG_NUMBERS.replaces("missing share of the global mean", Batches, "target_tokens")
@property
def _(self):
    """Each rank's loss is the mean over its own tokens, and gradients are summed: they are dp times too large."""
    return self.global_batch * self.seq_len // torch.distributed.get_world_size()


@WRONG_NUMBERS.replaces("averaged over ranks", DataParallel, "finish")
def _(self):
    """The sum of shares is divided by the number of ranks once more, as an averaging all-reduce would."""
    gradients = finish(self)
    torch._foreach_div_(gradients, float(self.group.size))
    return gradients


@WRONG_NUMBERS.replaces("same samples everywhere", Batches, "micro_batch")
def _(self, step, index, size, dp_rank=0, dp_size=1, device="cpu"):
    """Every rank reads the samples of rank 0: curves look healthy, most of the data is never seen."""
    return micro_batch(self, step, index, size, 0, dp_size, device)


@WRONG_NUMBERS.replaces("stale bucket", DataParallel, "finish")
def _(self):
    """Gradients are read before the all-reduce has completed."""
    total = [self.bucket_of[parameter].views[parameter].clone() for parameter in self.parameters]
    finish(self)
    return total


@LATE.replaces("last backward missed", DataParallel, "backward")
def _(self, last):
    """No backward counts as the last one of a step, so all-reduces wait for its end."""
    return backward(self, last=False)


@LATE.replaces("one launch per gradient", DataParallel, "_launch_complete")
def _(self):
    """Of several buckets that one gradient completes, only the first is launched."""
    if self.next_bucket < len(self.buckets) and not self.buckets[self.next_bucket].missing:
        self._launch_next()


@contextlib.contextmanager
def patched(mutant: str | None):
    """Apply a mutant of any step to this process for the duration; None: nothing."""
    with contextlib.ExitStack() as stack:
        if mutant is not None:
            steps = patches_step03, patches_step04, patches_step05, patches_step06, patches_step07, patches_step08
            every = WRONG_NUMBERS | LATE
            for module in (*steps, patches_asynchrony, patches_narrow):
                every |= module.MUTANTS
            every[mutant](stack)
        yield
