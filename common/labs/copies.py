"""Copies of the project with changed lines, for labs in which something is to be found or to be measured.

Some of the copied files are the source of a lab. What such a lab asks for runs in the copy, too, but out of sight.
"""

import base64
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.labs.cut import unseen
from common.labs.find import ROOT

LEFT_OUT = {"labs", "experiments", "planning", "gpu_ladder", "__pycache__"}  # folders that no training needs
LEFT_OUT |= {"sketch.py", "type_checker.py"}  # nor does it need these files, which solve other labs
HIDDEN = "common/out_of_sight.py"  # in the copy
MODULE = '''\
"""What labs ask for: it runs in this copy, and is not to be read here."""

import base64
import zlib

CODE = {{
{}}}
FOUND = {{}}


def run(key, scope, *arguments):
    if key not in FOUND:
        made = {{}}
        exec(zlib.decompress(base64.b64decode(CODE[key])).decode(), scope, made)
        (FOUND[key],) = made.values()
    return FOUND[key](*arguments)
'''


class Edit(NamedTuple):
    """A change of the source: `old` occurs exactly once in the file."""

    file: str  # from the top of the project
    old: str
    new: str


def files(step: int, extra: tuple[str, ...] = ()) -> Iterator[Path]:
    """What trains the steps up to this one, by paths from the top of the project; and `extra`."""
    steps = [folder for folder in sorted(ROOT.glob("step0*")) if int(folder.name[4:6]) <= step]
    for path in (each for folder in (ROOT / "common", *steps) for each in sorted(folder.rglob("*.py"))):
        if LEFT_OUT.isdisjoint(path.relative_to(ROOT).parts):
            yield path.relative_to(ROOT)
    yield from map(Path, extra)


def edited(edits: tuple[Edit, ...]) -> dict[str, str]:
    """The text of each file that the edits change. Raises ValueError where one no longer fits the source."""
    texts = {}
    for file, old, new in edits:
        text = texts.get(file) or read(ROOT / file)
        if text.count(old) != 1:
            raise ValueError(f"{file} has {text.count(old)} x {old!r}")
        texts[file] = text.replace(old, new)
    return texts


def shown(file: str | Path, edits: tuple[Edit, ...] = ()) -> str:
    """A file as a copy has it: with these changes, and without what labs ask for. Lines keep their numbers."""
    return unseen(edited(edits).get(str(file)) or read(ROOT / file), Path(file).as_posix())[0]


def copy_project(folder: Path, step: int, edits: tuple[Edit, ...] = (), extra: tuple[str, ...] = ()) -> Path:
    """Copy what trains the steps up to this one into `folder`, with these changes. Returns the folder."""
    called, texts = {}, edited(edits)
    for file in files(step, extra):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        text, runs = unseen(texts.get(str(file)) or read(ROOT / file), file.as_posix())
        called |= runs
        if runs or str(file) in texts:
            (folder / file).write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(ROOT / file, folder / file)
    entries = {key: base64.b64encode(zlib.compress(code.encode())).decode() for key, code in called.items()}
    lines = "".join(f'    "{key}": "{code}",\n' for key, code in entries.items())
    (folder / HIDDEN).write_text(MODULE.format(lines), encoding="utf-8")
    return folder


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
