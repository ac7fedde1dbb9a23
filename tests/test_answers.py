"""The answers to the exercises in which readers rewrite a sketch: they give the same losses on any number of ranks."""

import re
import types

import pytest
import torch
import torch.distributed as dist

from step01_single_gpu import sketch
from tests.harness.ranks import ROOT, run_ranks

# What a reader changes besides the functions of the answer: (before, after)
CHANGES = {
    1: [],
    2: [("in_flight.append(dist.all_reduce(bucket, async_op=True))", "ring_all_reduce(bucket)")],
    3: [
        ("shards = [weight.chunk(ranks)[rank].clone() for weight in weights]", "weights = list(weights)"),
        ("del weights", "shards = momenta = [torch.zeros_like(each.chunk(ranks)[rank]) for each in weights]"),
        ("train_step(shards, x", "train_step(weights, momenta, x"),
        ("STEPS, LEARNING_RATE = 3, 64, 16, 5, 10.0", "STEPS, LEARNING_RATE = 3, 64, 16, 5, 2.0"),
    ],
    4: [
        ("W2 = [[", "WU = [[1.0, 0, 1, 1], [0, 1, 1, -1]]\nW2 = [["),
        ("LEARNING_RATE = 5, 0.01", "LEARNING_RATE = 5, 0.002"),
        ("    w2 = ", "    wu = torch.tensor(WU, dtype=dtype).chunk(ranks, dim=1)[rank].contiguous()\n    w2 = "),
        ("forward(x, scale, w1, w2)\n", "forward(x, scale, w1, wu, w2)\n"),
        ("dx, dscale, dw1, dw2 = backward(error, x, hidden, scale, w1, w2)",)
        + ("dx, dscale, dw1, dwu, dw2 = backward(error, x, hidden, scale, w1, wu, w2)",),
        ("        w2 -= LEARNING_RATE", "        wu -= LEARNING_RATE * dwu\n        w2 -= LEARNING_RATE"),
    ],
}


def solved(step: int) -> types.ModuleType:
    """The sketch of a step, with the functions of its lesson's answer."""
    (folder,) = ROOT.glob(f"step{step:02}_*")
    source = (folder / "sketch.py").read_text()
    for before, after in CHANGES[step]:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    exercises = (folder / "README.md").read_text().partition("## Exercises")[2]
    (answer,) = re.findall(r"^```python\n(def .*?|[A-Z]+ = .*?)^```", exercises, re.MULTILINE | re.DOTALL)
    assert len([line for line in answer.splitlines() if line.strip()]) >= 5
    module = types.ModuleType(f"sketch_{step}")
    exec(source, module.__dict__)
    exec(answer, module.__dict__)  # its functions take the place of the sketch's
    return module


def losses(*steps: int) -> dict[int, list[float]]:
    """On this rank."""
    if not dist.is_initialized():  # one process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    place = dist.get_rank(), dist.get_world_size()
    return {step: solved(step).train(*place, torch.float64)[0] for step in steps}


@pytest.fixture(scope="module")
def worlds():
    return {ranks: run_ranks(ranks, losses, 2, 3, 4) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("step", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_losses(worlds, step):
    (alone,) = worlds[1]
    assert alone[step][-1] < alone[step][0]
    for ranks in (2, 4):
        assert all(rank[step] == pytest.approx(alone[step], rel=1e-12, abs=0) for rank in worlds[ranks])


def test_segments_give_the_losses_of_layers(monkeypatch):
    segments, most = {}, {}
    monkeypatch.setattr(sketch, "LAYERS", 16)
    monkeypatch.setattr(sketch, "LEARNING_RATE", 0.001)  # more layers, larger gradients
    for length in (1, 2, 4, 8):
        answer = solved(1)
        answer.LAYERS, answer.LEARNING_RATE, answer.SEGMENT = sketch.LAYERS, sketch.LEARNING_RATE, length
        segments[length], _, kept = answer.train(4, True, torch.float64)
        most[length] = kept / (answer.WIDTH * answer.SAMPLES / 4)
    expected, _, kept = sketch.train(4, True, torch.float64)
    assert expected[-1] < expected[0]
    assert all(each == pytest.approx(expected, rel=1e-12, abs=0) for each in segments.values())
    assert most == {1: 20, 2: 17, 4: 23, 8: 41} and kept == 20 * sketch.WIDTH * sketch.SAMPLES / 4
