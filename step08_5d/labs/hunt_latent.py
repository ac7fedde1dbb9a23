"""Hunt in step 8: latent attention over tensor ranks, and a sum that is missing."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, SUMS = "step08_5d/train.py", "step04_tensor_parallel/partial_sums.py"
ATTENTION = "common/latent_attention.py"
# Attention of so small a model hardly matters at first. With these steps it soon does
LATENT = "--latent 12,16,8,16,8 --kv-heads 4 --optimizer adamw --lr 0.2"
ONE = Launch("step01_single_gpu/train.py", LATENT)

WEIGHTS_APART = Bug(
    edits=(
        Edit(
            SUMS,
            "            if name in parameter.spec.extra_groups:\n",
            "            if name in parameter.spec.extra_groups and not parameter.spec.decay:\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, f"{LATENT} --tp 2", 2)),
    unseen=Launch(TRAIN, f"{LATENT} --tp 2 --pp 2", 4),
    ask="Which gradients does this function sum, and which others are partial sums? Print their names.",
    why="With sequence parallelism a rank makes the latents of its own tokens, so the gradients of both "
    "down-projections are partial sums over tp. Norms are summed over tp here, and linear layers that nobody has cut "
    "are not. The shape of each gradient is right, and so is the first loss. Each rank then updates a copy of its "
    "own, the copies drift apart, and after three steps the loss is off by 0.06 %.",
    source="PaddleFleet, whose authors found it when they compared a model with latent attention with another "
    "framework (https://github.com/PaddlePaddle/PaddleFleet/pull/2008).",
)

GAIN_OF_OWN_HEADS = Bug(
    edits=(
        Edit(
            ATTENTION,
            "latent, key = self.kv_a_proj(x).split([shape.kv_rank, shape.rope_dim], dim=-1)\n",
            "latent, key = self.whole(self.kv_a_proj(x)).split([shape.kv_rank, shape.rope_dim], dim=-1)\n",
        ),
        Edit(
            ATTENTION,
            "self.whole(torch.cat((self.kv_a_norm(latent), key), dim=-1)).unsqueeze(1)",
            "torch.cat((self.kv_a_norm(latent), key), dim=-1).unsqueeze(1)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, f"{LATENT} --tp 2 --no-sequence-parallel", 2)),
    unseen=Launch(TRAIN, f"{LATENT} --tp 2 --no-sequence-parallel --pp 2", 4),
    ask="Which tensors are whole on every rank here, and with which of them do the ranks do different things?",
    why="The operator that adds up the gradients of all heads stands before the norm of the latents, not behind it. "
    "The forward is the same. But in the backward the norm comes first, and on each rank it meets the gradient of the "
    "rank's own heads. That of its gain is a partial sum, and each rank updates its copy by its own part. With "
    "sequence parallelism nothing is wrong, because gains of norms are summed over tp there anyway.",
    source="we know of no public report of this order. In two of Megatron-LM's variants of latent attention it was "
    "the rotated key whose gradient was not added up (https://github.com/NVIDIA/Megatron-LM/issues/1699, /pull/6839).",
    anywhere=True,
)

LABS = [
    Hunt(
        id="hunt-08-b",
        title="The missing sum",
        minutes=30,
        task=handout(
            "Two ranks divide the heads of a model with latent attention (`--latent`, `--tp 2`), and should train what "
            "one process trains. In this folder a sum over the two is missing. The first loss is right, and the "
            "next ones nearly are.",
            before='lesson 8, and "Latent attention" in `step08_5d/deepseek.md`',
            note="The bug may be in a file of an earlier step. What is summed is not always the gradient of a weight.",
        ),
        hints=(
            "The loss of step 0 is right, so you look for a gradient. Which one is the first that is wrong? `python -m "
            "common.lockstep --reference COMMAND --candidate COMMAND` takes the same steps with both commands of "
            "run.sh and compares every tensor. Before that, `export PYTHONPATH=$PWD` in this folder.",
            "Write down what each rank has whole: latent, rotated key, the matrices that make them. For which tokens "
            "does it have them? For which heads does it use them? Where both answers together are less than "
            "everything, the gradient is a summand.",
            "There are three places where such a sum can be made. For a weight that is whole, its spec names tp among "
            "the groups, and somebody reads that. Without sequence parallelism, an operator sums in the backward: what "
            "comes before it has a whole gradient, and what comes behind it a summand. With it, the gather's backward "
            "does so. Check each of them for each of the tensors.",
        ),
        bugs=(WEIGHTS_APART, GAIN_OF_OWN_HEADS),
    ),
]
