"""A corpus as token ids: the first process that needs them makes them, and all others map the same file."""

import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from common.errors import UsageError
from common.launching.command_line import at_home
from step01_single_gpu.data.text_sources import WINDOW, Source, files_digest, find_source, load_tokenizer


class Corpus(NamedTuple):
    """A text as token ids.

    name: what --data said.
    tokens: one-dimensional, uint16 or uint32, usually a read-only memory map.
    sha256: of its documents in UTF-8, one after the other: for a single text file, what `sha256sum` prints.
    vocab: number of ids that the tokenizer can give; every token is below it.
    end: the id that ends a document, None if the tokenizer has none.
    tokens_sha256: of the ids as little-endian uint32. Runs whose ids are equal see the same data, whatever made them.
    window: of a source that a longer run reads further, so many tokens are shuffled at a time, and both hashes are of
        the first so many: so neither depends on how far it was read. None if the source was read to its end.
    """

    name: str
    tokens: np.ndarray
    sha256: str
    vocab: int
    end: int | None
    tokens_sha256: str = ""
    window: int | None = None


def load_corpus(data: str | None, tokenizer: str | None, needed_tokens: int) -> Corpus:
    """Return the tokens of `data` (see `find_source`) under `tokenizer` (see `load_tokenizer`), from the cache.

    While one process makes them, others wait for its lock, and start again if it dies. Raises UsageError for bad input.
    """
    if data == "synthetic":
        return synthetic(needed_tokens)
    source, path = find_source(data, needed_tokens), Path(tokenizer or "")
    files = [each for each in (path, *sorted(path.rglob("*"))) if each.is_file()] if tokenizer else []  # if it is local
    made_from = f"3 {source.digest} {tokenizer} {files_digest(files)}"  # 3: this version of what is kept
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{source.name[-60:]}-{(tokenizer or 'bytes')[-60:]}")
    try:
        folder = Path(at_home(os.environ.get("ULTRASCALE_CACHE") or "~/.cache/ultra-scale"))
    except UsageError as error:
        raise UsageError(f"cannot keep tokens: {error}; ULTRASCALE_CACHE names another folder") from None
    stem = f"{folder}/{readable}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if found := _open(stem):
            return found
        with FileLock(f"{stem}.lock"):
            return _open(stem) or _make(stem, source, tokenizer)  # another process may have made it meanwhile
    except OSError as error:
        raise UsageError(f"cannot keep tokens in {folder} ({error}); ULTRASCALE_CACHE names another folder") from None


def _open(stem: str) -> Corpus | None:
    """The corpus in STEM.npy and STEM.json; None if it is missing or damaged."""
    try:
        facts = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
        return Corpus(tokens=np.load(f"{stem}.npy", mmap_mode="r"), **facts)
    except (FileNotFoundError, ValueError, EOFError, TypeError):
        return None


def _make(stem: str, source: Source, tokenizer: str | None) -> Corpus:
    """Tokenise; the caller holds the lock. STEM.npy appears last and in one piece, by a rename."""
    if os.path.exists(f"{stem}.npy"):
        print(f"{stem}.npy is damaged: building it again", file=sys.stderr)
        os.unlink(f"{stem}.npy")
    vocab, end, encode = load_tokenizer(tokenizer)
    dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
    ends = np.array([] if end is None else [end], dtype)
    documents = iter(tqdm(filter(None, source.documents()), "tokenising", disable=not sys.stderr.isatty()))
    sha256, parts, count, window = hashlib.sha256(), [], 0, WINDOW if source.limit < math.inf else None
    while count < source.limit and (batch := list(itertools.islice(documents, 32))):
        for text, ids in zip(batch, encode(batch)):  # Hugging Face tokenizers work on a batch in parallel
            if not window or count < window:
                sha256.update(text.encode())
            parts += [np.asarray(ids, dtype), ends]
            count += len(ids) + len(ends)
    if not count:
        raise UsageError(f"--data {source.name} holds no text")
    tokens = np.concatenate(parts)
    facts = {"name": source.name, "sha256": sha256.hexdigest(), "vocab": vocab, "end": end}
    facts |= {"tokens_sha256": _digest(tokens[:window]), "window": window}
    Path(f"{stem}.json").write_text(json.dumps(facts), encoding="utf-8")
    np.save(f"{stem}.tmp.npy", tokens)
    os.replace(f"{stem}.tmp.npy", f"{stem}.npy")
    return _open(stem)


def _digest(tokens: np.ndarray) -> str:
    """SHA-256 of token ids, whichever type holds them."""
    digest = hashlib.sha256()
    for first in range(0, len(tokens), 1 << 22):
        digest.update(tokens[first : first + (1 << 22)].astype("<u4"))
    return digest.hexdigest()


def synthetic(needed_tokens: int, document: int = 96) -> Corpus:
    """Return generated tokens, 256 ids, equal on every machine: at least as many as needed, up to 100 million.

    More of them begin with the same ones.

    Each document (of a length that is not a power of two, so that documents do not line up with samples) is a Markov
    chain that ends with id 0. An id has four possible successors, with probabilities 1/2, 1/4, 1/8 and 1/8. Low ids
    are more frequent than high ones: a model first learns the frequencies and then, for longer, the transitions.
    """
    windows = min(-(-needed_tokens // WINDOW), 64)
    return _synthetic(1 << (windows - 1).bit_length(), WINDOW // document, document)


@functools.lru_cache(maxsize=1)  # a process that runs several trainings, as tests and experiments do, generates it once
def _synthetic(windows: int, documents: int, document: int) -> Corpus:
    random = np.random.RandomState(0)
    low = random.randint(256, size=(256, 4)) * random.randint(256, size=(256, 4)) >> 8  # products are often low
    successors = np.maximum(low, 1)[:, [0, 0, 0, 0, 1, 1, 2, 3]]
    tokens = np.zeros((windows, documents, document), np.uint16)
    for number, window in enumerate(tokens):
        random = np.random.RandomState(number) if number else random
        for place in range(document - 1):
            window[:, place] = successors[window[:, place - 1], random.randint(8, size=documents)]
    sha256, first = hashlib.sha256(tokens[0].astype("<u2")).hexdigest(), tokens[0].reshape(-1)
    return Corpus("synthetic", tokens.reshape(-1), sha256, 256, 0, _digest(first), len(first))
