"""Known-wrong variants of the mechanisms, as small patches: those of step 2, and `patched` for those of every step.
The suite must reject every one of them.

Each is a mistake that was found in real code (teaching repositories, and bug reports of large frameworks).
"""

import contextlib
from unittest import mock

import torch

from common import collectives
from common.data.batches import Batches
from step02_data_parallel.data_parallel import DataParallel
from tests.mutants import patches_step03, patches_step04, patches_step05


def _hook_takes_the_parameter(stack):
    """The post-accumulate hook's argument is taken for the gradient: weights are averaged, gradients stay local."""

    def take(self, parameter):
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self.synchronising:
            collectives.all_reduce(parameter.data, self.group)
            parameter.data.div_(self.group.size)
        view = self.bucket_of[parameter].views[parameter]
        view.copy_(view + gradient if parameter in self.filled else gradient)
        self.filled.add(parameter)

    def finish(self):
        self.filled.clear()
        return [self.bucket_of[parameter].views[parameter] for parameter in self.parameters]

    stack.enter_context(mock.patch.object(DataParallel, "_take", take))
    stack.enter_context(mock.patch.object(DataParallel, "finish", finish))


def _only_last_micro_batch_reduced(stack):
    """A tensor hook reduces the gradient it is given: under accumulation that is the last micro-batch's alone."""
    accumulate = DataParallel.accumulate

    def wrong(self, parameter, gradient):
        bucket = self.bucket_of[parameter]
        if self.synchronising and parameter in self.filled:
            collectives.all_reduce(gradient, self.group)
            bucket.views[parameter].add_(gradient)
        else:
            accumulate(self, parameter, gradient)

    def launch(self, bucket):
        bucket.work = collectives.Work()
        self.launched += 1

    stack.enter_context(mock.patch.object(DataParallel, "accumulate", wrong))
    stack.enter_context(mock.patch.object(DataParallel, "_launch", launch))


def _missing_share(stack):
    """Each rank's loss is the mean over its own tokens, and gradients are summed: they are dp times too large."""
    value = property(lambda self: self.global_batch * self.seq_len // torch.distributed.get_world_size())
    stack.enter_context(mock.patch.object(Batches, "target_tokens", value))


def _reduced_on_every_micro_batch(stack):
    """no_sync is forgotten: sums that were reduced already are added to and reduced again."""

    def wrong(self, parameter, gradient):
        view = self.bucket_of[parameter].views[parameter]
        view.copy_(view + gradient if parameter in self.filled else gradient)
        self.filled.add(parameter)
        collectives.all_reduce(view, self.group)

    def launch(self, bucket):
        bucket.work = collectives.Work()
        self.launched += 1

    stack.enter_context(mock.patch.object(DataParallel, "accumulate", wrong))
    stack.enter_context(mock.patch.object(DataParallel, "_launch", launch))


def _averaged_over_ranks(stack):
    """The sum of shares is divided by the number of ranks once more, as an averaging all-reduce would."""
    finish = DataParallel.finish

    def wrong(self):
        gradients = finish(self)
        torch._foreach_div_(gradients, float(self.group.size))
        return gradients

    stack.enter_context(mock.patch.object(DataParallel, "finish", wrong))


def _same_samples_everywhere(stack):
    """Every rank reads the samples of rank 0: curves look healthy, most of the data is never seen."""
    micro_batch = Batches.micro_batch

    def wrong(self, step, index, size, dp_rank=0, dp_size=1, device="cpu"):
        return micro_batch(self, step, index, size, 0, dp_size, device)

    stack.enter_context(mock.patch.object(Batches, "micro_batch", wrong))


def _stale_bucket(stack):
    """Gradients are read before the all-reduce has completed."""

    def finish(self):
        total = [self.bucket_of[parameter].views[parameter].clone() for parameter in self.parameters]
        real(self)
        return total

    real = DataParallel.finish
    stack.enter_context(mock.patch.object(DataParallel, "finish", finish))


PARITY_MUTANTS = {
    "hook takes the parameter": _hook_takes_the_parameter,
    "only the last micro-batch reduced": _only_last_micro_batch_reduced,
    "missing share of the global mean": _missing_share,
    "reduced on every micro-batch": _reduced_on_every_micro_batch,
    "averaged over ranks": _averaged_over_ranks,
    "same samples everywhere": _same_samples_everywhere,
    "stale bucket": _stale_bucket,
}


@contextlib.contextmanager
def patched(mutant: str | None):
    """Apply a mutant of any step to this process for the duration; None: nothing."""
    with contextlib.ExitStack() as stack:
        if mutant is not None:
            later = patches_step03.MUTANTS | patches_step04.MUTANTS | patches_step05.MUTANTS
            (PARITY_MUTANTS | later)[mutant](stack)
        yield
