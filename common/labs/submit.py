"""`python -m common.labs submit`: one file with what a student has done; and how such a file is read.

A submission is a ZIP archive. `submission.json` says who, which labs and variants, what was predicted first, which
hints were read. Of each lab it holds the files that differ from what `start` has made, below the lab's name. What it
says of scores is for comparison alone: `grade` checks everything again.
"""

import functools
import hashlib
import io
import json
import stat
import subprocess
import tempfile
import zipfile
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.errors import UsageError
from common.labs import find
from common.labs.find import ROOT
from common.labs.lab import Lab
from common.labs.state import MOST, State
from common.labs.whole_files import replace

KINDS = (".py", ".toml", ".csv")  # of files that a student writes
LARGEST = 1 << 20  # bytes of a file
WHOLE = 16 << 20  # bytes of all of them
FILES = 1000
KNOWN = ("student", "hints", "checks", "score", "gave_up", "first")  # of `Progress`, that a submission says


class Submission(NamedTuple):
    """What one file has brought. Nothing in it is to be trusted."""

    source: Path
    about: dict  # submission.json, with fields of the right types only
    files: dict[str, dict[str, bytes]]  # by lab, then by path in its folder; a lab that was only started has none
    left_out: tuple[str, ...]  # what was in the file and is not taken, and why


class Unreadable(Exception):
    """It is no submission; the text says why."""


# ---- written by the student ------------------------------------------------------------------------------------------


def submit(state: State, only: str | None = None) -> tuple[Path, list[str]]:
    """Write the file, of all labs that were started or of one. Returns its path, and labs changed since their check."""
    labs = [lab for lab in find.all_labs().values() if lab.id in state.labs and only in (None, lab.id)]
    if not labs:
        raise UsageError(f"{only or 'no lab'} has {'not ' if only else ''}been started: there is nothing to submit")
    about = {"format": 1, "student": state.student, "name": state.name, "commit": commit()}
    about |= {"made": datetime.now(timezone.utc).isoformat(timespec="seconds"), "labs": {}}
    path, contents, changed = state.home / f"submission-{state.student}.zip", {}, []
    for lab in labs:
        progress, folder = state.labs[lab.id], state.folder(lab)
        files = changed_files(lab, folder, progress.student)
        about["labs"][lab.id] = {name: getattr(progress, name) for name in KNOWN} | {"files": sorted(files)}
        contents |= {f"{lab.id}/{name}": content for name, content in sorted(files.items())}
        if files and progress.files != fingerprint(folder):
            changed.append(lab.id)
    contents["submission.json"] = (json.dumps(about, indent=2) + "\n").encode()
    if len(contents) > FILES or sum(map(len, contents.values())) > WHOLE:
        raise UsageError(f"these are {len(contents):,} files; nobody reads more than {FILES:,}, or {WHOLE:,} bytes")
    replace(path, lambda part: _pack(part, contents))
    return path, changed


def _pack(path: Path, contents: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def changed_files(lab: Lab, folder: Path, student: int) -> dict[str, bytes]:
    """By path: files that a student has written or changed. Raises UsageError for one that `grade` would not read."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="submit-") as made:
        lab.start(Path(made), student)
        for path in _files(folder):
            name = path.relative_to(folder)
            if path.stat().st_size > LARGEST:
                raise UsageError(f"{path} has more than {LARGEST:,} bytes; what a lab asks for is much smaller")
            content, first = path.read_bytes(), Path(made) / name
            if not first.is_file() or first.read_bytes() != content:
                if not wanted(f"{lab.id}/{name.as_posix()}"):
                    raise UsageError(f"{str(path)!a}: nobody reads a file of such a name; rename or remove it")
                found[name.as_posix()] = content
    return found


def fingerprint(folder: Path) -> str:
    """Of what a lab's files hold."""
    found = hashlib.sha256()
    for path in _files(folder):
        found.update(f"{path.relative_to(folder)}\0".encode(errors="surrogateescape"))
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """Those of the kinds that a student writes, without what trainings have written."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in KINDS and path.is_file()]
    return [path for path in found if not path.is_symlink() and "runs" not in path.relative_to(folder).parts]


@functools.cache
def commit() -> str:
    """Of the project, with a + if files were changed since; "unknown" if this is no git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- read by whoever grades ------------------------------------------------------------------------------------------


def read_submission(path: Path) -> Submission:
    """Read a ZIP archive, or a folder into which somebody has unpacked one. Nothing is written to the disk.

    Raises Unreadable.
    """
    if path.is_dir():
        names = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if each.is_file()}
        raw = {name: _start_of(each) for name, each in names.items() if not each.is_symlink() and wanted(name)}
        left_out = [f"{name}: no file of a lab" for name in sorted(names.keys() - raw.keys())]
    else:
        raw, left_out = _unpack(path)
    large = [name for name, content in raw.items() if len(content) > LARGEST]
    left_out += [f"{name}: more than {LARGEST:,} bytes" for name in large]
    if "submission.json" not in raw or "submission.json" in large:
        raise Unreadable("it has no submission.json, so `submit` has not made it")
    about, files = _about(raw.pop("submission.json")), {}
    for name, content in raw.items():
        lab, _, rest = name.partition("/")
        if name not in large:
            files.setdefault(lab, {})[rest] = content
    return Submission(path, about, files, tuple(left_out[:20]))


def wanted(name: str) -> bool:
    """Whether a path in a submission is one that `submit` writes: no path that leaves the folder of its lab."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name
    in_lab = len(path.parts) > 1 and path.parts[0] in find.all_labs() and path.suffix in KINDS
    return inside and name.isprintable() and path.as_posix() == name and (name == "submission.json" or in_lab)


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST + 1)


def _unpack(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The wanted files of an archive, in memory, whatever its headers say of their sizes; and what was left out."""
    raw, left_out, size = {}, [], 0
    try:
        with path.open("rb") as file:
            content = file.read(WHOLE + 1)
        if len(content) > WHOLE:
            raise Unreadable(f"it has more than {WHOLE:,} bytes")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if len(members) > FILES:
                raise Unreadable(f"it has {len(members):,} files; {FILES:,} are enough")
            for each in members:
                if each.is_dir():
                    continue
                if not wanted(each.filename) or stat.S_ISLNK(each.external_attr >> 16) or each.filename in raw:
                    left_out.append(f"{each.filename[:100]!r}: no file of a lab")
                    continue
                reader = archive.open  # of bytes: it has no encoding
                with reader(each) as file:
                    raw[each.filename] = file.read(LARGEST + 1)
                size += len(raw[each.filename])
                if size > WHOLE:
                    raise Unreadable(f"unpacked, it has more than {WHOLE:,} bytes")
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise Unreadable(f"it is no ZIP archive that can be read ({str(error) or type(error).__name__})") from None
    except Exception as error:  # of a decompressor: zlib.error, lzma.LZMAError
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"it is a damaged ZIP archive ({error})") from None
    return raw, left_out


def printable(text: str) -> str:
    """Without characters that a terminal takes for commands, or that turn a line around."""
    return "".join(each for each in text if each.isprintable())


def _about(content: bytes) -> dict:
    """The fields of submission.json that have the right type. Raises Unreadable if it names no student."""
    try:
        found = json.loads(content.decode("utf-8-sig"))
        student, labs = found["student"], found.get("labs")
        if type(student) is not int or not 0 <= student < MOST:
            raise ValueError(f"student is {student!r:.40}")
        result = {"student": student, "labs": {}}
        for name in ("name", "commit", "made"):
            value = found.get(name)
            result[name] = printable(" ".join(value.split()))[:80] if isinstance(value, str) else ""
        for id, each in labs.items() if isinstance(labs, dict) else ():
            if id in find.all_labs() and isinstance(each, dict):
                result["labs"][id] = _about_lab(each, student)
        return result
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"its submission.json is damaged ({error})") from None


def _about_lab(found: dict, student: int) -> dict:
    """What a submission says of a lab, with what is usual in place of what cannot be."""
    result = {}
    for name, usual in (("student", student), ("hints", 0), ("checks", 0), ("score", 0.0)):
        value = found.get(name)
        right = type(value) in (int, float) if name == "score" else type(value) is int
        result[name] = value if right and 0 <= value < MOST else usual
    result["gave_up"] = found.get("gave_up") is True
    first = found.get("first")
    result["first"] = (
        {str(key)[:40]: str(value)[:40] for key, value in first.items()} if isinstance(first, dict) else {}
    )
    return result
