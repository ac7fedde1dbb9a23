"""A type checker for programs on the ranks of one group: which line treats summands as a sum, or parts as a whole?

    python step04_tensor_parallel/type_checker.py

checks the program EXAMPLE below. With the name of a file behind it, it checks the program in this file. The types are
those of types_of_gradients.md, R, I, V and P. A program has one statement per line. Every name is assigned once, and #
begins a comment:

    x : V                               a tensor that is given, and its type
    h = relu x                          an operator and its operands, see UNARY and BINARY
    h = all-gather|reduce-scatter x     a collective, which runs in the forward, and the one that runs in its backward
    d = gradient w                      what autograd finds for w, before anybody has sent it anywhere
    t = all-reduce d                    a collective alone: nothing is differentiated through it
    w -= t                              the optimizer's step
"""

import sys
from pathlib import Path
from typing import NamedTuple

EXAMPLE = """\
x       : V                                   # my tokens
scale   : R                                   # a norm's weight, whole on every rank
w1      : V                                   # my columns
w2      : V                                   # and the rows that they meet
scaled  = multiply x scale
tokens  = all-gather|reduce-scatter scaled    # g
inside  = matmul tokens w1
hidden  = relu inside
summand = matmul-over-parts hidden w2
y       = reduce-scatter|all-gather summand   # g*
dscale  = gradient scale
total   = all-reduce dscale
scale  -= total
"""

COLLECTIVES = ("nothing", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "own-part")
NONLINEAR = ("relu", "norm", "softmax")
LINEAR = ("transpose", "slice", "add", "join")  # of summands they give summands of the result; join concatenates
PRODUCTS = ("multiply", "matmul")
OVER_PARTS = ("sum-over-parts", "matmul-over-parts")  # they add up along a dimension that is divided among the ranks
UNARY = (*NONLINEAR, "transpose", "slice", "sum-over-parts")
BINARY = ("add", "join", *PRODUCTS, "matmul-over-parts")


class IllTyped(Exception):
    """The types of a statement's operands do not allow it; the text says why."""


class Statement(NamedTuple):
    """A line of a program. Of `x : V` the operator is ":" and the only operand "V", of `w -= t` they are "-=" and t."""

    line: int  # counted from 1, with empty lines and comments
    name: str
    operator: str
    operands: tuple[str, ...]


class Checked(NamedTuple):
    """What a checker says of a program."""

    types: dict[str, str]  # of every name that is assigned before the first ill-typed line
    line: int = 0  # the first ill-typed line; 0 if there is none
    why: str = ""


def gradient_of(kind: str) -> str:
    """Return the type of the gradient of a tensor of type `kind`."""
    # --- write this yourself ---
    return {"R": "P", "I": "I", "V": "V", "P": "R"}[kind]
    # --- until here ---


def computed(operator: str, kinds: list[str]) -> str:
    """Return the type of what a UNARY or BINARY operator computes from operands of these types. May raise IllTyped."""
    # --- write this yourself ---
    found = set(kinds)
    if operator in OVER_PARTS:
        if found == {"V"}:
            return "P"
        raise IllTyped(f"{operator} adds up what the ranks' parts give, so its operands must be V: {kinds}")
    if len(found) == 1 and "P" not in found:
        return kinds[0]
    if found == {"R", "V"}:
        return "V"
    if found == {"P"} and operator in LINEAR or sorted(kinds) == ["P", "R"] and operator in PRODUCTS:
        return "P"
    raise IllTyped(f"{operator} cannot take {' and '.join(kinds)}")
    # --- until here ---


def results(collective: str, kind: str) -> str:
    """Return into which types a collective can turn `kind`, such as "RI", or "" if it must not be given such a tensor.

    `own-part` cuts what is whole on every rank, and keeps this rank's part. `nothing` leaves all numbers as they are.
    """
    # --- write this yourself ---
    changes = {
        "nothing": {"R": "R", "I": "RI", "V": "V", "P": "P"},
        "all-reduce": {"P": "RI"},
        "all-gather": {"V": "RI"},
        "reduce-scatter": {"P": "V"},
        "all-to-all": {"V": "V"},
        "own-part": {"R": "V", "I": "V"},
    }
    return changes[collective].get(kind, "")
    # --- until here ---


def communicated(kind: str, forward: str, backward: str | None = None) -> str:
    """Return the type of what `forward` makes of a tensor of type `kind`. May raise IllTyped.

    `backward` is the collective that autograd will run on the gradient of the result, and what that returns is taken
    for the gradient of the tensor. At most one type allows this. Without `backward` nothing is differentiated, so R
    and I would be the same: then say R.
    """
    # --- write this yourself ---
    after = list(results(forward, kind))
    if backward:
        after = [each for each in after if gradient_of(kind) in results(backward, gradient_of(each))]
    if not after:
        raise IllTyped(f"{forward}{f' with {backward} in its backward' if backward else ''} cannot take {kind}")
    return after[0]
    # --- until here ---


def type_of(statement: Statement, types: dict[str, str]) -> str:
    """Return the type of a statement's name after it, if `types` are those of all names before. May raise IllTyped.

    The optimizer's step leaves a weight the type that it has, and subtracts only a gradient of this type.
    """
    # --- write this yourself ---
    if statement.operator == ":":
        return statement.operands[0]
    kinds = [types[name] for name in statement.operands]
    if statement.operator == "gradient":
        return gradient_of(kinds[0])
    if statement.operator == "-=":
        if kinds[0] != types[statement.name]:
            raise IllTyped(f"{statement.name} is {types[statement.name]}, and {statement.operands[0]} is {kinds[0]}")
        return kinds[0]
    if statement.operator in UNARY + BINARY:
        return computed(statement.operator, kinds)
    return communicated(kinds[0], *statement.operator.split("|"))
    # --- until here ---


def check(program: list[Statement]) -> Checked:
    """Walk through a program, from its first line to the first that is ill-typed, or to its end."""
    # --- write this yourself ---
    types: dict[str, str] = {}
    for statement in program:
        try:
            types[statement.name] = type_of(statement, types)
        except IllTyped as error:
            return Checked(types, statement.line, str(error))
    return Checked(types)
    # --- until here ---


def read(text: str) -> list[Statement]:
    """Return the statements of a program. Raises ValueError, with the line, where it is none."""
    program, known = [], set()
    for line, code in enumerate(text.splitlines(), start=1):
        words = code.partition("#")[0].split()
        if not words:
            continue
        statement = _statement(line, words)
        used = {":": set(), "-=": {statement.name, *statement.operands}}.get(statement.operator, {*statement.operands})
        if used - known:
            raise ValueError(f"line {line} uses {min(used - known)}, which no line before it assigns")
        if statement.operator != "-=" and statement.name in known:
            raise ValueError(f"line {line} assigns {statement.name} again")
        known.add(statement.name)
        program.append(statement)
    return program


def _statement(line: int, words: list[str]) -> Statement:
    match words:
        case [name, ":", ("R" | "I" | "V" | "P") as kind]:
            return Statement(line, name, ":", (kind,))
        case [weight, "-=", gradient]:
            return Statement(line, weight, "-=", (gradient,))
        case [name, "=", operator, operand] if operator in ("gradient", *UNARY) or _communicates(operator):
            return Statement(line, name, operator, (operand,))
        case [name, "=", operator, first, second] if operator in BINARY:
            return Statement(line, name, operator, (first, second))
    raise ValueError(f"line {line} is no statement: {' '.join(words)}")


def _communicates(operator: str) -> bool:
    names = operator.split("|")
    return len(names) <= 2 and all(name in COLLECTIVES for name in names)


def main(arguments: list[str]) -> int:
    """Print a program with the types of its names, and mark the first ill-typed line. Returns 1 if there is one."""
    try:
        text = Path(arguments[0]).read_text(encoding="utf-8") if arguments else EXAMPLE
        program = read(text)
    except (OSError, ValueError) as error:
        print(f"error: {arguments[0]}: {error.strerror if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2
    types, wrong, why = check(program)
    names = {statement.line: statement.name for statement in program}
    for line, code in enumerate(text.splitlines(), start=1):
        mark = "!" if line == wrong else types[names[line]] if line in names and (not wrong or line < wrong) else ""
        print(f"{line:3}  {mark:1}  {code}".rstrip())
    print(f"\nline {wrong} is ill-typed: {why}" if wrong else "\nAll types agree.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
