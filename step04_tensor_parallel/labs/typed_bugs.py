"""Six bugs that people have shipped or proposed, as programs for step 4's type checker, and where they are reported."""

from dataclasses import dataclass

TRACKER = "https://github.com"


@dataclass(frozen=True)
class TypedBug:
    """A program that is right, and the change that breaks it. Programs are cut down to the lines that matter."""

    right: str
    old: str
    new: str
    has: str  # the type of the operand that does not fit in the first ill-typed line
    needs: str  # the type that would fit there
    why: str  # what goes wrong, how it shows, and the repair
    source: str

    @property
    def wrong(self) -> str:
        return self.right.replace(self.old, self.new)


EXPERTS = TypedBug(
    right="""\
# A layer of experts. Every rank has all experts, but only some columns of each. No sequence parallelism.
x       : I
router  : I
up      : V                                 # of every expert, my columns
down    : V                                 # and the rows that these meet
logits  = matmul x router
weights = softmax logits
inside  = nothing|all-reduce x
hidden  = matmul inside up
active  = relu hidden
part    = matmul-over-parts active down
y       = all-reduce|nothing part
mixed   = multiply y weights
out     = add x mixed
drouter = gradient router
router -= drouter
""",
    old="nothing|all-reduce x",
    new="nothing|nothing x",
    has="I",
    needs="R",
    why="Each rank's columns give a summand of the gradient of x, and the border in front of the experts passes it on "
    "as if it were whole. The forward is right, so the loss looks normal. All that the backward reaches below the "
    "experts gets one rank's summand. The first line that does not fit is the product with up; the repair is one line "
    "above: the backward of the border needs an all-reduce.",
    source=f"torchtitan, with tensor parallelism and without expert parallelism ({TRACKER}/pytorch/torchtitan/pull/4054"
    "; likewise in pull/1878).",
)

KEYS = TypedBug(
    right="""\
# Latent attention: a small latent, from which the keys of all heads are made, and a position that all heads share.
x        : I
kv_down  : V                                # my columns
kv_up    : V                                # those of my heads
inside   = nothing|all-reduce x
part     = matmul inside kv_down
latent   = all-gather|own-part part
content  = slice latent
position = slice latent
copied   = nothing|all-reduce content
keys     = matmul copied kv_up
shared   = nothing|all-reduce position
whole    = join keys shared
""",
    old="shared   = nothing|all-reduce position\nwhole    = join keys shared\n",
    new="whole    = join keys position\n",
    has="I",
    needs="R",
    why="Each rank joins the shared position to the keys of its own heads, so it finds its heads' summand of the "
    "gradient. Nobody adds the summands up, although those of the content, the other slice of the same tensor, are. "
    "The position needs an operator f of its own.",
    source=f"Megatron-LM ({TRACKER}/NVIDIA/Megatron-LM/issues/1699).",
)

NORM = TypedBug(
    right="""\
# A norm before an MLP, with sequence parallelism.
x       : V                                 # my tokens
scale   : R                                 # the norm's weight
w1      : V
w2      : V
normed  = norm x
scaled  = multiply normed scale
tokens  = all-gather|reduce-scatter scaled
inside  = matmul tokens w1
hidden  = relu inside
part    = matmul-over-parts hidden w2
y       = reduce-scatter|all-gather part
out     = add x y
dw1     = gradient w1
w1     -= dw1
dscale  = gradient scale
total   = all-reduce dscale
scale  -= total
""",
    old="total   = all-reduce dscale\nscale  -= total\n",
    new="scale  -= dscale\n",
    has="P",
    needs="R",
    why="A rank's norm sees the rank's own tokens, so the gradient of its weight is a summand. Each rank subtracts its "
    "own, and the copies of the weight drift apart. An all-reduce must come between gradient and step.",
    source=f"gpt-neox, where the hooks that should sum them never fired ({TRACKER}/EleutherAI/gpt-neox/pull/1257, "
    f"repaired in pull/1259); PaddleNLP, with a pipeline ({TRACKER}/PaddlePaddle/PaddleNLP/pull/7610).",
)

HEADS = TypedBug(
    right="""\
# A layer whose heads are divided, and one norm weight that all heads share. No sequence parallelism.
x       : I
w_in    : V                                 # my heads
w_out   : V
shared  : R                                 # the norm's weight, as long as one head
inside  = nothing|all-reduce x
heads   = matmul inside w_in
normed  = norm heads
scaled  = multiply normed shared
part    = matmul-over-parts scaled w_out
y       = all-reduce|nothing part
out     = add x y
dshared = gradient shared
total   = all-reduce dshared
shared -= total
""",
    old="total   = all-reduce dshared\nshared -= total\n",
    new="shared -= dshared\n",
    has="P",
    needs="R",
    why="All ranks hold this weight, but each applies it to its own heads, so its gradient is a summand. Norm weights "
    "were summed only with sequence parallelism, as if the sequence were the only thing that may be divided. The "
    "all-reduce is needed without it, too.",
    source=f"Megatron-LM, the output norm of its GatedDeltaNet ({TRACKER}/NVIDIA/Megatron-LM/issues/7452, finding 11).",
)

DOWN = TypedBug(
    right="""\
# Queries of latent attention. The projection down is the same on every rank, the one up is divided by heads.
x      : I
q_down : I
q_up   : V                                  # my heads
latent = matmul x q_down
normed = norm latent
inside = nothing|all-reduce normed
query  = matmul inside q_up
dup    = gradient q_up
q_up  -= dup
ddown  = gradient q_down
q_down -= ddown
""",
    old="q_down -= ddown\n",
    new="total  = all-reduce ddown\nq_down -= total\n",
    has="I",
    needs="P",
    why="Operator f has added up the summands already, above the projection, so every rank finds the whole gradient of "
    "q_down. A second sum makes it as many times too large as there are ranks. Adam divides such a factor away again, "
    "but the gradient norm and its clipping see it. The second sum must go.",
    source=f"AReno, for two models with latent attention ({TRACKER}/inclusionAI/AReno/pull/496).",
)

GATHERED = TypedBug(
    right="""\
# Latent attention with sequence parallelism: the shared position is made of a rank's own tokens, then gathered.
x        : V                                # my tokens
k_down   : R
q        : V                                # the queries of my heads, for all tokens
part     = matmul x k_down
position = all-gather|reduce-scatter part
scores   = matmul q position
chosen   = softmax scores
ddown    = gradient k_down
total    = all-reduce ddown
k_down  -= total
""",
    old="scores   = matmul q position\n",
    new="shared   = nothing|all-reduce position\nscores   = matmul q shared\n",
    has="R",
    needs="I",
    why="Each rank's heads give a summand of the gradient of the position, and the backward of the all-gather adds "
    "them up. The operator f that was put behind it adds them up before, so the gradient is as many times too large as "
    "there are ranks. Without sequence parallelism, there is no all-gather, and f is right.",
    source=f"found by a review before it was merged ({TRACKER}/NVIDIA/Megatron-LM/pull/6839).",
)

PAIRS = ((EXPERTS, KEYS), (NORM, HEADS), (DOWN, GATHERED))  # of each pair, a student gets one


def bugs_of(student: int) -> tuple[TypedBug, ...]:
    """Three bugs, chosen by the binary digits of the student's number, so that neighbors differ."""
    return tuple(pair[student >> place & 1] for place, pair in enumerate(PAIRS))
