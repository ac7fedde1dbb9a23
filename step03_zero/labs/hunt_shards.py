"""Hunt in step 3: shards that lose a part of the gradient, or of its norm."""

from common.labs.copies import Edit
from common.labs.hunt import Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, ZERO, UNIT = "step03_zero/train.py", "step03_zero/zero.py", "step03_zero/unit.py"
ONE = Launch("step01_single_gpu/train.py")
CLIPPED = Launch("step01_single_gpu/train.py", "--clip 0.5")

LAST_SHARD = Bug(
    edits=(
        Edit(
            UNIT,
            "self.reduced = summed.clone() if self.reduced is None else self.reduced.add_(summed)",
            "self.reduced = summed.clone() if self.scattering is None else self.reduced.add_(summed)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--zero 2", 2)),
    unseen=Launch(TRAIN, "--zero 3 --micro-batch 2", 3),
    ask="Print the shard of a sum after each micro-batch: when is it the first one, and how does the code know?",
    why="Stages 2 and 3 reduce-scatter every micro-batch, and its shard must be added to those before it. Whether "
    "there are any is asked of what is in flight, which nothing is any more, so each one replaces those before it. "
    "Stage 1 reduces once per step, and is right: compare --zero 1.",
    source="in another place, but with the same symptom, NeMo Automodel "
    "(https://github.com/NVIDIA-NeMo/Automodel/pull/3530).",
)

COPIES_COUNTED = Bug(
    edits=(
        Edit(
            ZERO,
            "        shard, replica = (getattr(mesh, name) for name in parameters[0].spec.shard_groups)\n"
            "        for parameter in parameters:\n            parameter.spec.owner &= replica.rank == 0  "
            "# of the copies, the first one counts and saves it\n"
            "        return Unit(parameters, self.stage, shard, replica)\n",
            "        unit = Unit(parameters, self.stage, "
            "*(getattr(mesh, name) for name in parameters[0].spec.shard_groups))\n"
            "        for parameter in parameters:\n            parameter.spec.owner &= unit.replicas.rank == 0  "
            "# of the copies, the first one counts and saves it\n"
            "        return unit\n",
        ),
    ),
    anywhere=True,
    seen=(ONE, Launch(TRAIN, "--zero 1 --zero-replicas 2", 4)),
    unseen=Launch(TRAIN, "--zero 3 --zero-replicas 2 --clip 0.5 --micro-batch 1", 4),
    ask="The norm counts pieces of parameters. Who tells them which rank counts them, and when?",
    why="With hybrid sharding several ranks hold the same shard, and one of them is to count it. But a unit copies the "
    "specs of its parameters for its pieces when it is made, and here they say so only after that. So all ranks count "
    "their copies, and the gradient norm is too large by the square root of the number of copies. Nothing shows it "
    "until gradients are clipped: then every update is too small.",
    source="VeOmni, with FSDP2 and replicas (https://github.com/ByteDance-Seed/VeOmni/issues/184).",
)

LABS = [
    Hunt(
        id="hunt-03-a",
        title="A sum in pieces, and not the same",
        minutes=25,
        task=handout(
            "ZeRO divides what data parallelism keeps on every rank, and changes no number. In this folder it does.",
            before="lesson 3",
        ),
        hints=(
            "Do the losses of later steps differ as well, or the gradient norms alone? If the weights go the right "
            "way, the gradients are right.",
            "Change one thing at a time: --zero 1, 2 and 3, --micro-batch, --zero-replicas. With which is it right?",
            "A shard's sum has to hold every micro-batch, and its squares have to enter the norm exactly once.",
        ),
        bugs=(LAST_SHARD, COPIES_COUNTED),
    ),
]
