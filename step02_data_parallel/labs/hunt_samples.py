"""Hunt in step 2: two ranks that do not train like one process."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, SUMS = "step02_data_parallel/train.py", "step02_data_parallel/data_parallel.py"
BATCHES = "step01_single_gpu/data/batches.py"
ONE = Launch("step01_single_gpu/train.py")

SAME_SAMPLES = Bug(
    edits=(Edit(BATCHES, "first = (index * size + rank) * micro_batch", "first = index * size * micro_batch"),),
    seen=(ONE, Launch(TRAIN, "", 2)),
    unseen=Launch(TRAIN, "--micro-batch 1 --dp-mode overlap", 3),
    why="All ranks take the rows of rank 0. Curves look healthy, as nothing is wrong with the gradients of what is "
    "seen; but half of the data never is, and two ranks compute the same twice.",
    source="rbyte, whose loader drew the same samples on every rank, until two ranks were seen to "
    "iterate over the same batches (https://github.com/yaak-ai/rbyte/pull/106); speculators, which told ranks apart "
    "by their number within the node (https://github.com/vllm-project/speculators/pull/427).",
)

LAST_ONLY = Bug(
    edits=(
        Edit(
            SUMS,
            "        self.synchronising = last\n        try:\n",
            "        self.synchronising = last\n        for bucket in self.buckets:\n            bucket.start_over()\n"
            "        try:\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "", 2)),
    unseen=Launch(TRAIN, "--micro-batch 2 --bucket-mb 0.02", 3),
    why="Buckets start over at every micro-batch instead of once per step: the next gradient overwrites the sum, and "
    "only the last micro-batch is reduced. The losses are added up elsewhere, so the first one is right.",
    source="NeMo Automodel, in a pipeline (https://github.com/NVIDIA-NeMo/Automodel/pull/3530): only "
    "the gradient norm gave it away.",
)

AVERAGED = Bug(
    edits=(
        Edit(
            SUMS,
            "            bucket.start_over()\n        self.next_bucket = 0",
            "            bucket.flat.div_(self.group.size)\n            bucket.start_over()\n        "
            "self.next_bucket = 0",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "", 2)),
    unseen=Launch(TRAIN, "--micro-batch 1 --dp-mode naive", 3),
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
            "Two ranks of step 2 should train what one process of step 1 trains. Since the last commit they do not.",
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
        bugs=(SAME_SAMPLES, LAST_ONLY, AVERAGED),
    ),
]
