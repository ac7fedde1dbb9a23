"""Hunt in step 6: a ring that loses its keys, its positions or its weights."""

from common.labs.copies import Edit
from common.labs.hunt import NOBODY, Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, RING = "step06_context_parallel/train.py", "step06_context_parallel/ring_attention.py"
BLOCK = "step06_context_parallel/attention_block.py"
ONE = Launch("step01_single_gpu/train.py")

STALE_KEYS = Bug(
    edits=(
        Edit(
            RING,
            "            kv_work.wait()\n            kv = kv_arriving\n        sums_work.wait()",
            "            kv_work.wait()\n        sums_work.wait()",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--cp 2", 2)),
    unseen=Launch(TRAIN, "--cp 3 --cp-split striped", 3),
    why="In the backward, keys and values travel round the ring once more, but what arrives is never used: every hop "
    "computes with the rank's own keys again, and attributes the result to others. The forward is right, so the "
    "first loss is. No shape is wrong, nothing is NaN, and the model even learns.",
    source="diffusers, for every model trained with ring attention "
    "(https://github.com/huggingface/diffusers/issues/14265, repaired in /pull/14274).",
)

PART_POSITIONS = Bug(
    edits=(
        Edit(
            TRAIN,
            "positions_of(config, mesh)\n",
            "torch.arange(config.rank_seq_len, device=mesh.device) + mesh.cp.rank * config.rank_seq_len\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--cp 2", 2)),
    unseen=Launch(TRAIN, "--cp 3 --cp-split striped", 3),
    why="Rotary embeddings get the positions that a contiguous part would have, while the zigzag gives every rank "
    "two chunks. Tokens are rotated by angles of other places. It is right with --cp-split contiguous.",
    source="we know of no public report of this very bug. NeMo Automodel's rotary embedding ignored "
    "the positions that it was given, in the same way (https://github.com/NVIDIA-NeMo/Automodel/pull/2377).",
)

UNWEIGHTED = Bug(
    edits=(
        Edit(
            BLOCK,
            "out_so_far.mul_((lse_so_far - total).exp().unsqueeze(-1)).add_(",
            "out_so_far.add_(",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--cp 2", 2)),
    unseen=Launch(TRAIN, "--cp 3 --cp-split contiguous", 3),
    why="Each block of keys has its own softmax. When a further block arrives, what was computed so far must shrink "
    "to its share of the larger sum. Here only the new block is weighted, and attention's weights add up to more "
    "than one.",
    source=NOBODY,
)

LABS = [
    Hunt(
        id="hunt-06-a",
        title="A ring that trains another model",
        minutes=30,
        task=handout(
            "Two ranks that share every sequence (`--cp 2`) should train what one process trains. Since the last "
            "commit they do not.",
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
