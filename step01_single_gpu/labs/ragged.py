"""Step 1 on answers of different lengths: sequences are padded to one length, and padding is no target.

    python step01_single_gpu/labs/ragged.py --micro-batch 3

Of every four sequences the first has a quarter of its tokens as targets, the second two quarters, and so on.
"""

import common.entry  # noqa: F401

# isort: split
import torch

from common.config import TrainConfig
from common.launching.launch import run
from common.process_groups import Mesh
from step01_single_gpu import train as step01
from step01_single_gpu.config import check
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.running.run import Run

PADDING = -100  # what PyTorch's cross-entropy leaves out


class Answers(Batches):
    """Batches of which only some targets count: those of the first tokens of each sequence."""

    def length(self, row: int) -> int:
        """How many targets a row of the global batch has."""
        return (row % 4 + 1) * self.seq_len // 4

    @property
    def target_tokens(self) -> int:
        return sum(map(self.length, range(self.global_batch)))

    def micro_batch(self, step: int, index: int, micro_batch: int, *layout, **options):
        tokens, targets = super().micro_batch(step, index, micro_batch, *layout, **options)
        lengths = torch.tensor([self.length(index * micro_batch + row) for row in range(micro_batch)])
        return tokens, targets.masked_fill(torch.arange(self.seq_len) >= lengths.unsqueeze(1), PADDING)


def train(config: TrainConfig, mesh: Mesh) -> list[torch.Tensor]:
    """As step 1 does, but for the batches."""
    corpus = load_batches(config, mesh).corpus
    batches = Answers(corpus, config.seq_len, config.global_batch, config.seed)
    model, gradient_sums, optimizer = step01.build(config, mesh)
    with Run(config, mesh, batches, optimizer) as steps:
        for step in steps.steps():
            steps.log(step01.train_step(step, model, gradient_sums, optimizer, batches, config, mesh, steps.tracer))
    return optimizer.parameters


if __name__ == "__main__":
    run(1, train, check)
