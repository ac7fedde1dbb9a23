"""The batches of a run as a pure function of (seed, step): resuming at step k needs only k, and no state is saved."""

import functools
import math
from collections.abc import Iterable

import numpy as np
import torch

from common.config import TrainConfig
from common.errors import UsageError
from common.group import Group
from common.launching.agreement import agree
from common.process_groups import Mesh
from step01_single_gpu.data.text_sources import WINDOW
from step01_single_gpu.data.token_cache import Corpus, load_corpus


class Batches:
    """The order in which a run sees the samples of a corpus.

    Sample i covers tokens [i * seq_len, i * seq_len + seq_len]: `seq_len` inputs and, shifted by one, `seq_len`
    targets. Step k takes positions k*B ... k*B+B-1 (B = `global_batch`) of an endless sequence in which every epoch, a
    stretch of `samples` positions, is a permutation of all samples. A batch may reach into the next epoch. Of a corpus
    that longer runs read further, each window of tokens is shuffled by itself: so the order does not depend on --steps.

    Raises UsageError for a corpus that holds fewer samples than one global batch.
    """

    def __init__(self, corpus: Corpus, seq_len: int, global_batch: int, seed: int):
        self.corpus, self.seq_len, self.global_batch, self.seed = corpus, seq_len, global_batch, seed
        self.samples = max(0, (len(corpus.tokens) - 1) // seq_len)
        self.window = window_samples(corpus.window, seq_len) if corpus.window else self.samples
        if self.samples < global_batch:
            raise UsageError(
                f"--data {corpus.name} is too small: its {len(corpus.tokens):,} tokens make {self.samples:,} samples "
                f"of --seq-len {seq_len}, fewer than --global-batch {global_batch}"
            )

    @property
    def target_tokens(self) -> int:
        """Target tokens of a global batch. A rank divides its summed loss by this to get its share of the mean."""
        return self.global_batch * self.seq_len

    def micro_batch(self, step: int, index: int, micro_batch: int, dp: Group | None = None, device="cpu"):
        """Return inputs and targets of this rank's micro-batch `index`: int64, both (micro_batch, seq_len).

        They are rows (index * dp.size + dp.rank) * micro_batch and following of the global batch, so that the union
        over ranks and micro-batches is the same in every layout. Raises ValueError for rows outside the global batch.
        """
        rank, size = (dp.rank, dp.size) if dp else (0, 1)
        first = (index * size + rank) * micro_batch
        if not 0 <= first <= self.global_batch - micro_batch:
            raise ValueError(f"micro-batch {index} of dp rank {rank} is outside the {self.global_batch} rows")
        rows = np.stack([self._sample(step * self.global_batch + first + row) for row in range(micro_batch)])
        if rows.max() >= self.corpus.vocab:  # the embedding would fail without a clear word, or not at all
            raise ValueError(f"--data {self.corpus.name}: token {rows.max()} of a vocabulary of {self.corpus.vocab}")
        return to_device([torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:])], device)

    def _sample(self, position: int) -> np.ndarray:
        """The tokens at a position of the endless sequence: (seq_len + 1,)."""
        epoch, place = divmod(position, self.samples)
        window, place = divmod(place, self.window)
        first = window * self.window
        order = random_order(self.seed, epoch, window, min(self.window, self.samples - first))
        start = (first + order[place]) * self.seq_len
        return self.corpus.tokens[start : start + self.seq_len + 1]


def to_device(tensors: Iterable[torch.Tensor], device) -> tuple[torch.Tensor, ...]:
    """Copy tensors from the CPU to a device, without a wait if that is a GPU."""
    if torch.device(device).type == "cuda":
        tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return tuple(tensors)


@functools.lru_cache(maxsize=2)  # a batch may reach into the next window
def random_order(seed: int, epoch: int, window: int, samples: int) -> np.ndarray:
    """The order of the samples of a window in an epoch: int64 (samples,), a permutation of range(samples).

    numpy promises never to change RandomState (NEP 19), so that a recorded run can be repeated for ever.
    """
    key = [seed % 2**32, epoch, window]
    return np.random.RandomState(key if window else key[:2]).permutation(samples)


def window_samples(tokens: int, seq_len: int) -> int:
    """How many samples a window of so many tokens makes; at least one, which may then be longer than the window."""
    return max(1, (tokens - 1) // seq_len)


def load_batches(config: TrainConfig, mesh: Mesh) -> Batches:
    """Return the batches that `config` asks for; all ranks call this together, and all raise the same UsageError if one
    of them cannot read the corpus or reads another one than the others, or if it is too small for a global batch or has
    more token ids than the model.
    """
    window, corpora = window_samples(WINDOW, config.seq_len), []
    windows = math.ceil(config.steps * config.global_batch / window)  # whole ones, which a longer run finds as they are
    needed = windows * window * config.seq_len + 1

    def load() -> dict:
        corpora.append(load_corpus(config.data, config.tokenizer, needed))
        facts = corpora[0]._asdict() | {"tokens": len(corpora[0].tokens)}
        del facts["name"]  # each node may keep it elsewhere
        return {f"{name} of the corpus": value for name, value in facts.items()}

    agree(mesh, load)
    if corpora[0].vocab > config.model_config.vocab:
        raise UsageError(f"--vocab {config.model_config.vocab} is below the {corpora[0].vocab} ids of the tokenizer")
    if config.mask_documents and corpora[0].end is None:
        raise UsageError(f"--mask-documents: --tokenizer {config.tokenizer} has no token that ends a document")
    return Batches(corpora[0], config.seq_len, config.global_batch, config.seed)
