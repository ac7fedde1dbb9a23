"""The files of checkpoints: where they are, which are complete, whether they are still what was written.

    RUN_DIR/checkpoints/step-00000040/
        __0_0.distcp, __1_0.distcp ...  what each rank wrote
        .metadata                       where each box lies (a pickle: load only checkpoints that you trust)
        extra.json                      step, loss scale, configuration ...
        manifest.json                   size and SHA-256 of all of them

A checkpoint grows in `step-00000040.tmp` and gets its name in one rename, when everything is on the disk. One that
goes away becomes a `.tmp` first. So a folder with a name of its own is complete, whenever a process dies; what is
left in `.tmp` disappears with the next save. `step-00000040.damaged` was found to be so and is nobody's any more.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from common.errors import UsageError

MANIFEST, EXTRA, METADATA = "manifest.json", "extra.json", ".metadata"
PIECE = 1 << 22  # bytes hashed at once
_NAME = re.compile(r"step-(\d{8,})")


# ---- which there are ---------------------------------------------------------------------------------------


def folder_of(run_dir: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """After how many optimizer steps a complete checkpoint was written."""
    return int(_NAME.fullmatch(folder.name)[1])


def complete(run_dir: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [manifest.parent for manifest in Path(run_dir).glob(f"checkpoints/step-*/{MANIFEST}")]
    return sorted((folder for folder in folders if _NAME.fullmatch(folder.name)), key=step_of)


def newest(run_dir: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `run_dir`, or None."""
    return max(complete(run_dir), key=step_of, default=None)


def candidates(resume: str, run_dir: str | Path | None) -> list[Path]:
    """The checkpoints that `--resume` means, best first. "auto": all of `run_dir`, the newest first, or none.

    Anything else is the path of a checkpoint, or of a run folder, which means its newest: that one and no other.
    Raises UsageError when there is none.
    """
    if resume == "auto":
        return complete(run_dir)[::-1] if run_dir is not None else []
    path = Path(resume)
    if not path.is_dir():
        raise UsageError(f"--resume {resume}: there is no such folder")
    found = path if (path / MANIFEST).is_file() else newest(path)
    if found is None:
        raise UsageError(f"--resume {resume}: no complete checkpoint, nor a run folder that holds one")
    return [found]


# ---- how one comes and goes --------------------------------------------------------------------------------


def growing(folder: Path) -> Path:
    """Where a checkpoint lies until it is complete."""
    return folder.with_suffix(".tmp")


def begin(folder: Path, extra: dict) -> None:
    """Make the folder in which a checkpoint grows, and remove what dead runs have left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob("step-*.tmp"):
        shutil.rmtree(leftover)
    growing(folder).mkdir()
    _write(growing(folder) / EXTRA, extra)


def describe(folder: Path, rank: int) -> dict[str, dict]:
    """Size and SHA-256 of the files that this rank has written."""
    mine = list(growing(folder).glob(f"__{rank}_*"))
    if rank == 0:
        mine += [growing(folder) / METADATA, growing(folder) / EXTRA]
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in mine}


def finish(folder: Path, written: dict[str, dict], keep: int = 0) -> None:
    """Complete a checkpoint of which all ranks have `written` their files; then let go of all but the newest `keep`.

    0 keeps all. Raises UsageError when a file is not there.
    """
    for name, file in written.items():
        path = growing(folder) / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise UsageError(f"rank 0 does not see {name}; all ranks must share the storage of --run-dir")
    _write(growing(folder) / MANIFEST, written)
    _flush(growing(folder))
    replaced = folder.with_suffix(".old.tmp")
    if folder.exists():
        folder.rename(replaced)
    growing(folder).rename(folder)
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    others = [each for each in complete(folder.parent.parent)[::-1] if each != folder]
    for old in others[keep - 1 :] if keep else []:
        shutil.rmtree(old.rename(growing(old)), ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that no run takes it for one and its step can be saved again."""
    aside, count = folder.with_suffix(".damaged"), 1
    while aside.exists():
        count += 1
        aside = folder.with_suffix(f".damaged-{count}")
    return folder.rename(aside)


# ---- whether one is what was written -----------------------------------------------------------------------


def verify(folder: Path, rank: int, world: int) -> tuple[str | None, list[str]]:
    """Check a rank's share of the files. Returns the manifest's SHA-256 and a line for each damaged file."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None, [f"{MANIFEST} is missing, so it is no complete checkpoint"]
    except OSError as error:
        return None, [f"{MANIFEST} cannot be read: {error.strerror}"]
    digest = hashlib.sha256(text).hexdigest()
    try:
        content = json.loads(text)
        files = sorted((file["bytes"], name, file["sha256"]) for name, file in content.items())
        if not content.keys() >= {EXTRA, METADATA}:
            raise KeyError
    except (ValueError, TypeError, KeyError, AttributeError):
        return digest, [f"{MANIFEST} is corrupt"]
    lines = [_damage(folder / name, size, sha256) for size, name, sha256 in files[rank::world]]
    return digest, [line for line in lines if line]


def _damage(path: Path, size: int, sha256: str) -> str | None:
    """What is wrong with a file, or None."""
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        if _sha256(path) != sha256:
            return f"{path.name} is corrupt: its SHA-256 is not that of {MANIFEST}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _write(path: Path, content: dict) -> None:
    """Write JSON; it is on the disk when this returns."""
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """The names in `folder` are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
