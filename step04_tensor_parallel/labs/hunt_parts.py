"""Hunt in step 4: a model cut over two ranks that is no longer the same model."""

from common.labs.copies import Edit
from common.labs.hunt import NOBODY, Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, SUMS = "step04_tensor_parallel/train.py", "step04_tensor_parallel/partial_sums.py"
OPERATORS, VOCAB = "step04_tensor_parallel/operators.py", "step04_tensor_parallel/vocab_parallel.py"
ONE = Launch("step01_single_gpu/train.py")

NORMS_APART = Bug(
    edits=(
        Edit(
            SUMS,
            "pairs = [(copy, part.view_as(copy)) for part,",
            "pairs = [(part.view_as(copy), copy) for part,",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--tp 2", 2)),
    unseen=Launch(TRAIN, "--tp 2 --zero 1 --micro-batch 2", 4),
    ask="Print one gradient on both ranks before this function and after it. What should have become of it?",
    why="With sequence parallelism a rank's norms see its part of the sequence, so the gradients of their gains are "
    "partial sums, which must be added up over the group. They are, but in the end the gradients are copied "
    "over the sums, not the sums over the gradients. So each rank updates its own copy by its own part: copies drift "
    "apart, and the first loss is right. Without sequence parallelism nothing is wrong.",
    source="gpt-neox, where the hooks that should sum them never fired, and the loss flattened out "
    "(https://github.com/EleutherAI/gpt-neox/pull/1257, repaired in /1259); PaddleNLP, with a pipeline "
    "(https://github.com/PaddlePaddle/PaddleNLP/pull/7610).",
)

MIXED = Bug(
    edits=(
        Edit(
            OPERATORS,
            "return parts.transpose(0, 1).flatten(1, 2)",
            "return parts.reshape(parts.shape[1], -1, *parts.shape[3:])",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--tp 2", 2)),
    unseen=Launch(TRAIN, "--tp 2 --micro-batch 2 --tp-mode plain", 4),
    ask="What is the order of the tokens in memory before this, and after it? Try two sequences of four tokens.",
    why="An all-gather puts the ranks' parts one behind the other, in front of the batch. A reshape has the right "
    "shape, but reads them in that order: tokens of different sequences end up in one. With one sequence per "
    "micro-batch it is right, which is how such a test passes.",
    source=NOBODY,
)

LAST_ROW = Bug(
    edits=(Edit(VOCAB, "(local >= self.num_embeddings)", "(local >= self.num_embeddings - 1)"),),
    seen=(ONE, Launch(TRAIN, "--tp 2", 2)),
    unseen=Launch(TRAIN, "--tp 2 --no-sequence-parallel --vocab 320", 4),
    ask="For which token ids is the output not that of one process? Try all of them.",
    why="A rank holds the rows [first, first + n) of the embedding, and the mask of what is elsewhere is off by one: "
    "the token of the last row is a zero vector on every rank. Only texts that have such a token show it.",
    source=NOBODY,
)

LABS = [
    Hunt(
        id="hunt-04-a",
        title="Cut in two, and not put together",
        minutes=25,
        task=handout(
            "Two ranks that share every layer (`--tp 2`) should train what one process trains. In this folder they do "
            "not.",
            before="lesson 4",
        ),
        hints=(
            "Is the loss of step 0 right? Then the forward is, and you look for a gradient.",
            "Is it right with --no-sequence-parallel? With --micro-batch 1? With --tp 1 on one rank?",
            "Go through lesson 4's table of operators: what does each rank hold whole, what does it hold a part of, "
            "and who sums or joins the parts, along which axis?",
        ),
        bugs=(NORMS_APART, MIXED, LAST_ROW),
    ),
]
