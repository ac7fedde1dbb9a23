"""Hunt in step 8: what is right in every dimension alone, and wrong together."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, STAGES, ZERO = "step08_5d/train.py", "step05_pipeline/stages.py", "step03_zero/zero.py"
ONE = Launch("step01_single_gpu/train.py")

COPIES_OF_TP = Bug(
    edits=(Edit(ZERO, "parameter.spec.owner &= replica.rank == 0", "parameter.spec.owner = replica.rank == 0"),),
    seen=(ONE, Launch(TRAIN, "--tp 2 --pp 2", 4)),
    unseen=Launch(TRAIN, "--tp 2 --cp 2 --clip 0.5", 4),
    ask="Who counts a parameter that several ranks hold? Print what each rank's specs say, before this and after it.",
    why="The gains of norms are whole on every rank of a tensor-parallel group, and tensor parallelism has said that "
    "one of them counts them. ZeRO is to add that of several copies of the model the first one counts, and says only "
    "this. So all ranks of a group count them, and their squares enter the gradient norm tp times. The weights are "
    "right until gradients are clipped; then every update is too small, the more so the larger tp is.",
    source="NeMo RL, for whatever its plan for tensor parallelism left whole "
    "(https://github.com/NVIDIA-NeMo/RL/pull/3788); Transformer Engine on ROCm, where the norm came out 1.5 times "
    "too large (https://github.com/ROCm/TransformerEngine/pull/715).",
)

LOST_IN_COPIES = Bug(
    edits=(Edit(STAGES, "extra_groups=(*spec.extra_groups, holders)", "extra_groups=(holders,)"),),
    seen=(ONE, Launch(TRAIN, "--tp 2 --pp 2 --schedule dualpipe", 4)),
    unseen=Launch(TRAIN, "--tp 2 --pp 2 --schedule dualpipe --micro-batch 2 --clip 0.5", 4),
    ask="What do the specs say before this function and after it, for each flag alone and for both?",
    why="A schedule with two copies of the model sums every gradient over the holders of the same stage, and says so "
    "in its spec. Here it forgets what tensor parallelism has said before: that the gradients of norms are partial "
    "sums over tp as well. Each rank of a pair updates its norms by its own part of the sequence. With either flag "
    "alone there is only one thing to say, and the first loss is right.",
    source="in another way, with the same flags together, PaddleNLP "
    "(https://github.com/PaddlePaddle/PaddleNLP/pull/7610).",
)

LABS = [
    Hunt(
        id="hunt-08-a",
        title="Four ranks, two dimensions",
        minutes=30,
        task=handout(
            "Four ranks train with two dimensions at once, and should train what one process trains. In this folder "
            "they do not.",
            before="lesson 8",
            note="The bug may be in a file of an earlier step. Try each flag alone, too.",
        ),
        hints=(
            "Take one flag away after the other, also on fewer ranks. Which one brings the bug, or does it take two?",
            "Does it reach the losses of later steps, or the gradient norm alone? The one means a wrong gradient, the "
            "other one a norm that counts something too often or not at all.",
            "Lesson 8's table says for every weight who holds it and over whom its gradient is summed. Go through "
            "what is whole on several ranks, and compare what their specs say with the table.",
        ),
        bugs=(COPIES_OF_TP, LOST_IN_COPIES),
    ),
]
