"""Hunt in step 8: latent attention over tensor ranks, and a sum that is missing."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, TENSOR = "step08_5d/train.py", "step04_tensor_parallel/train.py"
LAYERS, OPERATORS = "step04_tensor_parallel/tensor_parallel.py", "step04_tensor_parallel/operators.py"
ATTENTION = "common/latent_attention.py"
# Attention of so small a model hardly matters at first. With these steps it soon does
LATENT = "--latent 12,16,8,16,8 --kv-heads 4 --optimizer adamw --lr 0.2"
ONE = Launch("step01_single_gpu/train.py", LATENT)

WEIGHTS_APART = Bug(
    edits=(
        Edit(
            LAYERS,
            "            if split.sequence_parallel:\n"
            "                parameter.spec.extra_groups = (split.group.name,)\n",
            "            if split.sequence_parallel and not isinstance(module, nn.Linear):\n"
            "                parameter.spec.extra_groups = (split.group.name,)\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, f"{LATENT} --tp 2", 2)),
    unseen=Launch(TRAIN, f"{LATENT} --tp 2 --pp 2", 4),
    why="With sequence parallelism a rank makes the latents of its own tokens, so the gradients of both "
    "down-projections are partial sums over tp. Norms are summed over tp here, and linear layers that nobody has cut "
    "are not. The shape of each gradient is right, and so is the first loss. Each rank then updates a copy of its "
    "own, the copies drift apart, and after three steps the loss is off by 0.06 %.",
    source="PaddleFleet, whose authors found it when they compared a model with latent attention with another "
    "framework (https://github.com/PaddlePaddle/PaddleFleet/pull/2008).",
)

KEY_OF_OWN_HEADS = Bug(
    edits=(
        Edit(
            ATTENTION,
            "self.whole(torch.cat((self.kv_a_norm(latent), key), dim=-1)).unsqueeze(1)",
            "torch.cat((self.whole(self.kv_a_norm(latent)), key), dim=-1).unsqueeze(1)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, f"{LATENT} --tp 2 --no-sequence-parallel", 2)),
    unseen=Launch(TRAIN, f"{LATENT} --tp 2 --no-sequence-parallel --pp 2", 4),
    why="Without sequence parallelism every rank has the whole latent and the whole rotated key, but each uses them "
    "for its own heads. So both gradients are partial sums over tp. The operator that adds them up stands around the "
    "latent alone, so the rows of the down-projection that make the rotated key learn from one rank's heads. The "
    "first loss is right, and the first gradient norm agrees to nine digits.",
    source="Megatron-LM, in two of its variants of latent attention "
    "(https://github.com/NVIDIA/Megatron-LM/issues/1699, /pull/6839).",
)

OWN_SLICE = Bug(
    edits=(
        Edit(
            OPERATORS,
            'gather_sequence = make_operator("GatherSequence", _all_gather, _reduce_scatter)',
            "def _own_part(x, group):\n"
            "    return x.unflatten(1, (group.size, -1))[:, group.rank]\n\n\n"
            'gather_sequence = make_operator("GatherSequence", _all_gather, _own_part)',
        ),
    ),
    seen=(ONE, Launch(TENSOR, f"{LATENT} --tp 2", 2)),
    unseen=Launch(TENSOR, f"{LATENT} --tp 2 --tp-mode chunked --zero 1 --micro-batch 2", 4),
    why="The forward gathers the sequence, and the backward takes the rank's own tokens out of the gradient. But "
    "what was gathered is used for the rank's own heads, so each rank has a summand of this gradient for all tokens, "
    "and those of the other ranks are dropped. It takes a reduce-scatter. Layers whose product overlaps with their "
    "messages have a backward of their own, which is right; so a model without latents shows nothing, until somebody "
    "asks for --tp-mode plain.",
    source="VeOmni, whose gather of a sequence did not add up the gradients of other ranks "
    "(https://github.com/ByteDance-Seed/VeOmni/pull/681).",
)

LABS = [
    Hunt(
        id="hunt-08-b",
        title="The missing sum",
        minutes=30,
        task=handout(
            "Two ranks divide the heads of a model with latent attention (`--latent`, `--tp 2`), and should train what "
            "one process trains. Since the last commit a sum over the two is missing. The first loss is right, and the "
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
            "the groups. Without sequence parallelism, an operator around latent and rotated key sums in the backward. "
            "With it, the gather has a backward that does. Check each of them for each of the tensors.",
        ),
        bugs=(WEIGHTS_APART, KEY_OF_OWN_HEADS, OWN_SLICE),
    ),
]
