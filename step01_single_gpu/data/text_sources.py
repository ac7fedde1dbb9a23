"""Where text comes from (CPython's library, local files, a Hub dataset) and what turns it into token ids."""

import functools
import glob
import hashlib
import itertools
import json
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.errors import UsageError, first_line
from common.presets import hub_errors_in_one_line

LONGEST = 1 << 20  # characters: a longer text file becomes several documents, so that it need not fit into memory
WINDOW = 96 << 14  # tokens (1.6 million): a source that is not read to its end is read and shuffled by so many
LIBRARY_LEAST = 4_000_000  # bytes; a Python with less standard library than this is a stripped one
TEXT = ("", ".txt", ".md", ".py")  # suffixes of files that are one document
ROWS = (".jsonl", ".json", ".parquet")  # files with a document per row
NOT_LIBRARY = r"tests?|testing|idle_test|.*-packages|__pycache__|config-.*|_sysconfigdata.*|sitecustomize\.py"


class Source(NamedTuple):
    """A text that can be read again and again; `digest` changes when the text may have changed."""

    name: str
    digest: str
    documents: Callable[[], Iterator[str]]
    limit: float = math.inf  # tokens after which reading stops


def find_source(data: str | None, needed_tokens: int) -> Source:
    """Return the text that --data names: None or "stdlib", a local path, else a Hub dataset NAME[:CONFIG[:SPLIT]].

    Of a folder all files are read that `TEXT` and `ROWS` know, below it and in the order of their paths, but no hidden
    ones, and no .json file that holds something else than rows with a "text": package.json, say. A line names these.

    A Hub dataset is read only as far as `needed_tokens` asks, rounded up to a power of two of windows, so that somewhat
    longer runs find it in the cache. Raises UsageError when a local path holds no file that can be read.
    """
    if data is None or data == "stdlib":
        return _library()
    path = Path(data)
    if data and os.path.exists(path):  # False also for what cannot be a path
        files = _walk(path, r"\..*") if path.is_dir() else [path]
        files = [file for file in files if file.suffix.lower() in (*TEXT, *ROWS)]
        if not files:
            raise UsageError(f"--data {data} holds no file of a kind that can be read: {' '.join((*TEXT, *ROWS))}")
        return Source(data, files_digest(files), lambda: _read(files, path if path.is_dir() else None))
    name, config, split = [*data.split(":", 2), "", ""][:3]
    options = {"name": config or None, "split": split or "train"}
    limit = WINDOW << ((needed_tokens - 1) // WINDOW).bit_length()
    digest = hashlib.sha256(f"{data} {limit}".encode()).hexdigest()  # what changes on the Hub later is not noticed
    return Source(data, digest, lambda: _rows(f"--data {data} (which is no local path)", name, **options), limit)


def load_tokenizer(name: str | None) -> tuple[int, int | None, Callable[[list[str]], list]]:
    """Return the size of a tokenizer's vocabulary, the id that ends a document, and what encodes a list of texts.

    `name` is a Hugging Face name or path. None means bytes with the ids of ByT5Tokenizer: byte + 3, and 1 for the end.
    Text never becomes a control id: "<|endoftext|>" in a document is encoded as these characters, and does not end it.
    Raises UsageError for a tokenizer that cannot be read.
    """
    if name is None:
        return 384, 1, lambda texts: [np.frombuffer(text.encode(), np.uint8) + np.uint16(3) for text in texts]
    from transformers import AutoTokenizer

    with hub_errors_in_one_line(f"--tokenizer {name}"):
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    options = {"add_special_tokens": False, "split_special_tokens": True}
    options |= {"return_attention_mask": False, "verbose": False}
    vocab = max(len(loaded), *(index + 1 for index in loaded.get_vocab().values()))  # ids may have gaps
    end, unknown = loaded.eos_token_id, loaded.unk_token_id
    control = {*loaded.all_special_ids} - {unknown} | {end}  # in GPT-2's tokenizer they are the same
    instead = [] if unknown in (None, *control) else [unknown]

    def encode(texts: list[str]) -> list:
        encoded = loaded(texts, **options)["input_ids"]
        for ids in encoded:
            if not control.isdisjoint(ids):  # a vocabulary of words, or of pieces as T5's, can hold "</s>" itself
                ids[:] = [each for id in ids for each in (instead if id in control else [id])]
        return encoded

    return vocab, end, encode


def files_digest(files: list[Path]) -> str:
    """A hash of where files are, how large they are and when they were last changed. Their content is not read."""
    folder = functools.cache(Path.resolve)  # slow: once for each folder
    facts = []
    for file in files:
        found = file.stat()
        facts.append((str(folder(file.parent) / file.name), found.st_size, found.st_mtime_ns))
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()


def _library() -> Source:
    """The Python sources of the standard library or, in an installation without them, of torch."""
    for name, root in (("stdlib", Path(sysconfig.get_path("stdlib"))), ("torch", Path(torch.__file__).parent)):
        files = [file for file in _walk(root, NOT_LIBRARY) if file.suffix == ".py"]
        if sum(file.stat().st_size for file in files) >= LIBRARY_LEAST:
            return Source(name, files_digest(files), lambda files=files: _read(files))
    raise UsageError("--data: neither Python's nor torch's sources are installed; name a text file or folder")


def _walk(root: Path, skipped: str) -> list[Path]:
    """The files below `root`, sorted by relative path, without files and folders of `skipped` names."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not re.fullmatch(skipped, name)]
        found += [os.path.join(folder, name) for name in files if not re.fullmatch(skipped, name)]
    return [Path(path) for path in sorted(found) if os.path.isfile(path)]


def _read(files: list[Path], folder: Path | None = None) -> Iterator[str]:
    """The documents of files; of those in a `folder` that was named, not every .json file must hold some."""
    others = []
    for path in files:
        if path.suffix.lower() in ROWS:
            rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_rows(path)
            if folder and path.suffix.lower() == ".json":
                try:
                    rows = itertools.chain([next(rows)], rows)
                except (UsageError, StopIteration):
                    others.append(str(path.relative_to(folder)))
                    continue
            yield from rows
            continue
        try:
            with open(path, encoding="utf-8", newline="") as file:  # newline="": line ends stay as they are
                while document := "".join(file.readlines(LONGEST)):
                    yield document
        except (UnicodeDecodeError, OSError) as error:
            raise UsageError(f"--data {path} is not readable UTF-8 text ({first_line(error)})") from None
    if others:
        names = ", ".join(others[:3] + ["..."] * (len(others) > 3))
        line = f'--data {folder}: without {len(others)} .json files that hold no rows with "text": {names}'
        print(line, file=sys.stderr)


def _parquet_rows(path: Path) -> Iterator[str]:
    """The documents of a parquet file. It may have none, on which `datasets` fails."""
    from pyarrow import parquet

    with hub_errors_in_one_line(f"--data {path}"):
        empty = parquet.read_metadata(path).num_rows == 0
    if not empty:  # escaped: `datasets` takes the path for a pattern, and part[1].parquet would be part1.parquet
        yield from _rows(f"--data {path}", "parquet", data_files=glob.escape(str(path)), split="train")


def _json_rows(path: Path) -> Iterator[str]:
    """The documents of a file with a JSON object on each line, or with one list of objects.

    Not by `datasets`, which wants a type for every field of the rows and gives up where a later row has another one.
    """
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            first = next((line.lstrip() for line in file if not line.isspace()), "")
            file.seek(0)
            rows = json.load(file) if first.startswith("[") else (line for line in file if not line.isspace())
            for row in rows:
                number += 1
                row = row if first.startswith("[") else json.loads(row)
                if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
                    raise ValueError('there is no "text"')
                if not row["text"].isascii():
                    row["text"].encode()  # an error for half of a surrogate pair, which is no character
                yield row["text"]
    except (ValueError, RecursionError, OSError) as error:
        what = error.msg if number and isinstance(error, json.JSONDecodeError) else first_line(error)
        where = f" in row {number}" if number and not isinstance(error, UnicodeDecodeError) else ""
        raise UsageError(f"--data {path} cannot be read ({what}{where})") from None


def _rows(where: str, dataset: str, **options) -> Iterator[str]:
    """The "text" of every row of what `datasets` can stream: parquet or a dataset on the Hub."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the UsageError says what was wrong
    with hub_errors_in_one_line(where):
        for number, row in enumerate(datasets.load_dataset(dataset, streaming=True, **options), 1):
            if not isinstance(row.get("text"), str):
                raise ValueError(f'there is no "text" in row {number}')
            yield row["text"]
