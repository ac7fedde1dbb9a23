"""Files that are there as a whole or not at all: after Ctrl-C, on a full disk, if two commands write them at once."""

import contextlib
import os
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
