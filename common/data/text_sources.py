"""Where text comes from (CPython's library, local files, a Hub dataset) and what turns it into token ids.

Text flows as pieces `(text, last)`: a document is one or more pieces, `last` marks its end. Files of any size
therefore need the memory of one piece only. A document ends with the tokenizer's end-of-sequence id, where it
has one.
"""

import contextlib
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UsageError
from common.presets import quiet_hub

PIECE = 1 << 20  # characters read at a time; a longer text file is cut after a line end
LIBRARY_LEAST = 4_000_000  # bytes; an install with less standard library than this is a stripped one
HUB_LEAST = 1 << 20  # tokens taken from a streamed dataset at least

Pieces = Iterator[tuple[str, bool]]


@dataclass(frozen=True)
class Source:
    """A text that can be read again and again. `digest` names its content, or where it came from."""

    kind: str  # "stdlib", "torch", "local" or "hub"
    name: str
    digest: str
    pieces: Callable[[], Pieces]
    size: int | None = None  # bytes of text, for the progress bar
    limit: int | None = None  # stop after the document that reaches so many tokens


@dataclass(frozen=True)
class Tokenizer:
    """`encode` turns each of a list of texts into ids below `vocab`, without special tokens."""

    vocab: int
    eos: int | None
    encode: Callable[[list[str]], list]


def find_source(data: str | None, needed_tokens: int) -> Source:
    """The text that `--data` names: None or "stdlib", a local path, else a Hub dataset NAME[:CONFIG[:SPLIT]].

    A Hub dataset is streamed, only as far as `needed_tokens` asks, rounded up to a power of two: a run that
    is resumed with somewhat more steps then still sees the same corpus, and so the same order of samples.

    Raises:
        UsageError: the path does not exist, or holds nothing that can be read.
    """
    if data is None or data == "stdlib":
        return _library()
    if not data.strip():
        raise UsageError("--data is empty")
    path = Path(os.path.expanduser(data))
    if os.path.exists(path):  # unlike Path.exists, False for whatever cannot be a path
        return _local(data, path)
    if _looks_like_path(data, _READERS):
        raise UsageError(f"--data {data} does not exist")
    return _hub(data, needed_tokens)


def load_tokenizer(tokenizer: str | None) -> Tokenizer:
    """None: bytes, with the ids of `transformers.ByT5Tokenizer`; any other value goes to `AutoTokenizer`.

    ByT5's ids: 0 pad, 1 end of document, 2 unknown, byte + 3, 259 to 383 sentinels. Unlike in ByT5Tokenizer,
    text never becomes a control id: a literal `</s>` stays four bytes. Raises UsageError for a tokenizer that
    cannot be loaded.
    """
    if tokenizer is None:
        return Tokenizer(384, 1, lambda texts: [_bytes(text) for text in texts])
    try:
        from transformers import AutoTokenizer

        quiet_hub()
        place = os.path.expanduser(tokenizer)
        place = place if os.path.exists(place) else tokenizer
        loaded = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        vocab = max([len(loaded), *(index + 1 for index in loaded.get_vocab().values())])  # ids may have gaps
    except Exception as error:  # no network, no such name, a damaged file: the flag is what to change
        raise UsageError(f"--tokenizer {tokenizer} cannot be loaded ({_first_line(error)})") from error

    def encode(texts: list[str]) -> list[list[int]]:
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return loaded(texts, add_special_tokens=False, **options)["input_ids"]

    return Tokenizer(vocab, loaded.eos_token_id, encode)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8) + np.uint16(3)


def tokenizer_label(tokenizer: str | None) -> str:
    """What names a tokenizer in the cache, found without importing transformers; a local one by its files."""
    if tokenizer is None:
        return "bytes"
    path = Path(os.path.expanduser(tokenizer))
    if not os.path.exists(path):
        if _looks_like_path(tokenizer, (".json", ".model")):
            raise UsageError(f"--tokenizer {tokenizer} does not exist")
        return tokenizer  # a Hub name is taken at its word
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file() and file.suffix not in _WEIGHTS:
            digest.update(b"%b\0%d\0" % (os.fsencode(file.name), file.stat().st_size) + file.read_bytes())
    return f"{path.name}-{digest.hexdigest()[:16]}"


# A checkpoint's folder holds its tokenizer, and gigabytes that have no part in it.
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp"}


# ---- the default corpus ------------------------------------------------------------------------------------

_SKIPPED_FOLDERS = re.compile(r"tests?|testing|idle_test|site-packages|dist-packages|__pycache__|config-.*")
_SKIPPED_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py")  # written by the build or the distribution


def _library() -> Source:
    """The Python sources of the standard library or, in an install without them, of torch."""
    for kind, root in (("stdlib", _standard_library()), ("torch", _torch())):
        texts = []
        for path in _walk(root, _SKIPPED_FOLDERS, _SKIPPED_FILES):
            if path.suffix == ".py":
                with contextlib.suppress(OSError, UnicodeDecodeError):  # a source may declare another encoding
                    texts.append(path.read_bytes().decode())
        texts = [text for text in texts if text]
        size = sum(map(len, texts))
        if size >= LIBRARY_LEAST:
            digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
            return Source(kind, kind, digest, lambda texts=texts: ((text, True) for text in texts), size)
    raise UsageError("--data: neither Python's nor torch's sources are installed; name a text file or folder")


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _torch() -> Path:
    import torch

    return Path(torch.__file__).parent


def _walk(root: Path, skipped_folders: re.Pattern, skipped_files: re.Pattern) -> list[Path]:
    """The files below `root`, sorted by relative path with '/'."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skipped_folders.fullmatch(name)]
        found += [Path(folder, name) for name in files if not skipped_files.fullmatch(name)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


# ---- local files -------------------------------------------------------------------------------------------


def _local(data: str, path: Path) -> Source:
    """A file, or a folder's files of known suffixes, sorted. Known by path, sizes and times of change."""
    if path.is_dir():
        files = [file for file in _walk(path, _HIDDEN, _HIDDEN) if file.suffix.lower() in _READERS]
        files = [file for file in files if file.is_file()]
        if not files:
            raise UsageError(f"--data {data} holds no file that ends in {_SUFFIXES}")
    elif path.suffix.lower() in _READERS:
        files = [path]
    else:
        raise UsageError(f"--data {data}: cannot read {path.suffix} files, only {_SUFFIXES}")
    digest = hashlib.sha256(os.fsencode(path.resolve()))
    for file in files:
        stat = file.stat()
        digest.update(b"\0%b\0%d\0%d" % (os.fsencode(file.relative_to(path)), stat.st_size, stat.st_mtime_ns))

    def pieces() -> Pieces:
        for file in files:
            where = f"--data {file}"
            try:
                yield from _READERS[file.suffix.lower()](file, where)
            except UnicodeDecodeError:
                raise UsageError(f"{where} is not valid UTF-8 text") from None
            except OSError as error:
                raise UsageError(f"{where} cannot be read ({_first_line(error)})") from None

    plain = all(_READERS[file.suffix.lower()] is _read_text for file in files)
    size = sum(file.stat().st_size for file in files) if plain else None
    return Source("local", data, digest.hexdigest(), pieces, size)


def _read_text(path: Path, where: str) -> Pieces:
    with open(path, encoding="utf-8", newline="") as file:  # newline="": line ends stay as they are
        piece = "".join(file.readlines(PIECE))
        while piece:
            following = "".join(file.readlines(PIECE))
            yield piece, not following
            piece = following


def _read_json_lines(path: Path, where: str) -> Pieces:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UsageError(f"{where}: line {number} is not a JSON object") from None
            yield _text_of(row, where, f"field in line {number}"), True


def _read_parquet(path: Path, where: str) -> Pieces:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise UsageError(f'{where} has no "text" column (but {", ".join(file.schema_arrow.names)})')
            rows = (row for batch in file.iter_batches(1024, columns=["text"]) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield _text_of(row, where, f"in row {number}"), True
    except pyarrow.ArrowException as error:
        raise UsageError(f"{where} is not a readable parquet file ({_first_line(error)})") from None


_READERS = {".txt": _read_text, ".py": _read_text, ".md": _read_text, "": _read_text}
_READERS |= {".jsonl": _read_json_lines, ".json": _read_json_lines, ".parquet": _read_parquet}
_HIDDEN = re.compile(r"\..*")
_SUFFIXES = ", ".join(suffix for suffix in _READERS if suffix) + " or has no suffix"


# ---- the Hub -----------------------------------------------------------------------------------------------


def _hub(data: str, needed_tokens: int) -> Source:
    """A Hub dataset, streamed. Known by its name: a cache made from it stays, whatever changes on the Hub."""
    name, config, split, *rest = *data.split(":"), *[""] * 3
    if any(rest):
        raise UsageError(f"--data {data} is not NAME, NAME:CONFIG or NAME:CONFIG:SPLIT")
    limit = max(HUB_LEAST, 1 << (needed_tokens - 1).bit_length())

    def pieces() -> Pieces:
        number = 0
        try:
            from datasets import load_dataset

            quiet_hub()
            rows = load_dataset(name, config or None, split=split or "train", streaming=True)
            for number, row in enumerate(rows, 1):
                yield _text_of(row, f"--data {data}", f"column in row {number}"), True
        except UsageError:
            raise
        except Exception as error:  # no network, no such name: as for tokenizers
            problem = f"broke off after row {number}" if number else "is no local path and no dataset to be had"
            raise UsageError(f"--data {data} {problem} ({_first_line(error)})") from error

    return Source("hub", data, hashlib.sha256(f"{data}\0{limit}".encode()).hexdigest(), pieces, limit=limit)


def _text_of(row, where: str, place: str) -> str:
    """The "text" of one row. JSON can spell a lone surrogate, which is no Unicode text."""
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UsageError(f'{where}: no "text" {place}')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f'{where}: not valid Unicode in the "text" {place}') from None
    return text


def _looks_like_path(name: str, suffixes) -> bool:
    """True for what cannot be the name of anything on the Hub."""
    suffix = Path(name).suffix.lower()
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or (suffix != "" and suffix in suffixes)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
