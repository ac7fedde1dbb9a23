"""What the formulas of messages say of a layout is what its ranks send in dry runs, on average and to the byte."""

import os
from collections import Counter

import pytest

from common.costs.vocabulary import added
from common.presets import PRESETS
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.dry_run.play import configuration, dry_run

SHAPE = "--layers 4 --hidden 64 --heads 8 --kv-heads 2 --ffn 96 --vocab 255 --seq-len 64 --micro-batch 1"
EXPERTS = "--experts 8 --top-k 2 --expert-ffn 32 --shared-experts 1"
# World and layout; the first ones in `make test`
CASES = [
    "4 --tp 4 --pp 1 --global-batch 2 --zero 0",  # two ranks for a K/V head
    "4 --dp 2 --tp 2 --zero 3 --tie-embeddings --global-batch 4 --dtype bfloat16",
    f"8 --dp 8 --ep 4 --zero 3 --zero-replicas 4 --global-batch 8 --layers 2 {EXPERTS}",
    "8 --tp 4 --dp 2 --zero 1 --global-batch 4",
    "8 --tp 4 --dp 2 --zero 3 --global-batch 4 --dtype bfloat16",
    "8 --tp 8 --global-batch 4",
    "8 --tp 4 --cp 2 --global-batch 4",
    "4 --dp 4 --zero 3 --tie-embeddings --global-batch 8",
    f"8 --tp 2 --dp 4 --ep 4 --zero 3 --global-batch 8 {EXPERTS}",
    "8 --pp 2 --tp 4 --global-batch 4",
    "4 --pp 2 --dp 2 --zero 3 --global-batch 8 --tie-embeddings",
    "8 --pp 4 --dp 2 --zero 1 --global-batch 8 --tie-embeddings",
    "8 --dp 8 --zero 3 --zero-replicas 2 --global-batch 16",
    "8 --dp 8 --zero 1 --zero-replicas 4 --global-batch 16 --dtype bfloat16",
    "8 --dp 8 --zero 2 --zero-replicas 8 --global-batch 16",
    f"8 --dp 4 --tp 2 --ep 4 --zero 2 --zero-replicas 2 --global-batch 8 {EXPERTS}",
    "8 --dp 2 --pp 2 --cp 2 --zero 3 --zero-replicas 2 --global-batch 8",
    f"8 --dp 4 --tp 2 --ep 2 --zero 1 --zero-replicas 2 --global-batch 8 {EXPERTS}",
]
BESIDE = 1000  # bytes, all together at most: loads of experts, the norm of the gradient and the loss are in no formula


@pytest.mark.parametrize("case", CASES if os.environ.get("TEST_ALL") else [f"{case} --layers 1" for case in CASES[:3]])
def test_formulas_send_what_dry_runs_send(case):
    world, *words = case.split()
    config, found = configuration([*SHAPE.split(), *words], int(world)), Counter()
    for rank in range(int(world)):
        found.update({key: size / int(world) for key, (_, size) in dry_run(config, rank).sent.items()})
    ours = {key: size for key, (_, size) in added(cost.messages(config.model_config, Layout.of(config))).items()}
    for key, size in ours.items():
        counts = BESIDE if key == ("tp", "all_reduce") and config.experts else 0
        assert size == pytest.approx(found[key], rel=1e-9, abs=counts), key
    assert sum(found[key] for key in found.keys() - ours.keys()) < BESIDE
    layout = Layout.of(config)
    if layout.pp == 1:  # there is no stage in the middle
        assert cost.messages(config.model_config, layout, ends=False) == cost.messages(config.model_config, layout)


def test_70b_on_64_by_hand():
    """ZeRO-3 over 64 ranks, a micro-batch: sums of 4 bytes, gathers of 2, and those of layers once more."""
    model, layout = PRESETS["llama3-70b"], Layout(4096, dp=64, zero=3, dtype="bfloat16")
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    ends = 2 * 128256 * 8192 + 8192
    expected = 63 / 64 * (80 * layer * (4 + 2 + 2) + ends * (4 + 2))
    assert sum(each.bytes * each.count for each in cost.messages(model, layout, ends=False)) == expected
    assert round(expected / 1e9) == 551
    narrow = cost.messages(model, layout, ends=False, gradient=2)
    assert sum(each.bytes * each.count for each in narrow) == 63 / 64 * (80 * layer * 6 + ends * 4)
