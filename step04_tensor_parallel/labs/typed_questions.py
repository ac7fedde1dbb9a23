"""What the check of step 4's type checker asks, what is right, and what a wrong answer usually comes from."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from step04_tensor_parallel import type_checker as ours
from step04_tensor_parallel.labs.typed_programs import RIGHT, WRONG, Program

ILL_TYPED = "IllTyped"
TYPES = "RIVP"
FIRST = (  # of all pairs of collectives, those that say most about what is misunderstood
    ("P", "all-reduce", "nothing"),
    ("I", "nothing", "all-reduce"),
    ("V", "all-gather", "reduce-scatter"),
    ("P", "reduce-scatter", "all-gather"),
    ("P", "all-reduce", "all-reduce"),
    ("V", "all-gather", "own-part"),
    ("R", "nothing", "all-reduce"),
    ("R", "all-reduce", "nothing"),
    ("V", "all-reduce", "own-part"),
)


class Question(NamedTuple):
    part: str  # the function that it is about
    code: str  # a Python expression, for the student's file
    right: object  # a type or ILL_TYPED; of a program the types, and the first ill-typed line or 0
    about: tuple  # the arguments, or a Program


def questions() -> Iterator[Question]:
    """All of them, part by part."""
    for kind in TYPES:
        yield _call("gradient_of", kind)
    for operator in ours.UNARY:
        for kind in TYPES:
            yield _call("computed", operator, [kind])
    for operator, *kinds in product(ours.BINARY, TYPES, TYPES):
        if not (operator == "matmul-over-parts" and set(kinds) == {"R", "V"}):  # may what is whole be summed by parts?
            yield _call("computed", operator, kinds)
    for kind, forward, backward in dict.fromkeys((*FIRST, *product(TYPES, ours.COLLECTIVES, ours.COLLECTIVES))):
        if {forward, backward} != {"nothing", "all-to-all"}:  # types do not see whose parts these are
            yield _call("communicated", kind, forward, backward)
    for kind, forward in product(TYPES, ours.COLLECTIVES[1:]):
        yield _call("communicated", kind, forward)
    for program in RIGHT + WRONG:
        code = f"check(read({program.text!r}))"
        yield Question("check", code, answer_of_ours(code), (program,))


def answer_of_ours(code: str) -> object:
    """What our own checker says, in the form of `Question.right`."""
    try:
        found = eval(code, vars(ours))
    except ours.IllTyped:
        return ILL_TYPED
    return found if isinstance(found, str) else [found.types, found.line]


def _call(part: str, *arguments) -> Question:
    code = f"{part}({', '.join(map(repr, arguments))})"
    return Question(part, code, answer_of_ours(code), arguments)


# ---- reasons ---------------------------------------------------------------------------------------------------------

GRADIENTS = {
    "R": "each rank does its own work with an R, and finds what this work contributes to the gradient: a summand.",
    "I": "all ranks do the same work with an I, so each finds the whole gradient. To add these up would be wrong.",
    "V": "each rank has a part of its own, and finds the gradient of this part.",
    "P": "a larger summand makes the sum larger by as much, on whichever rank it is: all have the gradient of the sum.",
}


def reason(question: Question, found: object) -> str:
    """What a wrong answer to a question usually comes from: "" if we know nothing."""
    return {"gradient_of": _of_gradient, "computed": _of_computing, "communicated": _of_communicating}[question.part](
        question.right, found, *question.about
    )


def _of_gradient(right: object, found: object, kind: str) -> str:
    return GRADIENTS[kind]


def _of_computing(right: object, found: object, operator: str, kinds: list[str]) -> str:
    types = set(kinds)
    if operator in ours.OVER_PARTS:
        if right == "P":
            return "each rank has added up its own part of the dimension, so it holds a summand of the result."
        return "only what is divided, V, has parts to add up; what is whole or a summand needs another operator."
    if right == ILL_TYPED and "I" in types:
        return (
            "the gradient of an I is found whole on every rank only if all do the same work with it. If it meets "
            "something else, each rank finds a summand, and it must be made an R before."
        )
    if right == ILL_TYPED and operator in ours.NONLINEAR:
        return f"a {operator} of a sum is not the sum of what the {operator} makes of its summands: add up before."
    if right == ILL_TYPED and "V" in types:
        return "a rank's part has nothing to do with another rank's summand: add up the summands before."
    if right == ILL_TYPED and operator in ours.LINEAR:
        return "if every rank adds the same R to its summand, the sum counts it once per rank."
    if right == ILL_TYPED:
        return "(a + b) * (c + d) is not a * c + b * d: of two factors, only one may be a sum that is not added up yet."
    if types == {"P", "R"}:
        return "a product may be taken summand by summand if the other factor is the same on all ranks."
    if right == "P":
        return "what is linear may be done to the summands: it gives summands of the result."
    if right == "V":
        return "each rank may do its own work with an R, and what comes out differs between ranks."
    return "if all ranks do the same with the same numbers, they have the same result, of the same type."


def _of_communicating(right: object, found: object, kind: str, forward: str, backward: str | None = None) -> str:
    forwards = ours.results(forward, kind)
    if forward == "all-reduce" and kind in "RI":
        return "all ranks have the same numbers already: a sum would be once per rank too large."
    if forward == "all-reduce" and kind == "V":
        return "these are different parts, and no summands of one tensor."
    if not forwards:
        return f"`{forward}` is not made for {kind}: look at the table of changes."
    if backward is None:
        return "look at the table of changes; where it has R and I, say R."
    if right == ILL_TYPED:
        if found in tuple(forwards):
            arrives, needed = ours.gradient_of(found), ours.gradient_of(kind)
            wrong = f"`{backward}` makes no {needed} of it, and that is what the gradient of {kind} must be"
            return f"you look at the forward alone. If the result is {found}, its gradient is {arrives}; {wrong}."
        return f"`{forward}` makes {' or '.join(forwards)} of {kind}."
    arrives, needed = ours.gradient_of(right), ours.gradient_of(kind)
    return (
        f"look at the backward too. If the result is {right}, its gradient is {arrives}. `{backward}` makes {needed} "
        f"of it, which is what the gradient of {kind} must be. No other type does that."
    )


def wrong_program(program: Program, right: list, found: object) -> str:
    """What is wrong in an answer about a program; "" if it is right."""
    types, line = right
    shape = isinstance(found, list) and len(found) == 3 and isinstance(found[0], dict) and isinstance(found[1], int)
    if not shape:
        return f"`check` should return Checked(types, line, why), and returns {found!r}."
    if found[1] != line and not program.fault:
        return f"`check` rejects line {found[1]} of a program that is right: {found[2]}"
    if found[1] != line:
        says = f"finds line {found[1]} ill-typed" if found[1] else "finds nothing wrong"
        later = " Only the first one is asked for: what comes after it rests on a wrong type." * (found[1] > line)
        return f"`check` {says}, and the first ill-typed line is {line}: {program.fault}.{later}"
    for name in (*types, *sorted(found[0].keys() - types.keys())):
        if found[0].get(name) != types.get(name):
            before = " Types are those of the names that are assigned before the ill-typed line." if line else ""
            return f"`check` says that {name} is {found[0].get(name)}, and should say {types.get(name)}.{before}"
    return ""
