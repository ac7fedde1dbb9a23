"""Hunt in step 5: stages that lose what they share, or count it too often."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, STAGES = "step05_pipeline/train.py", "step05_pipeline/stages.py"
TIED = Launch("step01_single_gpu/train.py", "--tie-embeddings")

TIED_APART = Bug(
    edits=(Edit(STAGES, "extra_groups=(*spec.extra_groups, holders), owner=owner", "owner=owner"),),
    seen=(TIED, Launch(TRAIN, "--tie-embeddings --pp 2", 2)),
    unseen=Launch(TRAIN, "--tie-embeddings --pp 2 --schedule zb-h1 --micro-batch 2", 4),
    why="The matrix that is embedding and head is stored on the first and on the last rank. Each sees the gradient "
    "of its own use, and the sum of both is the gradient. Without it the copies are updated differently and drift "
    "apart. The first loss is right, and untied models have no such bug.",
    source="Piper, which copies the matrix without summing its gradients "
    "(https://github.com/uw-syfi/piper/issues/13). Megatron-LM summed what its distributed optimizer had already cut "
    "into unlike shards, with the same effect (https://github.com/NVIDIA/Megatron-LM/issues/844).",
)

SUMMED_MEANS = Bug(
    edits=(Edit(TRAIN, "return share * scaler.scale", "return share * scaler.scale * config.accumulation_steps"),),
    seen=(Launch("step01_single_gpu/train.py"), Launch(TRAIN, "--pp 2", 2)),
    unseen=Launch(TRAIN, "--layers 4 --pp 2 --schedule interleaved --micro-batch 2", 2),
    why="Every micro-batch's backward starts from the mean over its own tokens, although its gradients are added to "
    "those of the others: they come out as many times too large as there are micro-batches. The loss is reported "
    "right, Adam divides the factor away, and only the gradient norm shows it.",
    source="DeepSpeed's pipeline, as reported in https://github.com/deepspeedai/DeepSpeed/issues/7773 "
    "(open in 2026): with another micro-batch and the same global batch, the norm was four times as high.",
)
LABS = [
    Hunt(
        id="hunt-05-a",
        title="Two stages, one model?",
        minutes=25,
        task=handout(
            "A pipeline of two ranks should train what one process trains. Since the last commit it does not.",
            before="lesson 5",
        ),
        hints=(
            "Compare the gradient norms of step 0. Is their ratio a simple number? Does it follow --micro-batch?",
            "Is it right with --no-tie-embeddings, and with --tie-embeddings? If the two differ: what do the two ranks "
            "share in a tied model, and who sees which part of its gradient?",
            "Two things join the ranks' work: every micro-batch's loss is a share of the batch's mean, and what two "
            "stages hold is summed over both. Look where each of them is written down.",
        ),
        bugs=(TIED_APART, SUMMED_MEANS),
    ),
]
