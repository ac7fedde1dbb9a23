"""Which blocks each pair of ranks has, and what a rank reads: pure data."""

import itertools
from types import SimpleNamespace

import torch

from common.config import CP_SPLITS
from step06_context_parallel import cost
from step06_context_parallel.context_parallel import take_part
from step06_context_parallel.layouts import Layout
from tests.harness.observing import configure


def test_one_block_for_each_pair_of_ranks():
    """Where no documents are masked. None for keys that are all in the future, as they are under a contiguous split.
    The pairs that each rank computes in each hop of the ring are those of the formula.
    """
    for split, ranks in itertools.product(CP_SPLITS, range(1, 7)):
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
