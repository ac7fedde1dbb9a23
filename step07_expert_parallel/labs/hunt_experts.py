"""Hunt in step 7: experts whose gradients are too small, and tokens that come home to others."""

from common.labs.copies import Edit
from common.labs.hunt import NOBODY, Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, APPLY = "step07_expert_parallel/train.py", "step07_expert_parallel/apply_experts.py"
DISPATCHER = "step07_expert_parallel/expert_parallel.py"
ONE = Launch(TRAIN, "--experts 4")

AVERAGED = Bug(
    edits=(
        Edit(
            TRAIN,
            "        gradients = pipeline.finish()\n",
            "        gradients = pipeline.finish()\n"
            "        for parameter, gradient in zip(optimizer.parameters, gradients):\n"
            "            if parameter.spec.shard_groups[0] == 'expert_shard':\n"
            "                gradient.div_(mesh.ep.size)\n",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--experts 4 --ep 2", 2)),
    unseen=Launch(TRAIN, "--experts 4 --ep 2 --micro-batch 1 --zero 1", 4),
    why="An expert has seen the tokens of all ranks that sent it some, so its gradient is complete: it is a sum of "
    "shares of the mean like every other one. Dividing it by the number of ranks makes it too small by that factor. "
    "Adam divides the factor away again.",
    source="factors of this kind have been wrong in both directions. DeepSpeed divided experts' "
    "gradients by another number of ranks than all others' (https://github.com/deepspeedai/DeepSpeed/pull/6546, "
    "/pull/5259); in Megatron-FSDP they came out ep times too large "
    "(https://github.com/NVIDIA/Megatron-LM/pull/5956).",
)

ROUTER_APART = Bug(
    edits=(
        Edit(
            APPLY,
            'spec = replace(spec, extra_groups=("tp",), owner=tp.rank == 0)',
            "spec = replace(spec, owner=tp.rank == 0)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--experts 4 --tp 2", 2)),
    unseen=Launch(TRAIN, "--experts 4 --tp 2 --ep 2 --micro-batch 2", 4),
    why="Under sequence parallelism a rank's router sees a part of the tokens, so its gradient is a partial sum. "
    "Without the sum over tp every rank updates its copy by its own part: routers drift apart. The forward of step 0 "
    "is right.",
    source="torchtitan, in several ways. Without expert parallelism, the gradients below the experts "
    "lost their reduction over tp, the router's above all (https://github.com/pytorch/torchtitan/pull/4054); an "
    "earlier report of routers that drift apart is https://github.com/pytorch/torchtitan/pull/2388.",
)

WRONG_WAY_HOME = Bug(
    edits=(
        Edit(
            DISPATCHER,
            "self.home.finish(self.home.start(_Permute.apply(rows, inverse(self.order))))",
            "self.home.finish(self.home.start(_Permute.apply(rows, self.order)))",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--experts 4 --ep 2", 2)),
    unseen=Launch(TRAIN, "--experts 8 --ep 2 --micro-batch 1", 4),
    why="Rows that arrive are sorted by expert, and must be put back into the order of their arrival before they are "
    "sent home. The order is a permutation; its inverse leads back. Applied twice instead, it leads elsewhere, "
    "except where it is its own inverse: tokens get the outputs of others.",
    source=NOBODY,
)

LABS = [
    Hunt(
        id="hunt-07-a",
        title="Experts abroad",
        minutes=30,
        task=handout(
            "A model with four experts per layer should train alike on one rank and on two. Since the last commit it "
            "does not.",
            before="lesson 7",
        ),
        hints=(
            "Is the loss of step 0 right? Then tokens find their experts and the way back.",
            "Who sees which tokens: the router of a rank, an expert of a rank, everything else? Whose gradient is a "
            "part of a sum, and whose is complete?",
            "Print, on one rank and on two, the norm of each parameter's gradient in step 0, and see whose differs, "
            "and by which factor.",
        ),
        bugs=(AVERAGED, ROUTER_APART, WRONG_WAY_HOME),
    ),
]
