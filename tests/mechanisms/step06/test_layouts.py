"""Which rank holds which tokens, and that all blocks together are the attention of the whole sequence: pure data."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.config import CP_SPLITS
from step06_context_parallel import cost
from step06_context_parallel.context_parallel import take_part
from step06_context_parallel.layouts import Layout, cut_into_blocks, visible_keys
from tests.harness.observing import configure

SPLITS_AND_RANKS = list(itertools.product(CP_SPLITS, range(1, 7)))


def visible(queries: np.ndarray, keys: np.ndarray, starts: tuple[int, ...], causal: bool) -> np.ndarray:
    """Which query may see which key, pair by pair."""
    number = {position: sum(start <= position for start in starts) for position in (*queries, *keys)}  # of the document
    pairs = [[number[q] == number[k] and (k <= q or not causal) for k in keys] for q in queries]
    return np.array(pairs, bool).reshape(len(queries), len(keys))


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
        assert layout.plan(0) is Layout(*layout).plan(0), "every layer asks for the same plan, which is made once"


def test_any_queries_and_keys():
    """The positions may be any that increase."""
    random = np.random.RandomState(0)
    for _ in range(300):
        queries, keys = (np.sort(random.permutation(12)[: random.randint(1, 12)]) for _ in range(2))
        starts, causal = some_documents(random, 12), bool(random.randint(2))
        expected = visible(queries, keys, starts, causal)
        found = covered(cut_into_blocks(*visible_keys(queries, keys, starts, causal)), *expected.shape)
        assert np.array_equal(found, expected), (queries, keys, starts, causal)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_one_block_for_each_pair_of_ranks(ranks):
    """Where no documents are masked. None for keys that are all in the future, as they are under a contiguous split.
    The pairs that each rank computes in each hop of the ring are those of the formula.
    """
    for split, causal in itertools.product(CP_SPLITS, (True, False)):
        layout = Layout(split, 4 * ranks, ranks, causal=causal)
        for rank in range(ranks):
            plan = layout.plan(rank)
            last = rank if split == "contiguous" and causal else ranks - 1
            assert [len(blocks) for blocks in plan.blocks] == [1] * (last + 1) + [0] * (ranks - 1 - last), layout
            diagonal = range(ranks) if split == "striped" else [rank]
            assert [s for s in range(last + 1) if plan.blocks[s][0].causal] == list(diagonal if causal else []), layout
            reach = tuple(reversed(range(ranks))) if split == "contiguous" and causal else (ranks - 1,) * ranks
            assert plan.reach == reach, layout
            if causal:
                by_hop = [sum(block.pairs for block in plan.blocks[(rank - hop) % ranks]) for hop in range(ranks)]
                assert cost.all_pairs(split, 4 * ranks, ranks)[rank] == by_hop, layout


# ---- what a rank reads -----------------------------------------------------------------------------------------------


def part_of(tokens: torch.Tensor, flags: str, rank: int, ranks: int) -> tuple:
    """What `take_part` gives to a rank; the target of every token is the one that follows it."""
    config = configure(6, f"--seq-len {tokens.shape[1] - 1} --cp {ranks} --device cpu {flags}", ranks)
    mesh = SimpleNamespace(cp=SimpleNamespace(size=ranks, rank=rank), device=torch.device("cpu"))
    return take_part(tokens[:, :-1], tokens[:, 1:], config, mesh, end=0)


@pytest.mark.parametrize("split, ranks", SPLITS_AND_RANKS)
def test_every_token_keeps_its_label_and_its_position(split, ranks):
    """The label of the last token of a part is on another rank, or at the other end of this one."""
    whole = torch.arange(2 * (12 * ranks + 1)).view(2, -1)
    parts = [part_of(whole, f"--cp-split {split}", rank, ranks) for rank in range(ranks)]
    for tokens, targets, positions in parts:
        assert torch.equal(targets, tokens + 1) and torch.equal(tokens, whole[:, positions])
    assert sorted(torch.cat([positions for *_, positions in parts]).tolist()) == list(range(12 * ranks))


def test_documents_begin_after_the_end_of_another():
    """The first one begins at 0. What ends with the sequence has no follower in it; two ends in a row are a document of
    one token. All ranks know the documents of the whole sequence.
    """
    rows = [[5, 0, 0, 7, 8, 0, 9, 9, 1], [1, 2, 3, 4, 5, 6, 7, 0, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0]]
    for rank in range(2):
        *_, documents = part_of(torch.tensor(rows), "--mask-documents", rank, 2)
        assert documents == ((0, 2, 3, 6), (0,), (0, 1))
