"""Starters, cut from the project's own files: between two marks stands what is worth writing yourself.

    # --- write this yourself ---
    ...
    # --- until here ---

The marks stay in the starter, so that one sees where to write, and the body between them becomes one line that raises.
Everything else, such as signatures, docstrings and helpers, is the project's, and never goes stale.
"""

import ast
import re
import textwrap
from collections.abc import Collection

MARKED = re.compile(r"^( *)# --- write this yourself ---\n(.*?)^\1# --- until here ---\n", re.MULTILINE | re.DOTALL)


def starter(source: str, bodies: Collection[int], only: Collection[str] = ()) -> str:
    """Return a file without these of its marked bodies, counted from 1; the others lose their marks.

    With `only`, keep no more of the file than its docstring, its imports and the functions and classes of these names.
    """
    counted = iter(range(1, len(bodies_of(source)) + 1))

    def cut(match: re.Match) -> str:
        if next(counted) not in bodies:
            return match[2]
        head, tail = match[0].splitlines(keepends=True)[:: match[0].count("\n") - 1]
        return f"{head}{match[1]}raise NotImplementedError\n{tail}"

    text = MARKED.sub(cut, source)
    return _only(text, only) if only else text


def bodies_of(source: str) -> list[str]:
    """The marked bodies of a file, without their indentation."""
    return [textwrap.dedent(match[2]) for match in MARKED.finditer(source)]


def _only(text: str, names: Collection[str]) -> str:
    lines, kept = text.splitlines(), []
    tree = ast.parse(text).body
    for number, node in enumerate(tree):
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        if not (imports or number == 0 or getattr(node, "name", None) in names):
            continue
        gap = 0 if imports or not kept else 2
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        last = node.end_lineno
        while last < len(lines) and lines[last].startswith(" "):  # a comment at the end of a function
            last += 1
        kept += [*[""] * (gap if number else 0), *lines[first - 1 : last], *[""] * (number == 0)]
    return "\n".join(kept) + "\n"
