"""Hunt in step 2: two ranks that do not train like one process."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, SUMS = "step02_data_parallel/train.py", "step02_data_parallel/data_parallel.py"
BATCHES = "step01_single_gpu/data/batches.py"
ONE = Launch("step01_single_gpu/train.py")

SAMPLES_TWICE = Bug(
    edits=(
        Edit(
            BATCHES,
            "        rank, size = (dp.rank, dp.size) if dp else (0, 1)\n"
            "        first = (index * size + rank) * micro_batch\n",
            "        rank = dp.rank if dp else 0\n        first = (index + rank) * micro_batch\n",
        ),
    ),
    beside=(
        Edit(
            BATCHES,
            "They are rows (index * dp.size + dp.rank) * micro_batch and following of the global batch, so that the "
            "union\n        over ranks and micro-batches is the same in every layout. Raises ",
            "They are rows of the global batch, whose union over ranks and micro-batches is the same in every "
            "layout.\n        Raises ",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "", 2)),
    unseen=Launch(TRAIN, "--micro-batch 1 --dp-mode overlap", 3),
    ask="Which rows of the global batch does each rank read in each micro-batch? Write them into a table.",
    why="The second micro-batch of rank 0 is the first one of rank 1: a step over `size` micro-batches is missing. "
    "Curves look healthy, as nothing is wrong with the gradients of what is seen; but some rows count twice, and the "
    "last ones of each batch are never seen. With a single micro-batch per rank it is right.",
    source="we know of no report of just this step. In LongLive samples overlapped between ranks and others were "
    "skipped, as each rank shuffled by a seed of its own (https://github.com/NVlabs/LongLive/issues/71); rbyte's "
    "loader drew the same samples on every rank (https://github.com/yaak-ai/rbyte/pull/106).",
)

LAST_ONLY = Bug(
    edits=(
        Edit(
            SUMS,
            "first = parameter not in self.filled",
            "first = parameter in self.missing",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "", 2)),
    unseen=Launch(TRAIN, "--micro-batch 2 --bucket-mb 0.02", 3),
    ask="When is a gradient the first one of its step? Follow one parameter through two micro-batches.",
    why="What a bucket calls missing are gradients of the last micro-batch, and until that one all of them are. So "
    "every gradient counts as the first one of its step and overwrites the sum, and only the last micro-batch is "
    "reduced. The losses are added up elsewhere, so the first one is right.",
    source="with the same symptom, NeMo Automodel, in a pipeline "
    "(https://github.com/NVIDIA-NeMo/Automodel/pull/3530): only the gradient norm gave it away.",
)

AVERAGED = Bug(
    edits=(
        Edit(
            SUMS,
            "        self.next_bucket = 0  # index of the bucket to launch next\n"
            "        self.synchronising = True  # buckets may be launched\n",
            "        self.next_bucket, self.synchronising = 0, True  # bucket to launch next, and whether it may be\n"
            "        self.share = 1 / group.size  # of this rank in a mean over all\n",
        ),
        Edit(
            SUMS,
            "return [self.bucket_of[parameter].views[parameter] for",
            "return [self.bucket_of[parameter].views[parameter].mul_(self.share) for",
        ),
    ),
    beside=(
        Edit(
            SUMS,
            "everywhere. Nothing is divided by the number of ranks: each rank's loss is its share of the global mean "
            "already.\n",
            "everywhere, as samples are a function of (seed, position).\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "", 2)),
    unseen=Launch(TRAIN, "--micro-batch 1 --dp-mode naive", 3),
    ask="What is the mean of the losses, and who takes it? Compare a bucket's sum with that of one process.",
    why="The sum over ranks is divided by their number, but each rank's loss is its share of the mean over the whole "
    "batch already: the mean is taken twice. Adam divides the factor away, and clipping may hide it; the norm shows "
    "it.",
    source="we know of nobody who divided twice. The opposite, a factor that is missing, is open in "
    "DeepSpeed (https://github.com/deepspeedai/DeepSpeed/issues/7773), and was noticed when somebody logged the norm.",
)

LABS = [
    Hunt(
        id="hunt-02-a",
        title="Two ranks, another curve",
        minutes=20,
        task=handout(
            "Two ranks of step 2 should train what one process of step 1 trains. In this folder they do not.",
            before="lesson 2",
        ),
        hints=(
            "Which differs in step 0: the loss, the gradient norm, or both? A wrong loss points to data or forward, a "
            "right one to what happens to gradients.",
            "Is the ratio of the norms a simple one? Does it change with --micro-batch 6, where each rank has a single "
            "micro-batch?",
            "Three things must hold: every sample is seen once, every micro-batch is added, every rank is added. Print "
            "each, and compare with one process.",
        ),
        bugs=(SAMPLES_TWICE, LAST_ONLY, AVERAGED),
    ),
]
