"""Files and folders that are there as a whole or not at all, after Ctrl-C, on a full disk, or if two write at once."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, and move it there. If anything fails, `path` is as it was.

    Raises what `write` raises, and OSError.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def folder_beside(folder: Path, fill: Callable[[Path], object]) -> Path:
    """Let `fill` write into a new folder beside the place of `folder`, and return it. If anything fails, it is gone.

    Raises what `fill` raises, and OSError.
    """
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        fill(part)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(part, ignore_errors=True)
        raise
    return part


def put_folder(part: Path, folder: Path) -> None:
    """Move a folder to its place, unless another command was faster. Raises OSError if the place is none."""
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if not folder.is_dir():
            raise
