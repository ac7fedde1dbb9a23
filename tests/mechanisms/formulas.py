"""What the tests of formulas share: small models whose numbers fit in the head, a played link, a row's check."""

from dataclasses import replace

import pytest
import torch

from common.costs.alpha_beta import Player
from common.costs.vocabulary import KINDS
from common.link import Link
from common.model_config import ModelConfig

F32, BF16 = torch.float32, torch.bfloat16
# h 8, 4 heads of width 2, f 6. Attention 2·8·8 + 2·8·4 = 192 parameters, MLP 3·8·6 = 144: with two norms a layer has
# 352. Embedding and head 80 each, norms (2·2 + 1)·8 = 40: 872 in all
DENSE = ModelConfig(vocab=10, hidden=8, layers=2, heads=4, kv_heads=2, ffn=6, tie_embeddings=False)
SHAPE = DENSE, 1, 2, F32  # two tokens of one sequence
# Two layers of 4 experts of 3·8·5 = 120 parameters and a router of 32, a dense one: 160 + 56 + 3·192 + 144 + 2·512
EXPERTS = replace(DENSE, layers=3, dense_layers=1, experts=4, top_k=2, expert_ffn=5)
LINK = Link(alpha=0.001, bandwidth=1e6)


def by_kind(*held) -> dict:
    """What a rank holds, by kind."""
    return dict(zip(KINDS, held, strict=True))


def played(ranks: int, play, *arguments) -> tuple[float, float, float]:
    """When a rank has finished what it plays over a link of 1 byte/s without latency, communication, time blocked."""
    player = Player(ranks, Link(0.0, 1.0))
    play(player, *arguments)
    return player.now, player.communication, player.blocked


def check(rows: list[tuple]) -> None:
    """A row is (number, formula, arguments)."""
    for expected, formula, *arguments in rows:
        found = formula(*arguments)
        assert found == expected or found == pytest.approx(expected), (formula.__name__, arguments)
