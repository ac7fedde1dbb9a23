"""Hunt in step 1: micro-batches that do not add up to the batch."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, RAGGED = "step01_single_gpu/train.py", "step01_single_gpu/labs/ragged.py"
SUMS = "step01_single_gpu/mixed_precision.py"

MEAN_OF_MEANS = Bug(
    edits=(
        Edit(
            RAGGED,
            "sum(map(self.length, range(self.global_batch)))",
            "round(self.lengths.double().mean().item() * self.global_batch)",
        ),
        Edit(RAGGED, "        lengths = torch.tensor(", "        self.lengths = torch.tensor("),
        Edit(RAGGED, ">= lengths.unsqueeze(1)", ">= self.lengths.unsqueeze(1)"),
    ),
    beside=(
        Edit(
            RAGGED,
            "    corpus = load_batches(config, mesh).corpus\n    batches = Answers(corpus, config.seq_len, ",
            "    batches = Answers(load_batches(config, mesh).corpus, config.seq_len, ",
        ),
        Edit(
            RAGGED,
            "config.global_batch, config.seed)\n",
            "config.global_batch, config.seed)\n"
            "    batches.lengths = torch.tensor([batches.length(row) for row in range(config.global_batch)])\n",
        ),
    ),
    seen=(Launch(RAGGED, "--micro-batch 12"), Launch(RAGGED, "--micro-batch 3")),
    unseen=Launch(RAGGED, "--micro-batch 2 --seq-len 32"),
    ask="How many targets does a batch have, and does this file say the same number in every micro-batch?",
    why="The batch has as many targets as rows times their mean length, but each micro-batch replaces the lengths of "
    "the batch by its own, as if all others were like it. So the loss of every micro-batch is the mean over its own "
    "targets, and these means are averaged. That is the mean over the batch only if all micro-batches have equally "
    "many targets. Where answers differ in length, a token of a micro-batch of short answers weighs more than others, "
    "and the same data give other gradients with other micro-batches. Divide sums by the number of targets of the "
    "whole batch.",
    source="Hugging Face's Trainer, until it was told the number of targets of the whole batch in "
    "October 2024 (https://github.com/huggingface/transformers/pull/34191; "
    "https://github.com/huggingface/blog/pull/2414 tells the story).",
)

OVERWRITTEN = Bug(
    edits=(
        Edit(
            SUMS,
            "self.sums[parameter].add_(gradient)",
            "self.sums[parameter].add(gradient)",
        ),
    ),
    seen=(Launch(RAGGED, "--micro-batch 12"), Launch(RAGGED, "--micro-batch 3")),
    unseen=Launch(TRAIN, "--micro-batch 2 --recompute full"),
    ask="Print the sum of one weight's gradients after each micro-batch: which of these calls changes it?",
    why="`add` returns the sum, and nobody takes it; `add_` would have changed what is stored. So only the first "
    "micro-batch of a step trains the model. The loss is added up elsewhere and looks right in step 0; the gradient "
    "norm is wrong at once.",
    source="with the same symptom, NeMo Automodel, where a stage of a pipeline was initialised again between "
    "micro-batches, which threw away what had been added up; only the gradient norm gave it away "
    "(https://github.com/NVIDIA-NeMo/Automodel/pull/3530).",
)

LABS = [
    Hunt(
        id="hunt-01-a",
        title="The same batch in smaller pieces",
        minutes=20,
        task=handout(
            "Your colleagues train on answers of different lengths (`step01_single_gpu/labs/ragged.py`: padding is no "
            "target). In this folder, a batch of 12 sequences in one piece and the same batch in pieces of 3 "
            "do not train the same model.",
            before='lesson 1, "The idea" and "What goes wrong"',
        ),
        hints=(
            "Look at step 0, before any update: is the loss right? Is the gradient norm?",
            "Follow one micro-batch through `train_step`: by what is its sum of losses divided, and who adds its "
            "gradients to those of the others? Print both after each micro-batch.",
            "A mean over the batch is a sum over all its targets, divided by their number, which is one and the same "
            "for all micro-batches. Which line gives another number, or does not add?",
        ),
        bugs=(MEAN_OF_MEANS, OVERWRITTEN),
        extra=(RAGGED, "step01_single_gpu/labs/__init__.py"),
    ),
]
