"""spmd-types judges step 4's own type checker: operator by operator, collective by collective, program by program."""

from itertools import product

import pytest
import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError, V, rules

from step04_tensor_parallel import type_checker as ours
from step04_tensor_parallel.labs.typed_bugs import PAIRS
from step04_tensor_parallel.labs.typed_programs import RIGHT, WRONG
from tests.outside.typed_sketches import one_of_two_ranks

TYPES = {"R": R, "I": I, "V": V, "P": P}
SIZE = 4
WITH_BACKWARD = {  # the collectives of forward and backward -> theirs, and the types between which it is defined
    ("nothing", "all-reduce"): (rules.convert, I, R),
    ("all-reduce", "nothing"): (rules.all_reduce, P, I),
    ("all-reduce", "all-reduce"): (rules.all_reduce, P, R),
    ("all-gather", "reduce-scatter"): (rules.all_gather, V, R),
    ("all-gather", "own-part"): (rules.all_gather, V, I),
    ("reduce-scatter", "all-gather"): (rules.reduce_scatter, P, V),
    ("own-part", "all-gather"): (rules.convert, I, V),
    ("all-to-all", "all-to-all"): (rules.all_to_all, V, V),
}
ALONE = {
    "all-reduce": (rules.all_reduce, P, R),
    "all-gather": (rules.all_gather, V, R),
    "reduce-scatter": (rules.reduce_scatter, P, V),
    "all-to-all": (rules.all_to_all, V, V),
}
OPERATORS = {
    "relu": torch.relu,
    "norm": lambda x: torch.nn.functional.rms_norm(x, (SIZE,)),
    "softmax": lambda x: x.softmax(-1),
    "transpose": torch.t,
    "slice": lambda x: x.narrow(0, 0, 2),
    "add": torch.add,
    "join": lambda x, y: torch.cat([x, y]),
    "multiply": torch.mul,
    "matmul": torch.matmul,
    "sum-over-parts": lambda x: x.sum(0),
    "matmul-over-parts": torch.matmul,
}


@pytest.fixture(scope="module")
def axis():
    with one_of_two_ranks(local=True) as axis:
        yield axis


def drawn(kind: str, axis) -> torch.Tensor:
    with spmd.no_typecheck():
        tensor = torch.ones(SIZE, SIZE, requires_grad=True)
    spmd.assert_type(tensor, {axis: TYPES[kind]})
    return tensor


def type_of(tensor: torch.Tensor, axis) -> str:
    return spmd.get_axis_local_type(tensor, axis).value


def computed(operator: str, kinds, axis) -> str:
    """The type that theirs infers. Raises SpmdTypeError."""
    result = OPERATORS[operator](*(drawn(kind, axis) for kind in kinds))
    if operator in ours.OVER_PARTS:  # locally, what differs between ranks; we know that a divided dimension is gone
        spmd.assert_type(result, {axis: V})
        return "P"
    return type_of(result, axis)


def communicated(rule, source, target, kind: str, axis) -> str:
    return type_of(rule(drawn(kind, axis), axis, src=source, dst=target), axis)


def verdict(function, *arguments) -> str:
    try:
        return function(*arguments)
    except (SpmdTypeError, ours.IllTyped):
        return "ill-typed"


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator(operator, axis):
    for kinds in product("RIVP", repeat=1 if operator in ours.UNARY else 2):
        if operator != "matmul-over-parts" or set(kinds) != {"R", "V"}:  # theirs cannot know what is divided
            assert verdict(ours.computed, operator, list(kinds)) == verdict(computed, operator, kinds, axis), kinds


@pytest.mark.parametrize("kind", "RIVP")
def test_collectives(kind, axis):
    """With a backward: all pairs for which they have an operator; others are ill-typed, or leave the type as it is."""
    for forward, backward in product(ours.COLLECTIVES, repeat=2):
        said = verdict(ours.communicated, kind, forward, backward)
        if (forward, backward) in WITH_BACKWARD:
            assert said == verdict(communicated, *WITH_BACKWARD[forward, backward], kind, axis), (forward, backward)
        else:
            assert said in ("ill-typed", kind), (forward, backward)
    for forward, theirs in ALONE.items():
        assert verdict(ours.communicated, kind, forward) == verdict(communicated, *theirs, kind, axis), forward


@pytest.mark.parametrize("kind", "RIVP")
def test_a_gradient(kind):
    assert ours.gradient_of(kind) == TYPES[kind].backward_type().value


def first_ill_typed_line(text: str, axis) -> int:
    """Run a program with theirs, each operation on fresh tensors that have the types found so far; 0 if it is right."""
    types = {}
    for line, name, operator, operands in ours.read(text):
        kinds = [types.get(operand) for operand in operands]
        forward, _, backward = operator.partition("|")
        try:
            if operator == ":":
                types[name] = operands[0]
            elif operator == "gradient":
                types[name] = TYPES[kinds[0]].backward_type().value
            elif operator == "-=":
                with torch.no_grad():
                    changed = drawn(types[name], axis).sub(drawn(kinds[0], axis))
                if type_of(changed, axis) != types[name]:  # out of place, theirs lets a weight become another type
                    raise SpmdTypeError(f"{name} would become {type_of(changed, axis)}")
            elif operator in OPERATORS:
                types[name] = computed(operator, kinds, axis)
            elif operator == "nothing|nothing":
                types[name] = kinds[0]
            else:
                theirs = WITH_BACKWARD[forward, backward] if backward else ALONE[forward]
                types[name] = communicated(*theirs, kinds[0], axis)
        except SpmdTypeError:
            return line
    return 0


@pytest.mark.parametrize("text", [each.text for each in RIGHT + WRONG] + [bug.wrong for pair in PAIRS for bug in pair])
def test_a_program(text, axis):
    """All that the lab walks through, and its six bugs."""
    assert ours.check(ours.read(text)).line == first_ill_typed_line(text, axis)
