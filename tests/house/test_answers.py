"""The answers to the exercises in which readers rewrite a sketch: they give the same losses on any number of ranks."""

import re
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from step01_single_gpu import sketch
from step05_pipeline.schedules.catalogue import build_schedule
from tests.harness.observing import place
from tests.harness.ranks import ROOT, run_ranks

ZERO_BUBBLE = [" ".join(map(str, row)) for row in build_schedule("zb-h1", 4, 4).actions]
# What a reader changes in a sketch: (before, after). … goes on to the end of the line, and §1 is the answer's part 1
CHANGES = {
    1: [],
    2: [("in_flight.append(dist.all_reduce(bucket, async_op=True))", "ring_all_reduce(bucket)")],
    3: [
        ("shards = [weight.chunk(ranks)[rank].clone() for weight in weights]", "weights = list(weights)"),
        ("del weights", "shards = momenta = [torch.zeros_like(each.chunk(ranks)[rank]) for each in weights]"),
        ("train_step(shards, x", "train_step(weights, momenta, x"),
    ],
    4: [
        ("W2 = [[", "WU = [[1.0, 0, 1, 1], [0, 1, 1, -1]]\nW2 = [["),
        ("LEARNING_RATE = 5, 0.01", "LEARNING_RATE = 5, 0.002"),
        ("    w2 = ", "    wu = torch.tensor(WU, dtype=dtype).chunk(ranks, dim=1)[rank].contiguous()\n    w2 = "),
        ("forward(x, scale, w1, w2)\n", "forward(x, scale, w1, wu, w2)\n"),
        (
            "dx, dscale, dw1, dw2 = backward(error, …",
            "dx, dscale, dw1, dwu, dw2 = backward(error, x, hidden, scale, w1, wu, w2)",
        ),
        ("        w2 -= LEARNING_RATE", "        wu -= LEARNING_RATE * dwu\n        w2 -= LEARNING_RATE"),
    ],
    5: [
        ("\nHANGS =", f"\nSCHEDULE = {ZERO_BUBBLE}\nHANGS ="),
        ("kept, sends, loss, most = ", "postponed = {}\n    kept, sends, loss, most = "),
        ("        else:\n            x, y = kept", "§0        else:\n            x, y = kept"),
    ],
    6: [
        ("    for hop in range(ranks):\n        k, v = ring\n        queries…\n", "§0"),
        ("        if hop + 1 < ranks:  # one…\n            ring = pass_on(ring)\n", ""),
        ("dq, ring = …", "dq, kv = torch.zeros_like(q), torch.stack((k, v))"),
        ("    for hop in range(ranks):\n        k, v, dk, dv…\n        queries…\n", "§1"),
        ("        ring = pass_on(ring)\n", ""),
        ("    return dq, …\n", "§2"),
    ],
    7: [
        ("WIDTH, HIDDEN, STEPS, LEARNING_RATE = 8, 2,", "WIDTH, HIDDEN, STEPS, LEARNING_RATE = 8, 1,"),
        ("    best, chosen = …\n    gates = …\n", "§0"),
        ("return y, (x, ", "return y, (x, scores, "),
        ("    x, gates, chosen", "    x, scores, gates, chosen"),
        ("    dbest = …\n    dlogits = …\n", "§1"),
    ],
    8: [
        ("DEGREES = {", "LIMIT = 1\nDEGREES = {"),
        ("        # --- until here ---\n        for weight in ", "§0        for weight in "),
    ],
    "step08_5d/narrow_numbers": [],
}


def pattern(before: str) -> str:
    """A regular expression for what is written as in CHANGES."""
    return re.escape(before).replace("…", ".*")


def sketch_of(step: int | str) -> Path:
    """The sketch of a step, or of a folder."""
    (folder,) = ROOT.glob(step if isinstance(step, str) else f"step{step:02}_*")
    return folder / "sketch.py"


def solved(step: int | str, changes: Iterable[tuple[str, str]] = (), **names) -> types.ModuleType:
    """The sketch of a step, or in a folder, as its lesson's answer has it; with further changes, and names for them."""
    path = sketch_of(step)
    exercises = re.split(r"^\*\*\d\. ", path.with_name("README.md").read_text(), flags=re.MULTILINE)
    (answer,) = [each for each in exercises if each.startswith("(change")]
    code = re.findall(r"^```python\n(.*?)^```", answer, re.MULTILINE | re.DOTALL)
    functions = [each for each in code if re.search("^def |^[A-Z]+ = ", each, re.MULTILINE)]
    parts = [part for each in code if each not in functions for part in re.split(r" *\.\.\.  # as before.*\n", each)]
    own = [line for each in code for line in each.splitlines() if line.strip()]
    assert len(own) + len([after for _, after in CHANGES[step] if "§" not in after]) >= 5, "lines of the reader's own"
    source = path.read_text()
    for before, after in CHANGES[step]:
        (found,) = re.findall(pattern(before), source)
        indent = re.match(r" *", found.lstrip("\n"))[0]
        for index, part in enumerate(parts):
            after = after.replace(f"§{index}", textwrap.indent(textwrap.dedent(part), indent))
        source = source.replace(found, after)
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    module = types.ModuleType(f"sketch_{path.parent.name}")
    module.__dict__.update(names)
    exec(source, module.__dict__)
    for each in functions:
        exec(each, module.__dict__)  # they take the place of the sketch's
    return module


def losses(*steps: int) -> dict[int, list[float]]:
    """On this rank."""
    return {step: solved(step).train(*place(), torch.float64)[0] for step in steps}


@pytest.fixture(scope="module")
def worlds():
    return {ranks: run_ranks(ranks, losses, *range(2, 9)) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("step", range(2, 9))
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


def test_shards_in_fp8_are_the_whole_weight_in_fp8():
    answer = solved("step08_5d/narrow_numbers")
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    numbers, scale = answer.quantise(weight, answer.TILE)
    expected = numbers.float() * scale
    assert torch.equal(answer.gather(weight.chunk(4)), expected)
    own = torch.cat([answer.gather((shard, shard))[:64] for shard in weight.chunk(4)])  # each beside itself alone
    assert (own != expected).float().mean().item() == pytest.approx(0.5, abs=1e-3)
