"""Which rank holds which tokens of a sequence, and which blocks of attention follow from that. Pure data.

With N ranks, there are three ways to split a sequence:
  contiguous  rank r holds the r-th part. Its queries see all parts before it, so the last rank has the most work
  zigzag      of 2N parts, rank r holds part r and part 2N-1-r: an early one and a late one (Llama 3,
              arXiv:2407.21783, section 3.3.2)
  striped     rank r holds tokens r, r+N, r+2N, ... (Striped Attention, Brandon et al., arXiv:2311.09431)
In all of them, the queries of one rank see an interval of another rank's keys, and the attention between the two ranks
is a few rectangles or triangles. With zigzag it is always a single one. Here are 8 tokens on 2 ranks, where x means
that a query sees a key:

    rank 0 holds 0 1 6 7       keys of rank 0    keys of rank 1
                               0 1 6 7           2 3 4 5
    query 0                    x . . .           . . . .         its own keys: a causal block of 4 rows and 4 columns
          1                    x x . .           . . . .
          6                    x x x .           x x x x         rank 1's keys: a full block, its rows 2 and 3 and all
          7                    x x x x           x x x x         columns
    rank 1 holds 2 3 4 5
    query 2                    x x . .           x . . .         rank 0's keys: a full block of all rows and the columns
          3                    x x . .           x x . .         0 and 1
          4                    x x . .           x x x .
          5                    x x . .           x x x x         its own keys: a causal block

The second half of this file finds the blocks in general. Masks of documents make the intervals shorter, and the blocks
more: at least one per document and sample, and each is a call of the kernel (there is none here for sequences of
variable length).
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SPLITS = ("zigzag", "contiguous", "striped")


class ScoreBlock(NamedTuple):
    """A rectangle of attention: in `samples` of the micro-batch, queries `rows` see keys `columns`.

    They see all of them or, if `causal`, query i of the block sees its keys 0 to i; the block is then a square.
    """

    samples: slice
    rows: slice
    columns: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs in one sample."""
        rows, columns = (each.stop - each.start for each in (self.rows, self.columns))
        return rows * (rows + 1) // 2 if self.causal else rows * columns

    def rows_of(self, x):
        """The block's rows of a tensor of queries (batch, heads, n, ...): a view."""
        return x[self.samples, :, self.rows]

    def columns_of(self, x):
        """The block's columns of a tensor of keys or values (batch, kv_heads, m, d): a view."""
        return x[self.samples, :, self.columns]


class AttentionPlan(NamedTuple):
    """What one rank computes in an attention layer, and how far keys and values travel.

    blocks: blocks[source] are those of this rank's queries and the keys of rank `source`.
    reach: reach[source] is the number of hops, from rank to rank, that the keys of `source` have to travel until every
        rank that needs them has seen them.
    """

    blocks: tuple[list[ScoreBlock], ...]
    reach: tuple[int, ...]


Documents = tuple[tuple[int, ...], ...]  # of each sample of a micro-batch, the positions at which documents begin


class SequenceLayout(NamedTuple):
    """How sequences of `seq_len` tokens are divided among `ranks`, and what their queries may see."""

    split: str
    seq_len: int
    ranks: int
    documents: Documents | None = None  # queries see only their own document
    causal: bool = True

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's tokens in their sequence, in increasing order: (seq_len / ranks,).

        Raises ValueError if there is no such split, or if it would give ranks different numbers of tokens.
        """
        if self.split not in SPLITS:
            raise ValueError(f"split {self.split!r} is none of {', '.join(SPLITS)}")
        parts = 2 * self.ranks if self.split == "zigzag" and self.ranks > 1 else self.ranks
        if self.seq_len % parts:
            raise ValueError(f"{self.split} on {self.ranks} ranks: {parts} parts do not divide {self.seq_len} tokens")
        whole = np.arange(self.seq_len)
        if self.split == "striped":
            return whole[rank :: self.ranks]
        if self.split == "contiguous" or self.ranks == 1:
            return np.split(whole, self.ranks)[rank]
        parts = np.split(whole, 2 * self.ranks)
        return np.concatenate([parts[rank], parts[-1 - rank]])

    @functools.lru_cache(maxsize=64)  # noqa: B019 (all layers of a micro-batch have one plan; a layout is small)
    def plan(self, rank: int) -> AttentionPlan:
        """Return the plan of a rank. Raises ValueError as `positions` does, and for documents in another order."""
        held, ranks = [self.positions(each) for each in range(self.ranks)], range(self.ranks)
        documents = [(0,)] if self.documents is None else self.documents
        if any(starts[:1] != (0,) or list(starts) != sorted(set(starts)) for starts in documents):
            raise ValueError("documents begin at 0, and then at increasing positions of their sequence")

        def seen(of: int, source: int) -> list[tuple[np.ndarray, np.ndarray]]:
            """For each sample: which keys of rank `source` the queries of rank `of` see."""
            return [visible_keys(held[of], held[source], starts, self.causal) for starts in documents]

        def needs(of: int, source: int) -> bool:
            return any((end > first).any() for first, end in seen(of, source))

        blocks = []
        for source in ranks:
            blocks.append([])
            for index, (first, end) in enumerate(seen(rank, source)):
                samples = slice(None) if self.documents is None else slice(index, index + 1)
                blocks[-1] += cut_into_blocks(first, end, samples)
        reach = [max(hop for hop in ranks if needs((source + hop) % self.ranks, source)) for source in ranks]
        return AttentionPlan(tuple(blocks), tuple(reach))


def token_positions(split: str, seq_len: int, ranks: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens in their sequence, in increasing order: (seq_len / ranks,) of int64.

    A rank needs them to take its tokens out of a sequence, and for position embeddings. Raises ValueError as
    `SequenceLayout.positions` does.
    """
    return torch.from_numpy(SequenceLayout(split, seq_len, ranks).positions(rank))


@functools.lru_cache(maxsize=4)  # every layer asks for it, in every micro-batch: it is copied to the device once
def rank_order(split: str, seq_len: int, ranks: int, device: torch.device) -> Tensor:
    """Return the position in the sequence of each token, rank by rank: (seq_len,) of int64. 0 1 6 7 2 3 4 5 above.

    All callers share the tensor.
    """
    return torch.cat([token_positions(split, seq_len, ranks, rank) for rank in range(ranks)]).to(device)


def layout_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: int,
    split: str,
    documents: Documents | None = None,
    causal: bool = True,
    themselves: bool = True,
) -> SequenceLayout:
    """Return the sequence layout that fits q, k and v of one of `ranks`, which holds its own tokens of each sequence.

    They are (batch, heads, seq/ranks, d) and, k and v, (batch, kv_heads, seq/ranks, d), where values may be narrower.
    (If not `themselves`, but latents and rotated keys in their place, these have widths of their own.) Raises
    ValueError if they are not, if kv_heads does not divide heads, if their types differ (as after rotary embeddings
    under autocast), or if there is not one tuple of `documents` for each sample.
    """
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[::2] == k.shape[::2]
    if not fits or themselves and (q.shape[3] != k.shape[3] or v.shape[3] > k.shape[3]):
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise ValueError(
            f"q, k and v must be (batch, heads, n, d) and twice (batch, kv_heads, n, d); they are {shapes}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} heads of keys and values do not divide {q.shape[1]} heads of queries")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one type; they have {q.dtype}, {k.dtype} and {v.dtype}")
    if documents is not None and len(documents) != len(q):
        raise ValueError(f"documents of {len(documents)} samples, where q, k and v have {len(q)}")
    documents = documents and tuple(map(tuple, documents))
    return SequenceLayout(split, q.shape[2] * ranks, ranks, documents, causal)


# ---- the blocks of any split, with any documents ---------------------------------------------------------------------


def visible_keys(
    queries: np.ndarray, keys: np.ndarray, starts: tuple[int, ...] = (0,), causal: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return `first` and `end`, both (queries,): query i sees the keys first[i] to end[i] - 1.

    Both can only grow with i. For example, tokens 4 to 7 see four keys each of tokens 0 to 3 (first 0 0 0 0, end 4 4 4
    4), and of their own 1, 2, 3 and 4 (first 0 0 0 0, end 1 2 3 4).

    Args:
        queries, keys: positions in the sequence, increasing.
        starts: the positions at which documents begin, increasing, the first of them 0. Queries see only their own.
        causal: queries see no key that comes after them.
    """
    bounds = np.append(starts, np.iinfo(np.int64).max)
    document = np.searchsorted(bounds, queries, side="right") - 1  # of each query
    first = np.searchsorted(keys, bounds[document])
    end = np.searchsorted(keys, queries + 1 if causal else bounds[document + 1])
    return first, end


def cut_into_blocks(first: np.ndarray, end: np.ndarray, samples: slice = slice(None)) -> list[ScoreBlock]:
    """Cut what `visible_keys` returns into as few blocks as possible, for these samples of the micro-batch.

    As long as queries see the same keys, they make a full block. As long as each sees one key more than the one before,
    they make a causal block, with a full one to its left. None of the blocks is empty. For example:

        first 0 0 0 0   x x x . .    rows 0 to 2, columns 0 and 1: full
        end   3 4 5 5   x x x x .    rows 0 to 2, columns 2 to 4: causal
                        x x x x x
                        x x x x x    row 3, columns 0 to 4: full

        first 0 0 2 2   x . . .      rows 0 and 1, columns 0 and 1: causal
        end   1 2 3 4   x x . .
                        . . x .      rows 2 and 3, columns 2 and 3: causal (another document)
                        . . x x
    """
    found, row = [], 0
    while (seeing := np.flatnonzero(end[row:] > first[row:])).size:
        row += int(seeing[0])
        growth = np.diff(end[row:])
        step = growth[0] if growth.size and growth[0] == 1 else 0
        changes = np.flatnonzero((growth != step) | (np.diff(first[row:]) != 0))
        stop = row + 1 + int(changes[0] if changes.size else growth.size)  # the first row that does not go on like this
        low, high = int(first[row]), int(end[row])
        if step and stop - row > 1:
            if low < high - 1:
                found.append(ScoreBlock(samples, slice(row, stop), slice(low, high - 1), False))
            found.append(ScoreBlock(samples, slice(row, stop), slice(high - 1, int(end[stop - 1])), True))
        else:
            found.append(ScoreBlock(samples, slice(row, stop), slice(low, high), False))
        row = stop
    return found
