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
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock


class Mutants(dict):
    """Name -> function that applies the mutant within an ExitStack, first of all those in `text`."""

    def __init__(self, text: str):
        super().__init__()
        changes: dict[tuple[str, str], list[tuple[str, str]]] = {}  # by name and place
        for line in re.sub(r"\n +", " ", text).splitlines():
            if line.startswith("@ "):
                places = line[2:].split(", ")
            elif line and not line.startswith("#"):
                name, _, change = line.partition(": ")
                old, new = (code.strip().replace("\\n", "\n") for code in change.split("=>"))
                for place in places:
                    changes.setdefault((name, place), []).append((old, new.replace("…", old)))
        for (name, place), each in changes.items():
            self._add(name, place, lambda real, place=place, each=each: edited(real, place, each))

    def replaces(self, name: str, place: str) -> Callable:
        """Decorate what the mutant `name` has at this place instead."""

        def register(wrong):
            self._add(name, place, lambda real: wrong)
            return wrong

        return register

    def _add(self, name: str, place: str, make: Callable) -> None:
        before = self.get(name, lambda stack: None)
        owner, attribute = re.fullmatch(r"(.+)[.:](\w+)", place).groups()
        owner = pkgutil.resolve_name(owner)

        def apply(stack: ExitStack) -> None:
            before(stack)
            stack.enter_context(mock.patch.object(owner, attribute, make(inspect.getattr_static(owner, attribute))))

        self[name] = apply


def edited(real, place: str, changes: list[tuple[str, str]]):
    """The function or property with a changed source. Raises ValueError unless every `old` is in it exactly once."""
    function = inspect.unwrap(getattr(real, "__func__", getattr(real, "fget", real)))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{place} has {source.count(old)} x {old!r}, which a mutant changes")
        source = source.replace(old, new)
    made = {}
    exec(compile(source, inspect.getsourcefile(function), "exec"), function.__globals__, made)
    return made[function.__name__]
