"""The initial values of parameters: what is drawn, in how little memory, and that nothing in it correlates."""

import math

from torch.utils._python_dispatch import TorchDispatchMode

from common.parameter import ParameterSpec
from common.weights import initialisation
from common.weights.initialisation import random_box


def spec_of(*shape: int, name="w", std: float | None = 0.02, box=None) -> ParameterSpec:
    return ParameterSpec(name, shape, tuple(box or ((0, size) for size in shape)), std)


def test_memory(monkeypatch):
    """A small box of 10^11 elements takes little memory, and so do the temporaries of a large box."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.append(result.numel())
            return result

    with Sizes():
        values = random_box(spec_of(10**6, 10**5, box=((999_990, 1_000_000), (99_000, 99_020))), seed=0)
    assert values.shape == (10, 20) and values.ne(0).all() and max(sizes) <= 200
    monkeypatch.setattr(initialisation, "CHUNK", 1000)
    with Sizes():
        random_box(spec_of(500, 40), seed=0)
    assert sorted(sizes)[-2] <= 1000 and max(sizes) == 500 * 40, "the result itself"


def test_neighbours_do_not_correlate():
    """Neighbouring seeds, names, rows and columns."""
    pairs = [("layers.0.mlp.up_proj.weight", seed) for seed in (0, 1, 10, 2**40)]
    pairs += [("layers.1.mlp.up_proj.weight", 0), ("layers.0.mlp.gate_proj.weight", 0)]
    base, *others = (random_box(spec_of(400, 500, name=name, std=1.0), seed).flatten() for name, seed in pairs)
    for index, other in enumerate([*others, base.roll(1), base.roll(500), base.roll(256)]):
        for a, b in ((base, other), (base.square() - 1, other.square() - 1)):
            correlation = (a * b).mean() / (a.std() * b.std())
            assert abs(correlation) < 5 / math.sqrt(200_000), index
