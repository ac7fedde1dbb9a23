"""What `common.lockstep` says of each known-wrong variant that changes numbers, and how far off that is."""

import functools
import re
from collections.abc import Iterable

from tests.lockstep.runs import Case, compare
from tests.mutants.test_observed import NOTICED, NOTICED_ALONE
from tests.mutants.test_trained import CASES, CP, MOE, PP, SAVED_WRONG, TP, WITH_KERNELS, ZERO
from tests.parity.cases import FOUR
from tests.parity.runs import ADAMW, UNTIED

RACES = ("one receive buffer",)  # what a message overwrites depends on its way; they count as not found
SAME_NUMBERS = {*NOTICED, *NOTICED_ALONE, *SAVED_WRONG}
HUNTS = {  # the bugs of the lessons' hunts, too
    "hunt of step 1": (1, 1, f"{UNTIED} {ADAMW} --micro-batch 4"),
    "hunt of step 2": (2, 2, f"{UNTIED} {ADAMW}"),
    "hunt of step 3": (3, 2, f"{ZERO} 1"),
    "hunt of step 4": (4, 2, TP),
    "hunt of step 5": (5, 2, f"{PP} interleaved"),
    "hunt of step 6": (6, 2, CP),
    "hunt of step 7": (7, 2, f"{MOE} --dp 2 --ep 2 {FOUR}"),
    "hunt of step 8": (8, 2, f"{UNTIED} {ADAMW} --micro-batch 3 --tp 2 --no-sequence-parallel"),
}
KERNELS = {name: (8, *case) for name, case in WITH_KERNELS.items() if "bfloat16" not in case[1]}
MUTANTS = {name: case for name, case in CASES.items() if name not in SAME_NUMBERS}  # step, ranks, flags
MUTANTS |= KERNELS | HUNTS

# Where the code is that a mutant changes, as the first place at which a step comes through it: in which pass, and in
# which module if the pass goes from module to module
PLACES = {
    "forward tokens": "same samples everywhere, hunt of step 2, hunt of step 5",
    "forward embedding": "embedding mask off by one, f and f* swapped, same weights on all ranks, "
    "weights of the step before, weights of the first step, hunt of step 3",
    "forward layers.0.attention": "sequences of a batch mixed, positions not permuted, positions from zero, "
    "merged without rescaling, blocks of equal weight, causal block taken for full, documents of one rank, "
    "Ulysses in rank order, neighbors taken for halves, hunt of step 6",
    "forward layers.0.mlp": "combined without gates, sent back in another order, places of a rank, hunt of step 7",
    "forward layers.2.attention_norm": "one receive buffer",
    "forward layers.2.attention": "layers counted from zero on every stage, positions of the slice",
    "forward norm": "last unit of the step before",
    "forward loss": "padding not masked, own largest logit, targets of another micro-batch, boundary labels lost, "
    "parallel loss of gathered logits, hunt of step 4",
    "backward loss": "missing share of the global mean, loss averaged over tp, missing share of micro-batches, "
    "loss averaged over a rank's tokens, hunt of step 1",
    "backward head": "no f before the head, g takes its slice in the backward, W before its I, "
    "W with the input of another micro-batch, head's split lost, head's gradient twice, "
    "head takes its slice in the backward, softmax over a rank's columns, hunt of step 8",
    "backward layers.0.mlp_norm": "norm past the residual",
    "backward layers.1.attention": "statistics of the block, dK/dV one hop short, dK/dV of the own queries only, "
    "rotated key's gradient of a rank's heads, rotated key's gradient of one head, "
    "latent's gradient not sent home, kv_b_proj's gradient of one hop",
    "backward layers.1.mlp": "gradients of another micro-batch, statistics of a rank, "
    "auxiliary loss of each micro-batch",
    "sums": "hook takes the parameter, only the last micro-batch reduced, reduced on every micro-batch, stale bucket, "
    "averaged over ranks, only the last micro-batch in the shard, no sum over replicas, "
    "summed over replicas each micro-batch, norm gradients not summed, K/V replicas drift, "
    "norms forgotten by split backwards, stale tied gradient, two copies drift apart, "
    "reduced before the last micro-batch, gradients not reduced over cp, experts' gradients averaged, "
    "router's gradient not summed over tp, experts summed like the rest, divided by shards and not by replicas, "
    "experts' gradients doubled, down-projections' gradients not summed",
    "numbers": "norm of the local shard, norm counts padding, norm counts replicas, norms counted on every rank, "
    "loss of one rank, tied matrix counted twice, two copies counted twice, loads of one copy, "
    "loads of a part of the sequence, copies of tp counted twice, loss of a part of the sequence, "
    "a divided weight counted on one rank",
    "update": "decay on norms, no decay of flat shards, clip factor lost, everything decays",
}
PLACE_OF = {name: place for place, names in PLACES.items() for name in names.split(", ")}
LAYERS = 4  # at most; with fewer, modules behind the layers are further from them than they should be
ORDER = [
    f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("attention_norm", "attention", "mlp_norm", "mlp")
]
ORDER = ["", "tokens", "embedding", *ORDER, "norm", "head", "loss"]
PASSES = {"forward": "forward", "backward": "backward", "own": "backward", "gradient": "sums"}
PASSES |= {"number": "numbers", "update": "update"}


def place_of(phase: str, name: str) -> str:
    """The pass and the module of what lockstep names, as in PLACES."""
    of_layer = re.match(r"(layers\.\d+)\.(attention_norm|attention|mlp_norm|mlp)\b", name)
    layer = re.match(r"(layers\.\d+)( \(input\))?$", name)
    if of_layer:
        module = ".".join(of_layer.groups())
    elif layer:
        module = f"{layer[1]}.{'attention_norm' if layer[2] else 'mlp'}"
    else:
        module = "loss" if name == "targets" else name.removesuffix(".weight")
    way = PASSES[phase]
    return f"{way} {module}" if way in ("forward", "backward") else way


def modules_between(found: str, expected: str) -> int | None:
    """How many modules two places are apart in the order of computation; None in different passes."""
    (way, _, one), (other_way, _, other) = (place.partition(" ") for place in (found, expected))
    return abs(ORDER.index(one) - ORDER.index(other)) if way == other_way else None


Row = tuple[str, str, str, str, int | None]


@functools.cache
def rows(names: tuple[str, ...] = tuple(MUTANTS)) -> dict[str, Row]:
    """By mutant: what is named first, on which ranks, what it looks like, its place, and how far off that is."""
    worlds: dict[tuple[int, bool], list[Case]] = {}  # of each the first one without a mutant
    for name in names:
        step, ranks, flags = MUTANTS[name]
        sound, kernels = Case(step, flags), name in KERNELS
        worlds.setdefault((ranks, kernels), [sound._replace(kernels=kernels)]).append(Case(step, flags, name, kernels))
    found = {}
    for (ranks, _), cases in worlds.items():
        (none, said), *others = compare(ranks, cases)
        assert none is None, said
        for case, (difference, said) in zip(cases[1:], others, strict=True):
            place = place_of(*difference.key[1:]) if difference else "nowhere"
            off = modules_between(place, PLACE_OF[case.mutant])
            said = said or {"what": "nothing"}
            if case.mutant in RACES:
                said, off = dict.fromkeys(said, "depends on when messages arrive"), None
            found[case.mutant] = (said.get("what", ""), said.get("on", ""), said.get("looks like", ""), place, off)
    return {name: found[name] for name in names}


def table(found: dict[str, Row]) -> Iterable[str]:
    """The rows as a table of Markdown."""
    yield "| mutant | is in | named first | on | looks like |"
    yield "|---|---|---|---|---|"
    for name, (what, on, kind, _, off) in found.items():
        where = PLACE_OF[name] if off is not None and off <= 1 else f"**{PLACE_OF[name]}**"
        yield f"| {name} | {where} | {what} | {on} | {kind} |"


def near(found: dict[str, Row]) -> int:
    """How many are named within one module of where they are."""
    return sum(off is not None and off <= 1 for *_, off in found.values())
