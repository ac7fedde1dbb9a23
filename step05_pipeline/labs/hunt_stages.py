"""Hunt in step 5: stages that lose what they share, or measure only themselves."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, APPLY = "step05_pipeline/train.py", "step05_pipeline/apply_pipeline.py"
CLIPPING = "step01_single_gpu/clipping.py"
TIED = Launch("step01_single_gpu/train.py", "--tie-embeddings")

TIED_APART = Bug(
    edits=(Edit(APPLY, 'return ("embedding.weight",) if shape.tie', 'return ("head.weight",) if shape.tie'),),
    seen=(TIED, Launch(TRAIN, "--tie-embeddings --pp 2", 2)),
    unseen=Launch(TRAIN, "--tie-embeddings --pp 2 --schedule zb-h1 --micro-batch 2", 4),
    ask="Print the specs of both ranks' parameters: what is the matrix called that both of them hold?",
    why="The matrix that is embedding and head is stored on the first and on the last rank. Each sees the gradient "
    "of its own use, and the sum of both is the gradient. It is looked for by its name, which in a tied model is that "
    "of the embedding on both ranks, so it is not found, and nothing is summed. The copies are updated differently "
    "and drift apart. The first loss is right, and untied models have no such bug.",
    source="Piper, which copies the matrix without summing its gradients "
    "(https://github.com/uw-syfi/piper/issues/13). Megatron-LM summed what its distributed optimizer had already cut "
    "into unlike shards, with the same effect (https://github.com/NVIDIA/Megatron-LM/issues/844).",
)

STAGE_NORM = Bug(
    edits=(Edit(CLIPPING, "all_reduce(total, mesh.world)", "all_reduce(total, mesh.dp_cp)"),),
    beside=(
        Edit(CLIPPING, "one all-reduce adds them up.", "an all-reduce adds them up."),
        Edit(CLIPPING, "mesh: of it, `world`, all ranks, and `device`.", "mesh: its groups of ranks, and its device."),
    ),
    seen=(Launch("step01_single_gpu/train.py", "--clip 0.5"), Launch(TRAIN, "--pp 2 --clip 0.5", 2)),
    unseen=Launch(TRAIN, "--layers 4 --pp 2 --schedule interleaved --clip 0.5", 4),
    ask="Let every rank print what it has before the sum, and after it. Whose squares does the sum hold?",
    why="Each rank adds up the squares of its own layers, and the sum is taken over ranks that see other tokens, not "
    "over those that hold other layers. So every stage has a norm of its own, which is too small, and clips its "
    "weights by another factor than the others. Until gradients are clipped, the weights are right. Data parallelism "
    "alone shows nothing, as there all ranks hold all layers.",
    source="torchtitan (https://github.com/pytorch/torchtitan/issues/596, repaired in /pull/649); Modalities "
    "(https://github.com/Modalities/modalities/issues/313).",
)

LABS = [
    Hunt(
        id="hunt-05-a",
        title="Two stages, one model?",
        minutes=25,
        task=handout(
            "A pipeline of two ranks should train what one process trains. In this folder it does not.",
            before="lesson 5",
        ),
        hints=(
            "Which differs first, and in which step: the loss or the gradient norm? Is it right on two ranks without "
            "--pp, and what of the layers does each rank hold then?",
            "Is it right with --no-tie-embeddings, and with --tie-embeddings? With --clip 0? If two of them differ: "
            "what does the wrong one need from the other rank that the right one does not need?",
            "Two things join the ranks' work at the end of a step: what two stages hold is summed over both, and the "
            "norm is that of all stages. Look where each of them is written down, and print it on both ranks.",
        ),
        bugs=(TIED_APART, STAGE_NORM),
    ),
]
