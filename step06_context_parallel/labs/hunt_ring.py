"""Hunt in step 6: a ring that loses its keys, its positions or its weights."""

from common.labs.copies import Edit
from common.labs.hunt import NOBODY, Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, RING = "step06_context_parallel/train.py", "step06_context_parallel/ring_attention.py"
BLOCK, ROPE = "step06_context_parallel/attention_block.py", "common/rope.py"
ONE = Launch("step01_single_gpu/train.py")

STALE_KEYS = Bug(
    edits=(
        Edit(
            RING,
            "gradients.add(block, *held, *sums)",
            "gradients.add(block, k, v, *sums)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--cp 2", 2)),
    unseen=Launch(TRAIN, "--cp 3 --cp-split striped", 3),
    ask="Which keys does each hop of each direction compute with? Print their first number on both ranks.",
    why="In the backward, keys and values travel round the ring once more, but what arrives is only passed on: every "
    "hop computes with the rank's own keys again, and attributes the result to others. The forward is right, so the "
    "first loss is. No shape is wrong, nothing is NaN, and the model even learns.",
    source="diffusers, for every model trained with ring attention "
    "(https://github.com/huggingface/diffusers/issues/14265, repaired in /pull/14274).",
)

PART_POSITIONS = Bug(
    edits=(
        Edit(
            ROPE,
            "torch.outer(positions.to(frequency.dtype), frequency)",
            "torch.outer(positions[0] + torch.arange(len(positions)).to(frequency), frequency)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--cp 2", 2)),
    unseen=Launch(TRAIN, "--cp 3 --cp-split striped", 3),
    ask="Print the angle of each token, on one rank and on two: which tokens have another one?",
    why="Of the positions that it is given, the rotation uses the first one, and counts on from there. That is right "
    "for a part in one piece, but the zigzag gives every rank two, and the tokens of the second one are rotated by "
    "angles of other places. It is right with --cp-split contiguous.",
    source="we know of no public report of this very bug. NeMo Automodel's rotary embedding ignored "
    "the positions that it was given, in a similar way (https://github.com/NVIDIA-NeMo/Automodel/pull/2377).",
)

UNWEIGHTED = Bug(
    edits=(
        Edit(
            BLOCK,
            "        out_so_far.mul_((lse_so_far - total).exp().unsqueeze(-1)).add_("
            "out * (lse - total).exp().unsqueeze(-1))\n        lse_so_far.copy_(total)\n",
            "        lse_so_far.copy_(total)\n        out_so_far.mul_((lse_so_far - total).exp().unsqueeze(-1)).add_("
            "out * (lse - total).exp().unsqueeze(-1))\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--cp 2", 2)),
    unseen=Launch(TRAIN, "--cp 3 --cp-split contiguous", 3),
    ask="Merge two blocks by hand, as the example at the head of the file does: which number is another one?",
    why="Each block of keys has its own softmax. When a further block arrives, what was computed so far must shrink "
    "to its share of the larger sum. But the sum so far is replaced by the new one before its share is computed, so "
    "that share is always one. Only the new block is weighted, and attention's weights add up to more than one.",
    source=NOBODY,
)

LABS = [
    Hunt(
        id="hunt-06-a",
        title="A ring that trains another model",
        minutes=30,
        task=handout(
            "Two ranks that share every sequence (`--cp 2`) should train what one process trains. In this folder "
            "they do not.",
            before="lesson 6",
        ),
        hints=(
            "Compare the losses of step 0 digit by digit: run.sh prints them, from the runs' metrics.jsonl. If they "
            "agree to the last digits, the forward is right, and the backward is not. If they differ, even only in the "
            "eighth digit, look at the forward, and at what goes into it.",
            "Does it depend on --cp-split? On --cp-mode (ring, allgather, ulysses)? What do the right ones not share "
            "with the wrong one?",
            "Write down, for both ranks and each hop, whose keys are used, at which positions, and with which "
            "weight: once for the forward, once for the backward.",
        ),
        bugs=(STALE_KEYS, PART_POSITIONS, UNWEIGHTED),
    ),
]
