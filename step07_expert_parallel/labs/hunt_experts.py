"""Hunt in step 7: experts that are too much alike, routers that are not, and gradients that go to others."""

from common.labs.copies import Edit
from common.labs.hunt import NOBODY, Bug, Hunt, handout
from common.labs.training import Launch

TRAIN, APPLY = "step07_expert_parallel/train.py", "step07_expert_parallel/apply_experts.py"
DISPATCHER = "step07_expert_parallel/expert_parallel.py"
ONE = Launch(TRAIN, "--experts 4")

ALIKE = Bug(
    edits=(
        Edit(
            APPLY,
            "mine = count * ep.rank, count * (ep.rank + 1)",
            "mine = count * mesh.expert_shard.rank, count * (mesh.expert_shard.rank + 1)",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--experts 4 --ep 2", 2)),
    unseen=Launch(TRAIN, "--experts 4 --ep 2 --micro-batch 1 --zero 1", 4),
    ask="Print what an expert multiplies by, before the first step: which of the model's experts is it?",
    why="Which experts a rank has follows from its place in `ep`. `expert_shard` joins ranks that have the same ones, "
    "and share them for ZeRO; its rank is 0 on both. So both ranks make the weights of experts 0 and 1, and the model "
    "has two different experts instead of four. Every shape is right, tokens find their way, and it learns.",
    source="FastMoE, where all workers had the same seed, and so the same experts "
    "(https://github.com/laekov/fastmoe/pull/4). In DeepSpeed both ranks loaded the first half of the experts "
    "(https://github.com/deepspeedai/DeepSpeed/issues/6589).",
)

ROUTER_APART = Bug(
    edits=(
        Edit(
            APPLY,
            'spec = replace(spec, extra_groups=("tp",), owner=tp.rank == 0)',
            "spec = replace(spec, owner=tp.rank == 0)",
        ),
    ),
    beside=(Edit(APPLY, "as in the norms, so that those gradients are summed over `tp`.", "as in the norms."),),
    seen=(ONE, Launch(TRAIN, "--experts 4 --tp 2", 2)),
    unseen=Launch(TRAIN, "--experts 4 --tp 2 --ep 2 --micro-batch 2", 4),
    ask="For each weight that is set up here: which tokens is its gradient of, and who adds up the others?",
    why="Under sequence parallelism a rank's router sees a part of the tokens, so its gradient is a partial sum. "
    "Without the sum over tp every rank updates its copy by its own part: routers drift apart. The forward of step 0 "
    "is right.",
    source="torchtitan, in several ways. Without expert parallelism, the gradients below the experts "
    "lost their reduction over tp, the router's above all (https://github.com/pytorch/torchtitan/pull/4054); an "
    "earlier report of routers that drift apart is https://github.com/pytorch/torchtitan/pull/2388.",
)

GRADIENTS_ASTRAY = Bug(
    edits=(
        Edit(
            DISPATCHER,
            "return gradient.index_select(0, inverse(order)), None",
            "return gradient.index_select(0, order), None",
        ),
    ),
    seen=(ONE, Launch(TRAIN, "--experts 4 --ep 2", 2)),
    unseen=Launch(TRAIN, "--experts 8 --ep 2 --micro-batch 1", 4),
    ask="Take the example in `TokenDispatcher`: row 3 arrives at place 1. Where does its gradient go?",
    why="Rows that arrive are sorted by expert, and put back before they are sent home. In the backward each of these "
    "permutations must be undone, which takes its inverse. Applied once more instead, it leads elsewhere, except where "
    "it is its own inverse: experts and tokens get gradients of others. The first loss is right.",
    source=NOBODY,
)

LABS = [
    Hunt(
        id="hunt-07-a",
        title="Experts abroad",
        minutes=30,
        task=handout(
            "A model with four experts per layer should train alike on one rank and on two. In this folder it does "
            "not.",
            before="lesson 7",
        ),
        hints=(
            "Is the loss of step 0 right, to the last digits? Then tokens find their experts and the way back, and you "
            "look for a gradient. If it differs, even only in the seventh digit, look at what the forward uses.",
            "Who sees which tokens: the router of a rank, an expert of a rank, everything else? Whose gradient is a "
            "part of a sum, whose is complete, and which way has it come?",
            "Print, on one rank and on two, the norm of each parameter and of its gradient in step 0, and see which "
            "ones differ.",
        ),
        bugs=(ALIKE, ROUTER_APART, GRADIENTS_ASTRAY),
    ),
]
