"""The loss of tensor parallelism against dense mathematics: logits and paddings that no training of a test reaches."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from common.process_groups import Group
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import tp_mesh

VOCABULARIES = (12, 10, 5, 2, 1)  # on 4 ranks: divisible, padded, one rank and three ranks of nothing but padding
LOGITS = {
    "ordinary": lambda logits: logits,
    "large": lambda logits: 1e4 * logits,  # exp() of it overflows
    "shifted up": lambda logits: logits + 1e4,
    "one stands out": lambda logits: torch.where(logits == logits.amax(-1, keepdim=True), logits + 1e4, logits),
}


def padded(whole: torch.Tensor, group: Group, value: float) -> torch.Tensor:
    """This rank's part of a tensor with one column per token id; those that pad it are `value`."""
    padding = whole.new_full((*whole.shape[:-1], -whole.shape[-1] % group.size), value)
    return torch.cat((whole, padding), -1).chunk(group.size, -1)[group.rank].clone()


def ranks_losses() -> dict[tuple, tuple]:
    """Beside F.cross_entropy, with every id as a target and rubbish in the logits of the padding."""
    group, found = tp_mesh().tp, {}
    for vocab, name, dtype in itertools.product(VOCABULARIES, LOGITS, (torch.float64, torch.bfloat16)):
        targets, wide = torch.arange(2 * vocab).view(2, -1) % vocab, torch.promote_types(dtype, torch.float32)
        whole = torch.randn(*targets.shape, vocab, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        whole = LOGITS[name](whole).to(dtype).requires_grad_()
        logits = padded(whole.detach(), group, 1e6)
        before = logits.clone()
        expected = F.cross_entropy(whole.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")
        total = vocab_parallel_cross_entropy_sum(logits.requires_grad_(), targets, vocab, group)
        (expected * 0.3).backward()
        (total * 0.3).backward()
        ours, theirs = (total, logits.grad, logits), (expected, padded(whole.grad, group, 0.0), before)
        found[vocab, name, dtype] = [each.detach() for each in ours], [each.detach() for each in theirs]
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_dense_mathematics(world):
    """In bfloat16 to half of the last bit of a probability."""
    for case, pair in itertools.chain(*(found.items() for found in run_ranks(world, ranks_losses))):
        for ours, theirs in zip(*pair, strict=True):
            near = 2.0**-9 if torch.bfloat16 in case else 1e-12
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near, msg=partial("{}: {}".format, case))
