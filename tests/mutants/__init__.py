"""Known-wrong variants of the mechanisms, made by replacing a function or two. The suite must reject each of them."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock


class Mutants(dict):
    """Name -> function that applies the mutant within an ExitStack."""

    def replaces(self, name: str, owner, attribute: str) -> Callable:
        """Decorate what the mutant `name` has in place of an attribute of a class or module. It may replace several."""

        def register(wrong):
            before = self.get(name, lambda stack: None)

            def apply(stack: ExitStack) -> None:
                before(stack)
                stack.enter_context(mock.patch.object(owner, attribute, wrong))

            self[name] = apply
            return wrong

        return register
