"""Tokens are made once and kept in a memory-mapped file: one process writes it, the others wait for it.

Making them may take minutes, so no collectives are used: the processes meet in the folder only:

    STEM.uint16.tokens    (or uint32) a header of 4096 bytes, then the tokens; STEM holds what made them
    STEM.<random>.tmp     the same file being written; touched every second, as a sign that its writer lives
    STEM.error            why the last writer failed, and in which attempt: waiting ranks fail in the same way
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.errors import UsageError

FORMAT = 1
MAGIC = b"ultra-scale tokens\n"
HEADER = 4096  # bytes before the first token
DTYPES = ("uint16", "uint32")
BEAT = 1.0  # seconds between signs of life of the writer
SILENCE = 60.0  # seconds without one after which waiting ranks give up
SAMPLED = 1 << 30  # bytes of tokens above which the checksum covers evenly spaced blocks only
BLOCK, BLOCKS = 1 << 20, 256


class BadCache(Exception):
    """A file that is no whole and sound cache of what was asked for."""


class TokenCache:
    """The cached tokens of one corpus under one tokenizer.

    Args:
        folder: created where it is missing.
        stem: file name without format version and suffix.
        made_from: everything that decides the tokens; a file made from anything else is not accepted.
    """

    def __init__(self, folder: Path, stem: str, made_from: dict[str, str]):
        self.folder, self.stem = folder, f"{stem}-v{FORMAT}"
        self.made_from = {**made_from, "format": FORMAT}
        self.error_path = folder / f"{stem}.error"
        self._rejected: set[tuple] = set()  # files already found bad, so that a waiting rank reads each one once

    def find(self, report: bool = False) -> tuple[np.memmap, dict] | None:
        """Tokens and header of the cache if it is there and sound; `report` says so of a damaged one."""
        for dtype in DTYPES:
            path = self.folder / f"{self.stem}.{dtype}.tokens"
            try:
                stat = path.stat()
            except OSError:
                continue
            identity = (dtype, stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if identity not in self._rejected:
                try:
                    return _read(path, self.made_from)
                except (BadCache, OSError) as problem:
                    self._rejected.add(identity)
                    if report:
                        print(f"token cache {path} {problem}: building it again", file=sys.stderr)
        return None

    def build(self, fill: Callable[[BinaryIO], dict]) -> tuple[np.memmap, dict]:
        """Find the cache or make it: `fill` writes the tokens and returns their header ("dtype", "count").

        A failure is left for the waiting ranks in STEM.error and raised. A file appears under its final name
        only when it is complete. Several writers do no harm: the first to finish wins.
        """
        found = self.find(report=True)
        if found:
            return found
        self._make_folder()
        temporary = self.folder / f"{self.stem}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            self.error_path.unlink(missing_ok=True)
            with open(temporary, "wb") as file, _signs_of_life(temporary):
                self._remove_leftovers(temporary)
                file.seek(HEADER)
                header = {**fill(file), "made_from": self.made_from}
                file.flush()
                tokens = np.memmap(temporary, header["dtype"], "r", HEADER, (header["count"],))
                header["checksum"] = _checksum(header, tokens)
                file.seek(0)
                file.write((MAGIC + json.dumps(header).encode()).ljust(HEADER - 1) + b"\n")
            found = self.find()
            if not found:
                path = self.folder / f"{self.stem}.{header['dtype']}.tokens"
                os.replace(temporary, path)
                found = _read(path, self.made_from)
            return found
        except OSError as error:
            failure = self._cannot_write(error)
            self._leave_error(failure)
            raise failure from None
        except Exception as error:
            self._leave_error(error)
            raise
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def wait(self, poll: float = 0.05) -> tuple[np.memmap, dict]:
        """The cache, as soon as the writer of this attempt has made it.

        Raises:
            UsageError: the writer failed with this one.
            RuntimeError: the writer failed with another error.
            TimeoutError: for `SILENCE` seconds there was neither a cache nor a sign of a living writer.
        """
        signs, heard = None, time.monotonic()
        while True:
            found = self.find()
            if found:
                return found
            self._make_folder()  # fails here as it does for the writer, who then could leave no error either
            self._raise_error_of_writer()
            # Only changes count, measured by this process's own clock: the file server may have another one.
            now = self._temporary_files()
            if now != signs:
                signs, heard = now, time.monotonic()
            elif time.monotonic() - heard > SILENCE:
                raise TimeoutError(
                    f"waited for the token cache {self.folder / self.stem}, but the rank that makes it "
                    f"has shown no sign of life for {SILENCE:.0f} s"
                )
            time.sleep(poll)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> UsageError:
        return UsageError(
            f"cannot keep tokens in {self.folder} ({error.strerror}); ULTRASCALE_CACHE names another folder"
        )

    def _temporary_files(self) -> dict[Path, int]:
        """When each unfinished file of this cache was last touched, in ns of the file server's clock."""
        times = {}
        for name in glob.glob(f"{glob.escape(str(self.folder / self.stem))}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                times[Path(name)] = os.stat(name).st_mtime_ns
        return times

    def _remove_leftovers(self, own: Path) -> None:
        """Delete what killed writers left."""
        times = self._temporary_files()
        for path, touched in times.items():
            if times[own] - touched > SILENCE * 1e9:
                path.unlink(missing_ok=True)

    def _leave_error(self, error: Exception) -> None:
        usage = isinstance(error, UsageError)
        message = str(error) if usage else f"{type(error).__name__}: {error}"
        content = {"attempt": _attempt(), "time": time.time(), "usage": usage, "message": message}
        temporary = self.error_path.with_name(f"{self.error_path.name}.{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):  # a full disk: waiting ranks then give up after SILENCE
            temporary.write_text(json.dumps(content), encoding="utf-8")
            os.replace(temporary, self.error_path)

    def _raise_error_of_writer(self) -> None:
        try:
            content = json.loads(self.error_path.read_text(encoding="utf-8"))
            ours = content["attempt"] == _attempt() and time.time() - content["time"] < SILENCE
        except (OSError, ValueError, KeyError, TypeError):
            return
        if ours:
            if content["usage"]:
                raise UsageError(content["message"])
            raise RuntimeError(f"the rank that makes the token cache failed: {content['message']}")


def _attempt() -> str:
    """What the ranks of one launch on one machine share, unlike earlier launches: above all, their parent."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    return " ".join([socket.gethostname(), str(os.getppid()), *(os.environ.get(name, "-") for name in names)])


def _read(path: Path, made_from: dict) -> tuple[np.memmap, dict]:
    """Tokens and header of a cache file. Raises BadCache, whose text completes "token cache PATH ..."."""
    with open(path, "rb") as file:
        start = file.read(HEADER)
        size = file.seek(0, os.SEEK_END)
    if not start.startswith(MAGIC):
        raise BadCache("is no token cache")
    try:
        header = json.loads(start[len(MAGIC) :])
        expected = HEADER + header["count"] * np.dtype(header["dtype"]).itemsize
        if header["made_from"] != made_from:
            raise BadCache("was made from something else")
        if size != expected:
            raise BadCache(f"has {size:,} bytes instead of {expected:,}")
        tokens = np.memmap(path, header["dtype"], "r", HEADER, (header["count"],))
        if header["checksum"] != _checksum(header, tokens):
            raise BadCache("does not match its checksum")
    except (ValueError, KeyError, TypeError) as error:
        raise BadCache("has a damaged header") from error
    return tokens, header


def _checksum(header: dict, tokens: np.ndarray) -> str:
    """SHA-256 over header and tokens; of more than a GiB of tokens, over evenly spaced blocks only."""
    facts = {name: value for name, value in header.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    if tokens.nbytes <= SAMPLED:
        digest.update(tokens)
    else:
        raw = tokens.view(np.uint8)
        for start in np.linspace(0, len(raw) - BLOCK, BLOCKS).astype(np.int64).tolist():
            digest.update(raw[start : start + BLOCK])
    return digest.hexdigest()


@contextlib.contextmanager
def _signs_of_life(path: Path):
    """Touch `path` every `BEAT` seconds while the block runs, however long it waits for a network."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="token cache", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
