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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

MARKED = re.compile(r"^( *)# --- write this yourself ---\n(.*?)^\1# --- until here ---\n", re.MULTILINE | re.DOTALL)


def starter(
    source: str,
    bodies: Collection[int],
    only: Collection[str] = (),
    hidden: Mapping[str, str] | None = None,
    path: str = "",
) -> str:
    """Return a file without these of its marked bodies, counted from 1; the others lose their marks.

    Args:
        only: names of functions and classes; keep no more of the file than these, its docstring and its imports.
        hidden: functions that keep only their signature and docstring, and run our code -> the lab that asks for them.
        path: the file's path in the project. Where it says how to run it, the starter has only its name.
    """
    counted = iter(range(1, len(bodies_of(source)) + 1))

    def cut(match: re.Match) -> str:
        if next(counted) not in bodies:
            return match[2]
        head, tail = match[0].splitlines(keepends=True)[:: match[0].count("\n") - 1]
        return f"{head}{match[1]}raise NotImplementedError\n{tail}"

    text = MARKED.sub(cut, source)
    text = _only(text, only) if only else text
    text = _hide(text, hidden, path) if hidden else text
    return re.sub(rf"^( +(?:python|torchrun) .*?){path}$", rf"\1{Path(path).name}", text, flags=re.MULTILINE)


def unseen(source: str, path: str) -> tuple[str, dict[str, str]]:
    """A file without all of its marked bodies that runs all the same, with as many lines; and what it then calls.

    In the place of a body stands a call of `out_of_sight.run`, which `copies.py` makes, with a key. Returns the text,
    and by key a function: the marked body with the head of the function in which it stands, of which it must be all but
    the docstring.
    """
    called: dict[str, str] = {}

    def hide(match: re.Match) -> str:
        line = source.count("\n", 0, match.start()) + 1
        node = min((each for each in _functions(source) if each.lineno <= line <= each.end_lineno), key=_length)
        if node.body[-1].end_lineno > line + match[0].count("\n") - 1:
            raise ValueError(f"{path}: {node.name} does not end with its marked body")
        key, indent = f"{path} {len(called) + 1}", match[1]
        called[key] = (
            f"def {node.name}({ast.unparse(node.args)}):\n{textwrap.indent(textwrap.dedent(match[2]), '    ')}"
        )
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        names += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
        lines = [
            "# No bug is here: a lab of the kind write asks for these lines, and they run out of sight.",
            "from common.out_of_sight import run",
            "",
        ]
        lines[2] = f'return run("{key}", {", ".join(["globals()", *names])})'
        lines += ["#"] * (match[0].count("\n") - len(lines))
        return "".join(f"{indent}{each}\n" for each in lines)

    return MARKED.sub(hide, source), called


def _length(node: ast.FunctionDef) -> int:
    return node.end_lineno - node.lineno


def bodies_of(source: str) -> list[str]:
    """The marked bodies of a file, without their indentation."""
    return [textwrap.dedent(match[2]) for match in MARKED.finditer(source)]


def helpers(source: str, bodies: Collection[int]) -> set[str]:
    """Names of the functions that hold none of these bodies: what a student is given."""
    marks = [source.count("\n", 0, match.start()) + 1 for match in MARKED.finditer(source)]
    asked = [marks[number - 1] for number in bodies]
    functions = list(_functions(source))
    writes = {node.name for node in functions if any(node.lineno <= line <= node.end_lineno for line in asked)}
    return {node.name for node in functions} - writes


def _functions(source: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))


def _hide(text: str, hidden: Mapping[str, str], path: str) -> str:
    """Replace bodies by a decorator, from the end of the file to its beginning, so that line numbers stay right."""
    lines = text.splitlines()
    for node in sorted(_functions(text), key=lambda node: -node.lineno):
        if node.name in hidden:
            lines[node.body[0].end_lineno : node.end_lineno] = []
            lines.insert(node.lineno - 1, f'@given("{path}")  # ours; you write it in {hidden[node.name]}')
    last = max(node.end_lineno for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom))
    lines[last:last] = ["", "from common.labs.given import given"]
    return "\n".join(lines) + "\n"


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
