"""Specs and initial values: any box of any tensor, from (seed, name, index) alone."""

import hashlib
import math
import random
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.model import Decoder
from common.model_config import ModelConfig
from common.parameter import ParameterSpec
from common.weights import initialisation
from common.weights.initialisation import materialise, random_box, random_values

CPU = torch.device("cpu")


def spec_of(*shape: int, name="w", std: float | None = 0.02, box=None) -> ParameterSpec:
    return ParameterSpec(name, shape, tuple(box or ((0, size) for size in shape)), std)


def slices(box) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in box)


@pytest.mark.parametrize("std", [0.02, None])
@pytest.mark.parametrize("shape", [(50,), (17, 23), (5, 6, 7)])
def test_any_box_is_a_slice_of_the_whole(shape, std, monkeypatch):
    """Also an empty box, and one that exceeds the whole tensor; what pads it is zero."""
    whole = torch.zeros([size + 9 for size in shape])
    whole[slices((0, size) for size in shape)] = random_box(spec_of(*shape, std=std), seed=3)
    random.seed(0)
    for chunk in 30 * [1, 7, 70, 1 << 22]:  # how many elements are drawn at once cannot be seen
        monkeypatch.setattr(initialisation, "CHUNK", chunk)
        box = [sorted(random.choices(range(size + 10), k=2)) for size in shape]
        assert torch.equal(random_box(spec_of(*shape, std=std, box=box), seed=3), whole[slices(box)])


def test_a_flat_range_is_a_few_boxes():
    """All elements of a tensor are numbered: what its boxes hold, one after the other, is the flat range."""
    random.seed(0)
    for _ in range(500):
        shape = random.choices(range(1, 6), k=random.randint(1, 3))
        starts = [random.randrange(4) for _ in shape]
        numbers = torch.arange(9 ** len(shape)).view([9] * len(shape))
        box = tuple((start, start + size) for start, size in zip(starts, shape))
        start, stop = sorted(random.choices(range(math.prod(shape) + 1), k=2))
        tensor = numbers[slices(box)].flatten()[start:stop].clone()
        found = replace(spec_of(*numbers.shape, box=box), flat_range=(start, stop)).boxes(tensor)
        assert len(found) <= 2 * len(shape) - 1
        held = [numbers[slices(each)].flatten() for each, _ in found]
        assert torch.equal(torch.cat(held) if held else numbers[:0].flatten(), tensor), "each once, in order"
        for each, view in found:
            assert torch.equal(view, numbers[slices(each)])
            view.zero_()
        assert not tensor.any(), "the views are views"


def test_memory(monkeypatch):
    """A small box of a tensor of 10^11 elements takes little memory, and so do the temporaries for a large box."""
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


def split_mix(seed: int, name: str, index: int) -> float:
    """The definition once more, in Python's integers and its own inverse normal distribution function."""
    mask = (1 << 64) - 1
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    z = (int.from_bytes(digest, "little") + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return NormalDist().inv_cdf(((z >> 12) + 0.5) * 2.0**-52)


def test_values_are_split_mix():
    values = random_box(spec_of(40, 25, name="layers.3.mlp.up_proj.weight", std=0.5), seed=11)
    expected = [0.5 * split_mix(11, "layers.3.mlp.up_proj.weight", index) for index in range(1000)]
    torch.testing.assert_close(values.flatten().double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_the_rarest_values_are_finite():
    """The 64 random bits are a bijection of the counter: run it backwards from all zeros and from all ones."""
    mask = (1 << 64) - 1
    for z, expected in ((0, -8.2), (mask, 8.2)):
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            original = z
            for _ in range(64 // shift):
                z = original ^ (z >> shift)
            z = z * pow(factor, -1, 1 << 64) & mask
        key = initialisation._signed((z - 0x9E3779B97F4A7C15) & mask)
        assert abs(initialisation._normal(torch.tensor([0]), key).item() - expected) < 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_materialise(tied):
    model = Decoder(ModelConfig(32, 16, 2, 4, 2, 24, tie_embeddings=tied))
    linear = model.layers["1"].mlp.up_proj
    spec, linear.weight = linear.weight.spec, nn.Parameter(torch.empty(6, 16, device="meta"))
    linear.weight.spec = replace(spec, box=((6, 12), (0, 16)))  # a part, as some rank might hold it
    assert all(p.is_meta for p in model.parameters())
    specs = {name: p.spec for name, p in model.named_parameters()}
    materialise(model, torch.float64, CPU, random_values(5))
    assert (model.head.weight is model.embedding.weight) == tied
    for name, parameter in model.named_parameters():
        assert parameter.spec is specs[name] and parameter.spec.name == name
        assert (parameter.dtype, parameter.device) == (torch.float64, CPU)
        assert torch.equal(parameter, random_box(parameter.spec, 5).double())  # drawn in float32 for every type
    assert model.norm.weight.eq(1).all()
    down = model.layers["0"].mlp.down_proj.weight
    assert math.isclose(down.detach().std(), 0.02 / math.sqrt(4), rel_tol=0.15)
    assert math.isclose(model.embedding.weight.detach().std(), 0.02 if tied else 1.0, rel_tol=0.15)
    assert math.isclose(model.head.weight.detach().std(), 0.02, rel_tol=0.15)


def test_neighbours_do_not_correlate():
    """Neighbouring seeds, names, rows and columns."""
    pairs = [("layers.0.mlp.up_proj.weight", seed) for seed in (0, 1, 10, 2**40)]
    pairs += [("layers.1.mlp.up_proj.weight", 0), ("layers.0.mlp.gate_proj.weight", 0)]
    base, *others = (random_box(spec_of(400, 500, name=name, std=1.0), seed).flatten() for name, seed in pairs)
    for index, other in enumerate([*others, base.roll(1), base.roll(500), base.roll(256)]):
        for a, b in ((base, other), (base.square() - 1, other.square() - 1)):
            correlation = (a * b).mean() / (a.std() * b.std())
            assert abs(correlation) < 5 / math.sqrt(200_000), index
