"""Batches as a pure function of (seed, step), and the synthetic corpus."""

import numpy as np
import pytest
import torch

from common.command_line import parse
from common.data.batches import Batches, epoch_order, load_batches
from common.data.token_cache import Corpus, load_corpus
from common.errors import UsageError
from common.process_groups import Degrees, build_mesh

# A recorded run can be repeated for ever, with any version of numpy and Python.
GOLDEN_ORDER = [882, 907, 205, 842, 743, 611, 332, 987, 73, 409, 602, 700, 245, 548, 494, 995]
GOLDEN_SYNTHETIC = "098a1be4ad62d29d5d4a4ff2a266e594d8816a016269ef09a0d1236c50e22be8"


def numbered(samples: int, seq_len: int = 4) -> Corpus:
    """A corpus whose token i is i, and three tokens that are not enough for another sample."""
    return Corpus("numbered", np.arange(samples * seq_len + 4, dtype=np.uint32), "", samples * seq_len + 4)


def sample_ids(batches: Batches, step: int) -> list[int]:
    """The samples of a global batch of a `numbered` corpus."""
    return (batches.micro_batch(step, 0, batches.global_batch)[0][:, 0] // batches.seq_len).tolist()


@pytest.mark.parametrize(("samples", "global_batch"), [(12, 4), (13, 4), (7, 7), (100, 8), (5, 3)])
def test_epochs_repeat_nothing_and_miss_nothing(samples, global_batch):
    batches = Batches(numbered(samples), 4, global_batch, seed=3)
    ids = sum((sample_ids(batches, step) for step in range(samples * 3 // global_batch + 1)), [])
    epochs = [ids[first : first + samples] for first in range(0, samples * 3, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_seed_and_step_alone():
    epoch_order.cache_clear()
    batches = Batches(numbered(1000), 4, 8, seed=0)
    later = [sample_ids(batches, step) for step in range(200)]
    assert epoch_order.cache_info().misses == 2, "the order of an epoch is made once"
    epoch_order.cache_clear()
    resumed = Batches(numbered(1000), 4, 8, seed=0)
    assert [sample_ids(resumed, step) for step in (150, 3, 150)] == [later[150], later[3], later[150]]
    orders = {(seed, epoch): epoch_order(seed, epoch, 1000).tolist() for seed in (0, 1, 2**32 - 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 6
    assert all(abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1 for order in orders.values())
    assert later[0] + later[125] == orders[0, 0][:8] + orders[0, 1][:8] == GOLDEN_ORDER


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 8), (2, 2), (4, 1), (2, 12), (4, 6), (3, 4)])
def test_ranks_and_micro_batches_are_slices_of_the_global_batch(dp, micro_batch):
    batches = Batches(numbered(24), 4, 24, seed=0)
    whole = tokens, targets = batches.micro_batch(5, 0, 24)
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape == (24, 4)
    assert tokens.is_contiguous() and targets.is_contiguous() and torch.equal(targets, tokens + 1)
    assert sorted(targets.flatten().tolist()) == list(range(1, 97)), "samples overlap by the last target"
    for index in range(24 // (dp * micro_batch)):
        for rank in range(dp):
            first = (index * dp + rank) * micro_batch
            parts = batches.micro_batch(5, index, micro_batch, rank, dp)
            assert all(torch.equal(p, w[first : first + micro_batch]) for p, w in zip(parts, whole))
    with pytest.raises(ValueError, match="outside the 24 rows"):
        batches.micro_batch(5, 24 // (dp * micro_batch), micro_batch, 0, dp)


def test_refusals():
    assert Batches(numbered(8), 4, 8, seed=0).samples == 8
    with pytest.raises(
        UsageError, match="^--data numbered is too small: its 32 tokens make 7 samples of --seq-len 4, "
    ):
        Batches(numbered(7), 4, 8, seed=0)
    with pytest.raises(ValueError, match="--data numbered: token 16 of a vocabulary of 16"):
        Batches(numbered(4)._replace(vocab=16), 4, 4, seed=0).micro_batch(0, 0, 4)
    config = parse(1, ["--data", "synthetic", "--vocab", "255", "--device", "cpu"])
    with pytest.raises(UsageError, match="^--vocab 255 is below the 256 ids of the tokenizer$"):
        load_batches(config, build_mesh(Degrees(), torch.device("cpu")))


@pytest.mark.gpu
def test_batches_on_the_gpu():
    batches = Batches(numbered(100), 4, 8, seed=0)
    for on_gpu, on_cpu in zip(batches.micro_batch(0, 0, 8, device="cuda"), batches.micro_batch(0, 0, 8)):
        assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), on_cpu)


def test_synthetic_tokens_are_always_the_same_and_can_be_learned():
    corpus, longer = load_corpus("synthetic", None, 1000), load_corpus("synthetic", None, 2_000_000)
    assert (corpus.vocab, corpus.tokens.dtype, corpus.sha256) == (256, np.uint16, GOLDEN_SYNTHETIC)
    assert len(corpus.tokens) >= 1000 and len(longer.tokens) >= 2_000_000 and longer.tokens.max() < 256

    def entropy(values):
        share = np.unique(values, return_counts=True)[1] / len(values)
        return -(share * np.log(share)).sum()

    tokens = corpus.tokens.astype(np.int64)
    given_previous = entropy(tokens[:-1] * 256 + tokens[1:]) - entropy(tokens)
    assert given_previous < 1.3 < 4.5 < entropy(tokens) < 4.6 < np.log(256)
