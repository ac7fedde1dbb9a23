"""Which rank holds which tokens, and that all blocks together are the attention of the whole sequence: pure data."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.config import CP_SPLITS
from step06_context_parallel import cost
from step06_context_parallel.context_parallel import take_part
from step06_context_parallel.layouts import Layout
from tests.harness.observing import configure

SPLITS_AND_RANKS = list(itertools.product(CP_SPLITS, range(1, 7)))


def visible(queries: np.ndarray, keys: np.ndarray, starts: tuple[int, ...], causal: bool) -> np.ndarray:
    """Which query may see which key, pair by pair."""
    document = {position: sum(start <= position for start in starts) for position in (*queries, *keys)}
    return np.array([[document[q] == document[k] and (k <= q or not causal) for k in keys] for q in queries], bool)


def covered(blocks, queries: int, keys: int) -> np.ndarray:
    """How often the blocks compute each pair. A causal block must be a square, and none may be empty."""
    count = np.zeros((queries, keys), int)
    for block in blocks:
        part = count[block.rows, block.columns]
        pairs = np.tri(*part.shape, dtype=int) if block.causal else np.ones(part.shape, int)
        assert part.shape[0] == part.shape[1] or not block.causal, block
        assert pairs.sum() == block.pairs > 0, block
        part += pairs
    return count


def some_documents(random: np.random.RandomState, seq_len: int) -> tuple[int, ...]:
    """None, a few, or as many as there are tokens."""
    count = random.choice([0, 1, 2, seq_len // 3, seq_len - 1])
    return 0, *sorted((1 + random.permutation(seq_len - 1)[:count]).tolist())


@pytest.mark.parametrize("split, ranks", SPLITS_AND_RANKS)
def test_every_visible_pair_is_in_one_block(split, ranks):
    random = np.random.RandomState(ranks)
    for _, causal in itertools.product(range(4), (True, False)):
        seq_len = 2 * ranks * random.randint(1, 5)
        documents = tuple(some_documents(random, seq_len) for _ in range(2))
        layout = Layout(split, seq_len, ranks, documents, causal)
        held = [layout.positions(rank) for rank in range(ranks)]
        assert sorted(np.concatenate(held)) == list(range(seq_len))
        assert all((np.diff(positions) > 0).all() and len(positions) == seq_len // ranks for positions in held)
        needed = np.zeros((ranks, ranks), bool)  # by source and hop
        for rank, source in itertools.product(range(ranks), repeat=2):
            blocks = layout.plan(rank).blocks[source]
            for sample, starts in enumerate(documents):
                expected = visible(held[rank], held[source], starts, causal)
                mine = [block for block in blocks if sample in range(2)[block.samples]]
                case = f"{layout}: queries of rank {rank}, keys of rank {source}, sample {sample}"
                assert np.array_equal(covered(mine, *expected.shape), expected), case
                needed[source, (rank - source) % ranks] |= expected.any()
        furthest = tuple(int(np.flatnonzero(hops)[-1]) for hops in needed)
        assert all(layout.plan(rank).reach == furthest for rank in range(ranks)), layout


def test_one_block_for_each_pair_of_ranks():
    """Where no documents are masked. None for keys that are all in the future, as they are under a contiguous split.
    The pairs that each rank computes in each hop of the ring are those of the formula.
    """
    for split, ranks in SPLITS_AND_RANKS:
        layout = Layout(split, 4 * ranks, ranks)
        for rank in range(ranks):
            blocks, last = layout.plan(rank).blocks, rank if split == "contiguous" else ranks - 1
            assert [len(each) for each in blocks] == [1] * (last + 1) + [0] * (ranks - 1 - last), layout
            causal = [source for source in range(last + 1) if blocks[source][0].causal]
            assert causal == ([*range(ranks)] if split == "striped" else [rank]), layout
            by_hop = [sum(block.pairs for block in blocks[(rank - hop) % ranks]) for hop in range(ranks)]
            assert cost.all_pairs(split, 4 * ranks, ranks)[rank] == by_hop, layout


def test_documents_begin_after_the_end_of_another():
    """The first one begins at 0. What ends with the sequence has no follower in it; two ends in a row are a document of
    one token. All ranks know the documents of the whole sequence.
    """
    rows = [[5, 0, 0, 7, 8, 0, 9, 9, 1], [1, 2, 3, 4, 5, 6, 7, 0, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0]]
    tokens = torch.tensor(rows)
    config = configure(6, "--seq-len 8 --cp 2 --device cpu --mask-documents", 2)
    for rank in range(2):
        mesh = SimpleNamespace(cp=SimpleNamespace(size=2, rank=rank), device=torch.device("cpu"))
        *_, documents = take_part(tokens[:, :-1], tokens[:, 1:], config, mesh, end=0)
        assert documents == ((0, 2, 3, 6), (0,), (0, 1))
