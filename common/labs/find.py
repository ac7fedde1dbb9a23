"""All labs: every step's folder `labs` has modules, and each of them a list LABS."""

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from common.errors import UsageError
from common.labs.lab import Lab

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("write", "hunt", "predict", "schedule", "design", "gpu")  # in the order in which a step's labs are best taken


def names_of_modules() -> list[str]:
    """All modules of the folders `labs`."""
    folders = sorted(ROOT.glob("step*/labs"))
    return [
        f"{each.parent.name}.labs.{module.name}" for each in folders for module in pkgutil.iter_modules([str(each)])
    ]


def lab_modules() -> Iterator[ModuleType]:
    """The same, imported."""
    return map(importlib.import_module, names_of_modules())


def module_of(id: str) -> str:
    """The name of the module that brings a lab."""
    return next(each.__name__ for each in lab_modules() if any(lab.id == id for lab in getattr(each, "LABS", [])))


def solutions(source: str = "") -> list[Path]:
    """Files and folders of the project that solve or grade labs; without `source`, all of the project."""
    folders = [*ROOT.glob("step*/labs"), ROOT / "tests", ROOT / ".git"]
    if not source:
        return [*folders, *ROOT.glob("step*"), ROOT / "common"]
    path = ROOT / source
    return [*folders, path, *path.parent.glob(f"__pycache__/{path.stem}.*")]


@functools.cache
def all_labs() -> dict[str, Lab]:
    """By id, in the order of the course."""
    found = [lab for module in lab_modules() for lab in getattr(module, "LABS", [])]
    order = sorted(found, key=lambda lab: (lab.step, KINDS.index(lab.kind), lab.id))
    return {lab.id: lab for lab in order}


def lab(id: str) -> Lab:
    """Raises UsageError if there is no lab of this name."""
    if id not in all_labs():
        like = [each for each in all_labs() if id in each] or difflib.get_close_matches(id, all_labs(), cutoff=0.5)
        if like:
            raise UsageError(f"there is no lab {id}; did you mean {' or '.join(like)}?")
        raise UsageError(f"there is no lab {id}; `python -m common.labs` lists them")
    return all_labs()[id]
