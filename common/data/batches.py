"""Corpus -> tokens -> the global batch of a step, as a pure function of (seed, step).

Nothing here has state that a checkpoint would have to keep: resuming at step k needs only k. Sample i of a
corpus covers tokens [i * seq_len, i * seq_len + seq_len + 1): `seq_len` inputs and, shifted by one, `seq_len`
targets.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from common.config import TrainConfig
from common.data.text_sources import PIECE, Pieces, Source, find_source, load_tokenizer, tokenizer_label
from common.data.token_cache import TokenCache
from common.errors import UsageError
from common.process_groups import environment


@dataclass
class Corpus:
    """A text as token ids.

    Attributes:
        tokens: one-dimensional, uint16 or uint32, usually a read-only memory map.
        sha256: of the source text: its documents in UTF-8, with a zero byte between two of them. So for one text
            file it is what `sha256sum FILE` prints.
        vocab: number of ids the tokenizer can give; every token is below it.
        name: what `--data` said, for people.
        eos: the id that ends every document, None where the tokenizer has none.
    """

    tokens: np.ndarray
    sha256: str
    vocab: int
    name: str
    eos: int | None = None


def load_corpus(
    data: str | None,
    tokenizer: str | None,
    needed_tokens: int,
    cache_dir: Path | None = None,
    writer: bool = True,
) -> Corpus:
    """Tokens of `data` (`corpus.find_source`) under `tokenizer` (`corpus.load_tokenizer`), from the cache.

    Call it on all ranks, with `writer` true on one rank of every machine. It uses no collectives.

    Args:
        data: None or "stdlib", "synthetic", a local path or a Hub dataset.
        tokenizer: None for bytes, else a Hugging Face name or path.
        needed_tokens: how many tokens the run reads in all; decides only how much of a Hub dataset is streamed and
            how long the synthetic stream is. Everything else is read whole, and read again in the next epoch.
        cache_dir: default $ULTRASCALE_CACHE, else ~/.cache/ultra-scale.
        writer: make the cache where it is missing or damaged; otherwise wait for the writer to do so.

    Raises:
        UsageError: bad input, the same on every rank.
        TimeoutError: the writer is gone.
    """
    if data == "synthetic":
        if tokenizer is not None:
            raise UsageError(f"--tokenizer {tokenizer} has nothing to do: --data synthetic is made of ids, not of text")
        return synthetic(needed_tokens)
    source, label = find_source(data, needed_tokens), tokenizer_label(tokenizer)
    folder = Path(cache_dir or os.environ.get("ULTRASCALE_CACHE") or "~/.cache/ultra-scale").expanduser()
    short = re.sub(r"[^A-Za-z0-9_.-]+", "-", label)[-60:]
    made_from = {"kind": source.kind, "source": source.digest, "tokenizer": label}
    cache = TokenCache(folder, f"{source.kind}-{source.digest[:16]}-{short}", made_from)
    tokens, header = cache.build(lambda file: _tokenise(source, tokenizer, file)) if writer else cache.wait()
    return Corpus(tokens, header["sha256"], header["vocab"], source.name, header["eos"])


def _tokenise(source: Source, tokenizer_name: str | None, file: BinaryIO) -> dict:
    """Write the ids of `source` to `file`; return the facts about them that the cache keeps in its header."""
    from tqdm import tqdm

    tokenizer = load_tokenizer(tokenizer_name)
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32)
    end = np.array([] if tokenizer.eos is None else [tokenizer.eos], dtype)
    encoded = (
        (text, last, np.asarray(ids))
        for batch in _batches(source.pieces())
        for (text, last), ids in zip(batch, tokenizer.encode([text for text, _ in batch]))
    )
    digest, count, between = hashlib.sha256(), 0, b""
    options = {"unit": "B", "unit_scale": True, "disable": not sys.stderr.isatty()}
    with tqdm(desc=f"tokenising {source.name}", total=source.size, **options) as bar:
        for text, last, ids in encoded:
            largest = ids.max(initial=0)
            if largest >= tokenizer.vocab:
                raise UsageError(f"--tokenizer {tokenizer_name} has {tokenizer.vocab} ids but gave {largest}")
            file.write(ids.astype(dtype))
            count += len(ids)
            if last:
                file.write(end)
                count += len(end)
            raw = text.encode()
            digest.update(between + raw)
            between = b"\0" if last else b""
            bar.update(len(raw))
            if last and source.limit and count >= source.limit:
                break
    if not count:
        raise UsageError(f"--data {source.name} holds no text")
    facts = {"sha256": digest.hexdigest(), "vocab": tokenizer.vocab, "eos": tokenizer.eos}
    return {**facts, "dtype": dtype.name, "count": count}


def _batches(pieces: Pieces) -> Iterator[list[tuple[str, bool]]]:
    """Pieces in lists of about `PIECE` characters, which a Hugging Face tokenizer works on in parallel."""
    batch, characters = [], 0
    for text, last in pieces:
        if text:  # a document without text has nothing to teach
            batch.append((text, last))
            characters += len(text)
        if characters >= PIECE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class Batches:
    """The order in which a run sees the samples of a corpus: a pure function of (seed, step).

    Step k takes positions k*B ... k*B+B-1 (B = `global_batch`) of an endless sequence in which every stretch
    of `samples` positions, an epoch, is a permutation of all samples of its own. A batch may reach into the
    next epoch. Tokens after the last whole sample are never read.

    Raises:
        UsageError: the corpus holds fewer samples than one global batch.
    """

    def __init__(self, corpus: Corpus, seq_len: int, global_batch: int, seed: int):
        self.corpus, self.seq_len, self.global_batch, self.seed = corpus, seq_len, global_batch, seed
        self.samples = max(0, (len(corpus.tokens) - 1) // seq_len)
        if self.samples < global_batch:
            raise UsageError(
                f"--data {corpus.name}: corpus too small for the batch: {len(corpus.tokens):,} tokens make "
                f"{self.samples:,} samples of --seq-len {seq_len} (plus one token), but --global-batch "
                f"{global_batch} needs {global_batch:,} samples: {global_batch * seq_len + 1:,} tokens"
            )

    @property
    def target_tokens(self) -> int:
        """Target tokens of a global batch: by this a rank divides its summed loss, its share of the mean."""
        return self.global_batch * self.seq_len

    def sample_ids(self, step: int) -> np.ndarray:
        """Samples of the global batch of `step`: int64 (global_batch,)."""
        return self._ids(step * self.global_batch, self.global_batch)

    def micro_batch(
        self,
        step: int,
        index: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of micro-batch `index` on rank `dp_rank`: int64, both (micro_batch, seq_len).

        These are rows (index * dp_size + dp_rank) * micro_batch and following of the global batch, so that
        the union over ranks and micro-batches is the same in every layout. Raises ValueError for rows outside
        the global batch.
        """
        first = (index * dp_size + dp_rank) * micro_batch
        if not (0 <= dp_rank < dp_size and 0 <= first <= self.global_batch - micro_batch):
            raise ValueError(
                f"micro-batch {index} of {micro_batch} rows on dp rank {dp_rank} of {dp_size} lies outside "
                f"the {self.global_batch} rows of the global batch"
            )
        corpus = self.corpus
        starts = self._ids(step * self.global_batch + first, micro_batch) * self.seq_len
        rows = np.stack([corpus.tokens[start : start + self.seq_len + 1] for start in starts.tolist()])
        if rows.max() >= corpus.vocab:  # would be an obscure failure of the embedding, or none at all
            raise ValueError(f"corpus {corpus.name} holds token {rows.max()} of a vocabulary of {corpus.vocab}")
        device = torch.device(device)
        tensors = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (rows[:, :-1], rows[:, 1:]))
        if device.type == "cuda":
            tensors = (tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
        tokens, targets = tensors
        return tokens, targets

    def _ids(self, first: int, count: int) -> np.ndarray:
        """Samples at `count` positions of the endless sequence from `first` on."""
        epoch, place = np.divmod(np.arange(first, first + count, dtype=np.uint64), np.uint64(self.samples))
        keys = _hash(epoch + _hash(np.array([self.seed % 2**64], np.uint64)))
        return permute(place, self.samples, keys).astype(np.int64)


def load_batches(config: TrainConfig, cache_dir: Path | None = None) -> Batches:
    """The batches that `config` asks for; the first rank of each machine writes a missing cache.

    Raises UsageError for a corpus that is too small, or has more token ids than the model's vocabulary.
    """
    needed = config.steps * config.global_batch * config.seq_len + 1
    corpus = load_corpus(config.data, config.tokenizer, needed, cache_dir, writer=environment()[2] == 0)
    if corpus.vocab > config.model_config.vocab:
        raise UsageError(f"--vocab {config.model_config.vocab} is less than the {corpus.vocab} ids of the tokenizer")
    return Batches(corpus, config.seq_len, config.global_batch, config.seed)


ROUNDS = 8


def permute(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where keyed pseudo-random permutations of range(size) send `places`; `keys` has one each (both uint64).

    No table: time and memory grow with len(places), not with `size`, and any place can be asked for at any
    time. A place of b bits is cut into halves, and in turn each half is XORed with a hash of the other one (a
    Feistel network: every round undoes itself, so all of them together are a permutation of range(2**b),
    whatever the hash). b is the least with 2**b >= size; results outside range(size) are sent through again
    until they fall inside, which follows the permutation's own cycle back into the range and so is a
    permutation of range(size) (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002). A place goes through fewer than two times on average.
    """
    bits = (size - 1).bit_length()
    low = np.uint64((bits + 1) // 2)  # bits of the lower half
    masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << int(low)) - 1)
    result, pending = np.empty_like(places), np.arange(len(places))
    while len(pending):
        upper, lower = places >> low, places & masks[1]
        for number in range(0, ROUNDS, 2):
            upper ^= _hash(lower ^ _hash(keys + np.uint64(number))) & masks[0]
            lower ^= _hash(upper ^ _hash(keys + np.uint64(number + 1))) & masks[1]
        places = upper << low | lower
        inside = places < np.uint64(size)
        result[pending[inside]] = places[inside]
        pending, places, keys = pending[~inside], places[~inside], keys[~inside]
    return result


def _hash(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) of each uint64, after one step of its counter."""
    values = values + np.uint64(0x9E3779B97F4A7C15)  # arrays of uint64 wrap around silently, as wanted
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# ---- a corpus without text ---------------------------------------------------------------------------------

DOCUMENT = 96  # tokens of a synthetic document: no power of two, lest documents line up with samples
SYNTHETIC_LEAST, SYNTHETIC_MOST = 1 << 20, 1 << 27  # tokens


def synthetic(needed_tokens: int) -> Corpus:
    """A generated stream over 256 ids, the same under every numpy and Python: integers only, no generator.

    Each document is a Markov chain that ends with id 0: after token t comes the first, second or third
    favourite of t with probability 1/2, 1/4 and 1/8, else noise. Low ids are favoured, so a model's loss
    falls at once (frequencies) and then goes on falling (transitions). The length is a power of two of at
    least `needed_tokens` (but see `SYNTHETIC_MOST`, after which epochs repeat); a longer stream begins with
    the shorter one.
    """
    length = min(max(SYNTHETIC_LEAST, 1 << (needed_tokens - 1).bit_length()), SYNTHETIC_MOST)
    documents = -(-length // DOCUMENT)
    favourites = _low_byte(_hash(np.arange(256 * 3, dtype=np.uint64))).reshape(256, 3)
    choice = np.array([0, 0, 0, 0, 1, 1, 2, 3])  # which favourite three random bits choose; 3: noise
    tokens = np.zeros((documents, DOCUMENT), np.uint16)
    counter = np.arange(documents, dtype=np.uint64) * np.uint64(DOCUMENT) + np.uint64(1 << 32)
    previous = np.zeros(documents, np.uint16)
    for place in range(DOCUMENT - 1):
        random = _hash(counter + np.uint64(place))
        options = np.column_stack([favourites[previous], _low_byte(random)])  # (documents, 4)
        previous = options[np.arange(documents), choice[random >> np.uint64(61)]]
        tokens[:, place] = previous
    stream = tokens.reshape(-1)[:length]
    return Corpus(stream, hashlib.sha256(stream.astype("<u2")).hexdigest(), 256, "synthetic", eos=0)


def _low_byte(random: np.ndarray) -> np.ndarray:
    """A byte from 1 to 255 that is low more often than high: the product of two uniform ones, scaled."""
    first, second = random & np.uint64(255), random >> np.uint64(8) & np.uint64(255)
    return np.maximum(first * second >> np.uint64(8), np.uint64(1)).astype(np.uint16)
