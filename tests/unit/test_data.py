"""Batches as a pure function of (seed, step), and the synthetic corpus."""

import numpy as np
import pytest
import torch

from common.data import batches as data_module
from common.data.batches import Batches, Corpus, load_corpus, permute, synthetic
from common.errors import UsageError

# A recorded run must be repeatable for ever, with any version of numpy and Python.
GOLDEN_FIRST = [404, 729, 623, 343, 661, 703, 586, 465]
GOLDEN_SECOND_EPOCH = [84, 333, 753, 559, 172, 10, 368, 322]
GOLDEN_SYNTHETIC = "57df81019fb20f231dc827a54dea9cfffdcc2a61448c98f15dd79112b727ffba"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100, 1023, 1024, 1025, 10_007])
def test_permutation(size):
    everything = np.arange(size, dtype=np.uint64)
    results = [permute(everything, size, np.full(size, key, np.uint64)).tolist() for key in range(5)]
    assert all(sorted(result) == list(range(size)) for result in results)
    if size > 30:
        assert len({tuple(result) for result in results}) == 5
        assert all(np.corrcoef(result, everything)[0, 1] < 5 / size**0.5 for result in results)


def test_permutation_of_a_size_that_fits_no_memory():
    size = 3 * 10**15 + 7
    places = np.concatenate([np.arange(500), size - 1 - np.arange(500)]).astype(np.uint64)
    results = permute(places, size, np.zeros(1000, np.uint64))
    assert results.max() < size and len(set(results.tolist())) == 1000
    assert abs(results.astype(float).mean() / size - 0.5) < 0.05
    singly = [permute(places[i : i + 1], size, np.zeros(1, np.uint64))[0] for i in (0, 1, 999)]
    assert singly == results[[0, 1, 999]].tolist()


def numbered(samples: int, seq_len: int = 4) -> Corpus:
    """A corpus whose token i is i."""
    return Corpus(np.arange(samples * seq_len + 1, dtype=np.uint32), "", samples * seq_len + 1, "numbered")


@pytest.mark.parametrize(("samples", "global_batch"), [(12, 4), (13, 4), (7, 7), (100, 8), (5, 3)])
def test_epochs_repeat_nothing_and_miss_nothing(samples, global_batch):
    batches = Batches(numbered(samples), 4, global_batch, seed=3)
    ids = np.concatenate([batches.sample_ids(step) for step in range(samples * 3 // global_batch + 1)])
    epochs = [ids[first : first + samples].tolist() for first in range(0, samples * 3, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_depend_on_seed_and_step_alone():
    batches = Batches(numbered(1000), 4, 8, seed=0)
    assert batches.sample_ids(0).dtype == np.int64
    later = [batches.sample_ids(step).tolist() for step in range(200)]
    fresh = Batches(numbered(1000), 4, 8, seed=0)
    assert [fresh.sample_ids(step).tolist() for step in (150, 3, 150)] == [later[150], later[3], later[150]]
    assert Batches(numbered(1000), 4, 8, seed=1).sample_ids(0).tolist() != later[0]
    assert Batches(numbered(1000), 4, 8, seed=2**64 + 1).sample_ids(10**12).max() < 1000
    assert later[0] == GOLDEN_FIRST and later[125] == GOLDEN_SECOND_EPOCH


def test_samples_overlap_by_the_last_target():
    corpus = numbered(10)
    corpus.tokens = np.concatenate([corpus.tokens, [1, 2, 3]])  # not enough for one more sample
    batches = Batches(corpus, 4, 10, seed=0)
    tokens, targets = batches.micro_batch(0, 0, 10)
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape == (10, 4)
    assert tokens.is_contiguous() and targets.is_contiguous()
    assert tokens[:, 0].tolist() == (batches.sample_ids(0) * 4).tolist()
    assert torch.equal(targets, tokens + 1)
    assert sorted(targets.flatten().tolist()) == list(range(1, 41))


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 8), (2, 2), (4, 1), (2, 12), (4, 6), (3, 4)])
def test_ranks_and_micro_batches_are_slices_of_the_global_batch(dp, micro_batch):
    batches = Batches(numbered(100), 4, 24, seed=0)
    whole = batches.micro_batch(5, 0, 24)
    for index in range(24 // (dp * micro_batch)):
        for rank in range(dp):
            first = (index * dp + rank) * micro_batch
            parts = batches.micro_batch(5, index, micro_batch, rank, dp)
            assert all(torch.equal(p, w[first : first + micro_batch]) for p, w in zip(parts, whole))
    with pytest.raises(ValueError, match="lies outside the 24 rows"):
        batches.micro_batch(5, 24 // (dp * micro_batch), micro_batch, 0, dp)


def test_too_small_a_corpus_is_refused_with_the_numbers():
    assert Batches(numbered(8), 4, 8, seed=0).samples == 8
    message = (
        r"^--data numbered: corpus too small for the batch: 29 tokens make 7 samples of --seq-len 4 "
        r"\(plus one token\), but --global-batch 8 needs 8 samples: 33 tokens$"
    )
    with pytest.raises(UsageError, match=message):
        Batches(numbered(7), 4, 8, seed=0)


def test_token_outside_the_vocabulary_is_refused():
    corpus = numbered(4)
    corpus.vocab = 16  # the last one is 16
    with pytest.raises(ValueError, match="corpus numbered holds token 16 of a vocabulary of 16"):
        Batches(corpus, 4, 4, seed=0).micro_batch(0, 0, 4)


@pytest.mark.gpu
def test_batches_on_the_gpu():
    batches = Batches(numbered(100), 4, 8, seed=0)
    for on_gpu, on_cpu in zip(batches.micro_batch(0, 0, 8, device="cuda"), batches.micro_batch(0, 0, 8)):
        assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), on_cpu)


# ---- the synthetic corpus ----------------------------------------------------------------------------------


def test_synthetic_stream_is_always_the_same(monkeypatch):
    corpus = load_corpus("synthetic", None, 1000)
    assert (len(corpus.tokens), corpus.vocab, corpus.eos, corpus.tokens.dtype) == (1 << 20, 256, 0, np.uint16)
    assert corpus.sha256 == GOLDEN_SYNTHETIC
    assert corpus.tokens.max() < 256
    longer = synthetic((1 << 20) + 1)
    assert len(longer.tokens) == 1 << 21 and np.array_equal(longer.tokens[: 1 << 20], corpus.tokens)
    monkeypatch.setattr(data_module, "SYNTHETIC_MOST", 1 << 21)
    assert len(synthetic(10**12).tokens) == 1 << 21


def test_synthetic_stream_can_be_learned():
    tokens = synthetic(1).tokens.astype(np.int64)

    def entropy(values, size):
        share = np.bincount(values, minlength=size) / len(values)
        return -(share[share > 0] * np.log(share[share > 0])).sum()

    alone = entropy(tokens, 256)
    given_previous = entropy(tokens[:-1] * 256 + tokens[1:], 1 << 16) - alone
    assert given_previous < 2 < 4.5 < alone < 4.6 < np.log(256)
    assert np.flatnonzero(tokens == 0)[:3].tolist() == [95, 191, 287]
