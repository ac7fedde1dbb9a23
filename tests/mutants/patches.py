"""Known-wrong variants of data parallelism, and `patched` for those of every step.

Each is a mistake that was found in real code (teaching repositories, and bug reports of large frameworks). The first
ones train something else; the last ones train the right model and let communication wait: no curve shows it.
"""

import contextlib

from step01_single_gpu.data.batches import Batches
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
ADD = "bucket.add(parameter, gradient)"
OWN_MEAN = "self.seq_len", "self.seq_len // torch.distributed.get_world_size()"

# The post-accumulate hook's argument is taken for the gradient: weights are averaged, gradients stay local
name = "hook takes the parameter"
average = "collectives.all_reduce(parameter.data, self.group); parameter.data.div_(self.group.size)"
WRONG_NUMBERS.edits(name, DataParallel, "accumulate", ("bucket.missing.discard(parameter)", average))
# A tensor hook reduces the gradient it is given: under accumulation that is the last micro-batch's alone
name = "only the last micro-batch reduced"
reduced = f"self.synchronising and collectives.all_reduce(gradient, self.group); {ADD}"
WRONG_NUMBERS.edits(name, DataParallel, "accumulate", (ADD, reduced))
# Every backward counts as the last one: sums that were reduced already are added to and reduced again
name = "reduced on every micro-batch"
reduced = f"{ADD}; collectives.all_reduce(bucket.views[parameter], self.group)"
WRONG_NUMBERS.edits(name, DataParallel, "accumulate", (ADD, reduced))
# The three above communicate in their own way: buckets are not reduced any more
nothing = 'collectives.all_reduce(bucket.flat, self.group, async_op=self.mode != "naive")', "collectives.Work()"
for name in list(WRONG_NUMBERS):
    WRONG_NUMBERS.edits(name, DataParallel, "_launch_next", nothing)
# Each rank's loss is the mean over its own tokens, and gradients are summed: they are dp times too large
WRONG_NUMBERS.edits("missing share of the global mean", Batches, "target_tokens", OWN_MEAN)
# The sum of shares is divided by the number of ranks once more, as an averaging all-reduce would
average = "bucket.work.wait()", "bucket.work.wait(); bucket.flat.div_(self.group.size)"
WRONG_NUMBERS.edits("averaged over ranks", DataParallel, "finish", average)
# Every rank reads the samples of rank 0: curves look healthy, most of the data is never seen
first = "first = (index * dp_size + dp_rank)", "first = (index * dp_size)"
WRONG_NUMBERS.edits("same samples everywhere", Batches, "micro_batch", first)


@WRONG_NUMBERS.replaces("stale bucket", DataParallel, "finish")
def _(self, finish=DataParallel.finish):
    """Gradients are read before the all-reduce has completed."""
    total = [self.bucket_of[parameter].views[parameter].clone() for parameter in self.parameters]
    finish(self)
    return total


# No backward counts as the last one of a step, so all-reduces wait for its end
never = "self.synchronising = last", "self.synchronising = False"
LATE.edits("last backward missed", DataParallel, "backward", never)
# Of several buckets that one gradient completes, only the first is launched
LATE.edits("one launch per gradient", DataParallel, "_launch_complete", ("while", "if"))


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
