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
    for node in ast.parse(text).body:
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        targets = {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        if imports or getattr(node, "name", None) in names or targets & set(names):
            gap = [] if imports else [""] if targets else ["", ""]
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            kept += [*gap, *lines[first - 1 : node.end_lineno]]
    return "\n".join(kept) + "\n"
