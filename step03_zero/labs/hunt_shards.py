"""Hunt in step 3: shards that lose a part of the gradient, or of its norm."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, ZERO, UNIT = "step03_zero/train.py", "step03_zero/zero.py", "step03_zero/unit.py"
ONE = Launch("step01_single_gpu/train.py")
CLIPPED = Launch("step01_single_gpu/train.py", "--clip 0.5")

LAST_SHARD = Bug(
    edits=(
        Edit(
            UNIT,
            "self.reduced = summed.clone() if self.reduced is None else self.reduced.add_(summed)",
            "self.reduced = summed.clone()",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--zero 2", 2)),
    unseen=Launch(TRAIN, "--zero 3 --micro-batch 2", 3),
    why="Stages 2 and 3 reduce-scatter every micro-batch, and its shard must be added to those before it. Here the "
    "last one replaces them. Stage 1 reduces once per step, and is right: compare --zero 1.",
    source="in another place, but with the same symptom, NeMo Automodel "
    "(https://github.com/NVIDIA-NeMo/Automodel/pull/3530).",
)

COPIES_COUNTED = Bug(
    edits=(
        Edit(
            ZERO,
            "        for parameter in parameters:\n            parameter.spec.owner &= replica.rank == 0  "
            "# of the copies, the first one counts and saves it\n",
            "",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--zero 1 --zero-replicas 2", 4)),
    unseen=Launch(TRAIN, "--zero 3 --zero-replicas 2 --clip 0.5 --micro-batch 1", 4),
    why="With hybrid sharding several ranks hold the same shard. All of them count it in the gradient norm, which is "
    "so the square root of the number of copies too large. Nothing shows it until gradients are clipped: then every "
    "update is too small.",
    source="VeOmni, with FSDP2 and replicas (https://github.com/ByteDance-Seed/VeOmni/issues/184).",
)

LABS = [
    Hunt(
        id="hunt-03-a",
        title="A sum in pieces, and not the same",
        minutes=25,
        task=handout(
            "ZeRO divides what data parallelism keeps on every rank, and changes no number. Since the last commit it "
            "does.",
            before="lesson 3",
        ),
        hints=(
            "Do the losses of later steps differ as well, or the gradient norms alone? If the weights go the right "
            "way, the gradients are right.",
            "Change one thing at a time: --zero 1, 2 and 3, --micro-batch, --zero-replicas. With which is it right?",
            "A shard's sum has to hold every micro-batch, and its squares have to enter the norm exactly once.",
        ),
        bugs=(LAST_SHARD, COPIES_COUNTED),
    ),
]
