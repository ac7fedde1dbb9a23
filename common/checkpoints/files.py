"""The files of checkpoints: where they are, which checkpoints are complete, and whether a file was damaged.

    RUN_DIR/checkpoints/step-00000040/
        __0_0.distcp, __1_0.distcp ...  the boxes that each rank wrote
        .metadata                       which box is in which file (a pickle: load only checkpoints that you trust)
        extra.json                      step, loss scale, what makes it the same run
        manifest.json                   size and SHA-256 of all other files, since DCP loads a flipped bit silently

Ranks write into `step-00000040.tmp`. When the manifest is on the disk too, one rename gives the folder its name. So a
folder of that name is complete, whenever a process dies, and the next save removes what is left in `.tmp`. A folder
called `step-00000040.damaged` is a checkpoint that was found damaged; no run looks at it any more.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from common.errors import UsageError

MANIFEST, EXTRA, METADATA = "manifest.json", "extra.json", ".metadata"


class DamagedCheckpoint(UsageError):
    """A file of a checkpoint is not what was written."""


def complete(run_dir: str | Path, after: int = -1) -> list[Path]:
    """The complete checkpoints of a run that were saved after step `after`, newest first."""
    folders = [manifest.parent for manifest in Path(run_dir).glob(f"checkpoints/step-*/{MANIFEST}")]
    steps = {int(folder.name[5:]): folder for folder in folders if folder.name[5:].isdecimal()}  # not step-40.damaged
    return [steps[step] for step in sorted(steps, reverse=True) if step > after]


def candidates(resume: str, run_dir: str | Path) -> list[Path]:
    """The checkpoints that `--resume` allows, best first.

    "auto" allows all complete ones of `run_dir`, which may be none. Anything else is the path of a checkpoint, or of a
    run folder, whose newest one is meant. Raises UsageError when there is none at that path.
    """
    if resume == "auto":
        return complete(run_dir)
    path = Path(resume)
    found = [path] if (path / MANIFEST).is_file() else complete(path)[:1]
    if not found:
        raise UsageError(f"--resume {resume}: there is no complete checkpoint, nor a run folder that holds one")
    return found


def begin(folder: Path, extra: dict) -> Path:
    """Make the temporary folder of a checkpoint, with `extra` in it, and remove what processes that died have left."""
    for leftover in folder.parent.glob("step-*.tmp"):
        shutil.rmtree(leftover)
    temporary = folder.with_suffix(".tmp")
    temporary.mkdir(parents=True)
    _write(temporary / EXTRA, extra)
    return temporary


def describe(temporary: Path, rank: int) -> dict[str, dict]:
    """Size and SHA-256 of the files that this rank has written, by name."""
    mine = [*temporary.glob(f"__{rank}_*"), *([temporary / METADATA, temporary / EXTRA] if rank == 0 else [])]
    return {path.name: _describe(path) for path in mine}


def finish(temporary: Path, written: dict[str, dict], keep: int) -> None:
    """Complete a checkpoint that consists of the files `written`, then remove all but the newest `keep` (0: none)."""
    for name in written:
        if not (temporary / name).is_file():
            raise UsageError(f"rank 0 does not see {name}; all ranks must share the storage of --run-dir")
    _write(temporary / MANIFEST, written)
    _flush(temporary)
    folder = temporary.with_suffix("")
    if folder.exists():  # this step was saved before; the next save removes it
        folder.rename(folder.with_suffix(".old.tmp"))
    temporary.rename(folder)
    _flush(folder.parent)
    for old in complete(folder.parent.parent)[keep:] if keep else []:
        shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)


def set_aside(folder: Path, why: str) -> None:
    """Rename a damaged checkpoint, so that its step can be saved again, and print so."""
    aside = folder.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)  # an older one of the same step
    print(f"{why}; renamed to {folder.rename(aside).name}", file=sys.stderr)


def verify(folder: Path, rank: int, world: int) -> dict[str, str]:
    """Check this rank's share of the files, every `world`-th one, against the manifest, and return a hash of that.

    Raises DamagedCheckpoint, naming a file that is missing, truncated or corrupt; UsageError without a manifest, since
    this rank may look at another storage.
    """
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"rank {rank} sees no {MANIFEST} there; all ranks must share the storage of --run-dir")
    try:
        content = (folder / MANIFEST).read_bytes()
        manifest = json.loads(content)
        if EXTRA not in manifest or METADATA not in manifest:
            raise ValueError
    except (ValueError, TypeError):
        raise DamagedCheckpoint(f"{MANIFEST} is corrupt") from None
    for name in sorted(manifest)[rank::world]:
        try:
            intact = _describe(folder / name) == manifest[name]
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from None
        if not intact:
            raise DamagedCheckpoint(f"{name} is corrupt: its size or SHA-256 is not that of {MANIFEST}")
    return {f"the SHA-256 of its {MANIFEST}": hashlib.sha256(content).hexdigest()}


def _describe(path: Path) -> dict:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while content := file.read(1 << 22):
            digest.update(content)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """Return when a file's content, or the names in a folder, are on the disk.

    Windows does neither for what has been opened to read, and opens no folder at all. There, nothing is awaited.
    """
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
