"""Hunt in step 8: what is right in every dimension alone, and wrong together."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, FUSED, LAYERS = "step08_5d/train.py", "step08_5d/fused.py", "step04_tensor_parallel/tensor_parallel.py"
ONE = Launch("step01_single_gpu/train.py")
CLIPPED = Launch("step01_single_gpu/train.py", "--clip 0.5")

COPIES_OF_TP = Bug(
    edits=(Edit(LAYERS, "            parameter.spec.owner = split.group.rank == 0\n", ""),),
    seen=(ONE, Launch(TRAIN, "--tp 2 --pp 2", 4)),
    unseen=Launch(TRAIN, "--tp 2 --cp 2 --clip 0.5", 4),
    why="The gains of norms are whole on every rank of a tensor-parallel group, and every rank counts them in the "
    "gradient norm, so their squares enter it tp times. The weights are right until gradients are clipped; then "
    "every update is too small, the more so the larger tp is.",
    source="NeMo RL, for whatever its plan for tensor parallelism left whole "
    "(https://github.com/NVIDIA-NeMo/RL/pull/3788); Transformer Engine on ROCm, where the norm came out 1.5 times "
    "too large (https://github.com/ROCm/TransformerEngine/pull/715).",
)

HEAD_WITHOUT_SPLIT = Bug(
    edits=(Edit(FUSED, "        if self.split:\n            x = self.split.begin_sublayer(x)\n", ""),),
    seen=(ONE, Launch(TRAIN, "--tp 2 --no-sequence-parallel --pp 2", 4)),
    unseen=Launch(TRAIN, "--tp 2 --cp 2", 4),
    why="The head with the loss in it takes the place of step 4's column-parallel layer, and must begin as that "
    "does: every rank has some columns, so the gradient of its input is a part of a sum over the group. Without the "
    "operator all layers below learn from one rank's columns. The loss is right.",
    source="the same happened in SkyRL with a fused head (a gradient that was summed, but into another "
    "tensor): https://github.com/NovaSky-AI/SkyRL/pull/1886.",
)

LABS = [
    Hunt(
        id="hunt-08-a",
        title="Four ranks, two dimensions",
        minutes=30,
        task=handout(
            "Four ranks train with two dimensions at once, and should train what one process trains. Since the last "
            "commit they do not.",
            before="lesson 8",
            note="The bug may be in a file of an earlier step. Try each flag alone, too.",
        ),
        hints=(
            "Take one dimension away after the other, also on fewer ranks. Which one brings the bug?",
            "Does it reach the losses of later steps, or the gradient norm alone?",
            "Lesson 8's table says for every weight who holds it and over whom its gradient is summed. Go through "
            "what is whole on several ranks, and through what step 8 puts in the place of earlier layers.",
        ),
        bugs=(COPIES_OF_TP, HEAD_WITHOUT_SPLIT),
    ),
]
