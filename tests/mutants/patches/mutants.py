"""Known-wrong variants of the mechanisms: some code changed, or a function replaced. The suite must reject each.

They are written down like this, in a raw string:

    @ module:Class.function, module:function
    # what the mutant gets wrong
    name of the mutant: old code => new code, in which … stands for the old
        and an indented line goes on with the one before

A mutant may have several changes, in one function or in several. New lines of code are written as \\n.
"""

import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock


class Quote(NamedTuple):
    """Code that a mutant changes; without `old` all of a function, which is replaced."""

    mutant: str
    place: str
    old: str
    file: str  # where the mutant is written down
    line: int


class Mutants(dict):
    """Name -> function that applies the mutant within an ExitStack, first of all those in `text`.

    `quotes` lists what they change.
    """

    def __init__(self, text: str):
        super().__init__()
        self.quotes: list[Quote] = []
        file, first = _where()
        changes: dict[tuple[str, str], list[tuple[str, str]]] = {}  # by name and place
        for match in re.finditer(r"^\S.*(?:\n +.*)*", text, re.MULTILINE):
            line = re.sub(r"\n +", " ", match[0])
            if line.startswith("@ "):
                places = line[2:].split(", ")
            elif not line.startswith("#"):
                name, _, change = line.partition(": ")
                old, new = (code.strip().replace("\\n", "\n") for code in change.split("=>"))
                for place in places:
                    before = changes.setdefault((name, place), [])
                    if not any(old in made for _, made in before):  # else it quotes what the mutant itself has made
                        self.quotes.append(Quote(name, place, old, file, first + text.count("\n", 0, match.start())))
                    before.append((old, new.replace("…", old)))
        for (name, place), each in changes.items():
            self._add(name, place, lambda real, place=place, each=each: edited(real, place, each))

    def replaces(self, name: str, place: str) -> Callable:
        """Decorate what the mutant `name` has at this place instead."""
        self.quotes.append(Quote(name, place, "", *_where()))

        def register(wrong):
            self._add(name, place, lambda real: wrong)
            return wrong

        return register

    def _add(self, name: str, place: str, make: Callable) -> None:
        before = self.get(name, lambda stack: None)
        owner, attribute = at(place)

        def apply(stack: ExitStack) -> None:
            before(stack)
            stack.enter_context(mock.patch.object(owner, attribute, make(inspect.getattr_static(owner, attribute))))

        self[name] = apply


def _where() -> tuple[str, int]:
    """File and line of the code that has called one of the methods above."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def at(place: str) -> tuple[object, str]:
    """The class or module that a place names, and the attribute of it."""
    owner, attribute = re.fullmatch(r"(.+)[.:](\w+)", place).groups()
    return pkgutil.resolve_name(owner), attribute


def function_of(real) -> Callable:
    """The function of a static attribute, which may be a property, a static method or a wrapper."""
    return inspect.unwrap(getattr(real, "__func__", getattr(real, "fget", real)))


def edited(real, place: str, changes: list[tuple[str, str]]):
    """The function or property with a changed source. Raises ValueError unless every `old` is in it exactly once."""
    function = function_of(real)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{place} has {source.count(old)} x {old!r}, which a mutant changes")
        source = source.replace(old, new)
    made = {}
    exec(compile(source, inspect.getsourcefile(function), "exec"), function.__globals__, made)
    return made[function.__name__]
