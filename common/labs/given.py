"""Functions that a starter calls but does not show, because writing them is another lab."""

import ast
from collections.abc import Callable, Collection
from types import CodeType
from typing import NoReturn

from common.labs.closed import REFERENCE
from common.labs.find import ROOT


def texts_of(path: str, names: Collection[str]) -> dict[str, str]:
    """By name, these functions of a file of the project."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {node.name: ast.unparse(node) for node in body if getattr(node, "name", None) in names}


def _compiled(text: str, path: str) -> CodeType:
    return compile(text, f"<{path}, out of sight>", "exec")


def given(path: str) -> Callable[[Callable], Callable]:
    """Replace the decorated function by the one of the same name in a file of the project.

    Names in it, such as WIDTH, are those of the module in which the decorated function is defined. A check refuses this
    for functions that the lab asks for.
    """

    def replace(function: Callable) -> Callable:
        name = function.__name__
        return _defined(_compiled(texts_of(path, [name])[name], path), function)

    return replace


def _defined(code: CodeType, function: Callable) -> Callable:
    scope = {}
    exec(code, function.__globals__, scope)
    return scope[function.__name__]


def prepared(of: str, texts: dict[str, str]) -> Callable:
    """From functions of a file, by name: what makes a `given` that knows no others, from a function that refuses."""
    codes = {(of, name): _compiled(text, of) for name, text in texts.items()}

    def with_refusal(refuse: Callable[[str], NoReturn]) -> Callable:
        def given(path: str) -> Callable[[Callable], Callable]:
            def replace(function: Callable) -> Callable:
                if (path, function.__name__) not in codes:
                    refuse(REFERENCE)
                return _defined(codes[path, function.__name__], function)

            return replace

        return given

    return with_refusal
