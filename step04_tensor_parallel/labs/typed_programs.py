"""Programs that the check of step 4's type checker walks through: right ones, and ones with a line too few or wrong."""

from typing import NamedTuple

from step04_tensor_parallel.labs.typed_bugs import PAIRS
from step04_tensor_parallel.type_checker import EXAMPLE

PLAIN = """\
# A sublayer without sequence parallelism.
x    : I
w1   : V
w2   : V

copy = nothing|all-reduce x
part = matmul copy w1
half = relu part
some = matmul-over-parts half w2
y    = all-reduce|nothing some
out  = add x y
d1   = gradient w1
w1  -= d1
"""
DATA = """\
# Data parallelism: whole weights, and a loss that is a sum over the ranks' samples.
x     : V
w     : R
b     : R
y     = matmul x w
z     = add y b
error = sum-over-parts z
loss  = all-reduce error
dw    = gradient w
sum   = all-reduce dw
w    -= sum
db    = gradient b
all   = all-reduce db
b    -= all
"""
SUMMANDS = """\
# Two products whose summands are added up together, then columns of something that all ranks need.
x     : V
scale : R
a     : V
b     : V
head  : V
one   = matmul-over-parts x a
two   = matmul-over-parts x b
both  = add one two
turn  = transpose both
some  = multiply turn scale
total = all-reduce|all-reduce some
words = matmul total head
logit = all-gather|own-part words
best  = softmax logit
mine  = own-part|all-gather best
other = all-to-all|all-to-all mine
"""


class Program(NamedTuple):
    """A program, and in words what is wrong in it; nothing if it is right."""

    text: str
    fault: str = ""


def _changed(text: str, old: str, new: str, fault: str) -> Program:
    if text.count(old) != 1:
        raise ValueError(f"{old!r} is {text.count(old)} times in the program")
    return Program(text.replace(old, new), fault)


RIGHT = [Program(text) for text in (PLAIN, DATA, SUMMANDS, EXAMPLE, *(bug.right for pair in PAIRS for bug in pair))]

_NO_SUM = _changed(DATA, "sum   = all-reduce dw\nw    -= sum", "w    -= dw", "a weight R is changed by a summand")
WRONG = [
    _changed(
        PLAIN,
        "copy = nothing|all-reduce x\npart = matmul copy w1",
        "part = matmul x w1",
        "an I meets a V, because operator f is missing",
    ),
    _changed(
        PLAIN,
        "all-reduce|nothing",
        "all-reduce|all-reduce",
        "the all-reduce returns R, since there is another one in its backward, and x, to which it is added, is I",
    ),
    _changed(PLAIN, "y    = all-reduce|nothing some\nout  = add x y", "out  = add x some", "x is added to a summand"),
    _changed(
        PLAIN,
        "half = relu part\nsome = matmul-over-parts half w2",
        "half = matmul-over-parts part w2\nsome = relu half",
        "a summand passes through a relu",
    ),
    _changed(PLAIN, "w1  -= d1", "sum  = all-reduce d1\nw1  -= sum", "different parts, V, are added up"),
    _NO_SUM,
    _changed(DATA, "w    -= sum", "more  = all-reduce sum\nw    -= more", "a gradient is added up twice"),
    _changed(DATA, "w    -= sum", "w    -= x", "a weight R is changed by a V, on each rank by something else"),
    _changed(DATA, "loss  = all-reduce error", "loss  = relu error", "a summand passes through a relu"),
    _changed(SUMMANDS, "multiply turn scale", "multiply turn two", "two factors are summands"),
    _changed(
        SUMMANDS,
        "own-part|all-gather best",
        "own-part|all-gather total",
        "the backward gathers a whole gradient, and that of an R must be summands",
    ),
    # Of two ill-typed lines, the first is asked for
    _changed(_NO_SUM.text, "all   = all-reduce db\nb    -= all", "b    -= db", _NO_SUM.fault),
]
