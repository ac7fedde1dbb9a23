"""Known-wrong variants of the mechanisms: a line changed, or a function replaced. The suite must reject each."""

import inspect
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock


class Mutants(dict):
    """Name -> function that applies the mutant within an ExitStack. A mutant may consist of several changes."""

    def edits(self, name: str, owner, attribute: str, *changes: tuple[str, str]) -> None:
        """The mutant `name` has, in the source of this function or property, `new` for `old` of every (old, new)."""
        self._add(name, owner, attribute, lambda: edited(owner, attribute, changes))

    def replaces(self, name: str, owner, attribute: str) -> Callable:
        """Decorate what the mutant `name` has in place of an attribute of a class or module."""

        def register(wrong):
            self._add(name, owner, attribute, lambda: wrong)
            return wrong

        return register

    def _add(self, name: str, owner, attribute: str, make: Callable) -> None:
        before = self.get(name, lambda stack: None)

        def apply(stack: ExitStack) -> None:
            before(stack)
            stack.enter_context(mock.patch.object(owner, attribute, make()))

        self[name] = apply


def edited(owner, attribute: str, changes: tuple[tuple[str, str], ...]):
    """The function or property with a changed source. Raises ValueError unless every `old` is in it exactly once."""
    real = inspect.getattr_static(owner, attribute)
    function = inspect.unwrap(getattr(real, "__func__", getattr(real, "fget", real)))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{attribute} has {source.count(old)} x {old!r}, which a mutant changes")
        source = source.replace(old, new)
    made = {}
    exec(compile(source, inspect.getsourcefile(function), "exec"), function.__globals__, made)
    return made[function.__name__]
