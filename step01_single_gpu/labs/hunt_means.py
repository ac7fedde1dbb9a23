"""Hunt in step 1: micro-batches that do not add up to the batch."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, RAGGED = "step01_single_gpu/train.py", "step01_single_gpu/labs/ragged.py"
SUMS = "step01_single_gpu/mixed_precision.py"

MEAN_OF_MEANS = Bug(
    edits=(Edit(TRAIN, "/ batches.target_tokens", "/ (targets >= 0).sum() / config.accumulation_steps"),),
    seen=(Launch(RAGGED, "--micro-batch 12"), Launch(RAGGED, "--micro-batch 3")),
    unseen=Launch(RAGGED, "--micro-batch 2 --seq-len 32"),
    why="The loss of every micro-batch is the mean over its own targets, and these means are averaged. That is the "
    "mean over the batch only if all micro-batches have equally many targets. Where answers differ in length, a "
    "token of a micro-batch of short answers weighs more than others, and the same data give other gradients with "
    "other micro-batches. Divide sums by the number of targets of the whole batch.",
    source="Hugging Face's Trainer, until it was told the number of targets of the whole batch in "
    "October 2024 (https://github.com/huggingface/transformers/pull/34191; "
    "https://github.com/huggingface/blog/pull/2414 tells the story).",
)

OVERWRITTEN = Bug(
    edits=(
        Edit(
            SUMS,
            "self.sums[parameter].add_(gradient)",
            "self.sums[parameter].copy_(gradient)",
        ),
    ),
    seen=(Launch(RAGGED, "--micro-batch 12"), Launch(RAGGED, "--micro-batch 3")),
    unseen=Launch(TRAIN, "--micro-batch 2 --recompute full"),
    why="The gradient of a micro-batch replaces the sum of those before it, so only the last one trains the model. The "
    "loss is added up elsewhere and looks right in step 0; the gradient norm is too small at once.",
    source="NeMo Automodel, where a stage of a pipeline was initialised again between micro-batches, "
    "which threw away what had been added up; only the gradient norm gave it away "
    "(https://github.com/NVIDIA-NeMo/Automodel/pull/3530).",
)

LABS = [
    Hunt(
        id="hunt-01-a",
        title="The same batch in smaller pieces",
        minutes=20,
        task=handout(
            "Your colleagues train on answers of different lengths (`step01_single_gpu/labs/ragged.py`: padding is no "
            "target). Since the last commit, a batch of 12 sequences in one piece and the same batch in pieces of 3 "
            "no longer train the same model.",
            before='lesson 1, "The idea" and "What goes wrong"',
        ),
        hints=(
            "Look at step 0, before any update: is the loss right? Is the gradient norm?",
            "Follow one micro-batch through `train_step`: by what is its sum of losses divided, and who adds its "
            "gradients to those of the others?",
            "A mean over the batch is a sum over all its targets, divided once by their number. Which line divides by "
            "another number, or does not add?",
        ),
        bugs=(MEAN_OF_MEANS, OVERWRITTEN),
        extra=(RAGGED, "step01_single_gpu/labs/__init__.py"),
    ),
]
