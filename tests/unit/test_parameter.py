"""Initial values: any box of any tensor, from (seed, name, index) alone. The norm of what is owned."""

import hashlib
import itertools
import math
import random
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common import initialisation as initialisation_module
from common.errors import UsageError
from common.initialisation import materialise, random_box, random_values
from common.model import Decoder
from common.model_config import ModelConfig
from common.parameter import ParameterSpec
from common.process_groups import Group
from common.reductions import gradient_norm

CPU = torch.device("cpu")


def spec_of(*shape: int, name="w", std: float | None = 0.02, box=None) -> ParameterSpec:
    return ParameterSpec(name, shape, tuple(box or ((0, size) for size in shape)), std)


def slices(box) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in box)


# ---- boxes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.02, None])
@pytest.mark.parametrize("shape", [(50,), (17, 23), (5, 6, 7)])
def test_any_box_is_a_slice_of_the_whole(shape, std):
    whole = random_box(spec_of(*shape, std=std), seed=3)
    random.seed(0)
    for _ in range(40):  # empty boxes included
        box = [sorted(random.choices(range(size + 1), k=2)) for size in shape]
        assert torch.equal(random_box(spec_of(*shape, std=std, box=box), seed=3), whole[slices(box)])


@pytest.mark.parametrize("std", [0.02, None])
def test_rows_that_pad_are_zero(std):
    """Ten rows in boxes of three: the fourth holds one row and two of padding, a fifth only padding."""
    whole = random_box(spec_of(10, 4, std=std), seed=0)
    for start in range(0, 15, 3):
        part = random_box(spec_of(10, 4, std=std, box=((start, start + 3), (1, 4))), seed=0)
        real = max(0, min(3, 10 - start))
        assert part.shape == (3, 3)
        assert torch.equal(part[:real], whole[start : start + 3, 1:])
        assert part[real:].eq(0).all()


def test_a_flat_piece_is_a_few_boxes():
    """All elements of a tensor are numbered: what the boxes hold, one after the other, is what the piece holds."""
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


def test_chunks_join_without_a_seam(monkeypatch):
    """Tensors are drawn a chunk of whole rows at a time; where the chunks end cannot be seen."""
    spec = spec_of(37, 11, box=((2, 36), (3, 10)))
    expected = random_box(spec, seed=5)
    for chunk in (1, 7, 8, 70, 238, 239):
        monkeypatch.setattr(initialisation_module, "CHUNK", chunk)
        assert torch.equal(random_box(spec, seed=5), expected)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_a_small_box_of_a_huge_tensor_is_small():
    """10^11 elements would be 400 GB."""
    spec = spec_of(10**6, 10**5, box=((999_990, 1_000_000), (99_000, 99_020)))
    with Largest() as largest:
        values = random_box(spec, seed=0)
    assert values.shape == (10, 20) and values.ne(0).all()
    assert largest.elements <= 200


def test_temporaries_stay_small(monkeypatch):
    monkeypatch.setattr(initialisation_module, "CHUNK", 1000)
    with Largest() as largest:
        random_box(spec_of(500, 40), seed=0)
    assert largest.elements == 500 * 40  # the result itself
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made.append(result.numel())
            return result

    with Made():
        random_box(spec_of(500, 40), seed=0)
    assert sorted(made)[:-1][-1] <= 1000


# ---- values -------------------------------------------------------------------------------------------


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


def test_values_are_frozen():
    """Curves of earlier versions can be compared only as long as a seed gives the same weights."""
    values = random_box(spec_of(3, 4, name="embedding.weight"), seed=0)
    golden = [
        [-0.022824630, -0.029076129, 0.005325126, -0.001954568],
        [0.037552126, -0.034544330, -0.039167445, 0.016007077],
        [-0.001914799, -0.035089772, -0.008462844, -0.002433406],
    ]
    torch.testing.assert_close(values, torch.tensor(golden), rtol=1e-6, atol=1e-9)


def test_the_rarest_values_are_finite():
    """The 64 random bits are a bijection of the counter: run it backwards from all zeros and all ones."""
    mask = (1 << 64) - 1

    def unshift(z, bits):
        result = z
        for _ in range(64 // bits):
            result = z ^ (result >> bits)
        return result

    for bits, expected in ((0, -8.2), (mask, 8.2)):
        z = unshift(bits, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        key = initialisation_module._signed((unshift(z, 30) - 0x9E3779B97F4A7C15) & mask)
        value = initialisation_module._normal(torch.tensor([0]), key).item()
        assert abs(value - expected) < 0.1


def test_distribution():
    n = 1_000_000
    values = random_box(spec_of(1000, 1000, std=0.02), seed=0).double().flatten() / 0.02
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 5 * math.sqrt(15 / n)  # standard errors of a normal's moments
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert values.isfinite().all() and 4 < values.abs().max() < 6.5
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        share = (values < NormalDist().inv_cdf(quantile)).double().mean()
        assert abs(share - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / n)


def test_neighbours_do_not_correlate():
    """Neighbouring seeds, names, rows and columns, and the same index in other shapes."""
    n = 200_000

    def sample(name="layers.0.mlp.up_proj.weight", seed=0, shape=(400, 500)):
        return random_box(spec_of(*shape, name=name, std=1.0), seed).flatten()

    base = sample()
    others = {
        "seed": sample(seed=1),
        "layer": sample("layers.1.mlp.up_proj.weight"),
        "weight": sample("layers.0.mlp.gate_proj.weight"),
        "digit": sample("layers.0.mlp.up_proj.weight", seed=10),
        "column": base.roll(1),
        "row": base.roll(500),
        "power of two": base.roll(256),
    }
    for what, other in others.items():
        for a, b in ((base, other), (base.square() - 1, other.square() - 1)):
            correlation = (a * b).mean() / (a.std() * b.std())
            assert abs(correlation) < 5 / math.sqrt(n), what


def test_each_name_and_seed_has_its_own_values():
    config = ModelConfig(64, 16, 3, 2, 1, 16, tie_embeddings=False)
    drawn = [
        random_box(p.spec, seed).flatten()[:64]
        for seed in (0, 1, 2**40)
        for p in Decoder(config).parameters()
        if p.spec.init_std is not None
    ]
    standardised = [values / values.norm() for values in drawn]
    for a, b in itertools.combinations(standardised, 2):
        assert abs(a @ b) < 0.75  # 64 independent samples: 6 standard deviations
    assert torch.equal(random_box(spec_of(4, name="a"), 7), random_box(spec_of(4, name="a"), 7))


# ---- materialise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_materialise(tied):
    config = ModelConfig(32, 16, 2, 4, 2, 24, tie_embeddings=tied)
    model = Decoder(config)
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


def test_materialise_draws_the_box():
    config = ModelConfig(32, 16, 1, 4, 2, 24, tie_embeddings=False)
    whole, part = Decoder(config), Decoder(config)
    linear = part.layers["0"].mlp.up_proj
    spec = replace(linear.weight.spec, box=((6, 12), (0, 16)))
    linear.weight = nn.Parameter(torch.empty(6, 16, device="meta"))  # as tensor parallelism does
    linear.weight.spec = spec
    for model in (whole, part):
        materialise(model, torch.float32, CPU, random_values(0))
    assert torch.equal(linear.weight, whole.layers["0"].mlp.up_proj.weight[6:12])


def test_a_model_larger_than_the_memory_is_one_line():
    model = Decoder(ModelConfig(1 << 22, 1 << 24, 1, 4, 2, 24, tie_embeddings=True))  # an embedding of 256 TiB
    with pytest.raises(UsageError, match=r"^the model's [\d,]+ parameters do not fit into the memory of cpu$"):
        materialise(model, torch.float32, CPU, random_values(0))


def test_only_matrices_decay():
    decays = {p.spec.name: p.spec.decay for p in Decoder(ModelConfig(8, 8, 1, 2, 1, 8, False)).parameters()}
    assert {name for name, decay in decays.items() if not decay} == {
        "norm.weight",
        "layers.0.attention_norm.weight",
        "layers.0.mlp_norm.weight",
    }


# ---- gradient norm ------------------------------------------------------------------------------------


def test_gradient_norm_counts_what_is_owned():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    for index, parameter in enumerate(parameters):
        parameter.spec = spec_of(*parameter.shape, name=str(index))
    gradients = [torch.full_like(p, 2.0, dtype=torch.bfloat16) for p in parameters]
    world = Group("world", (0,), 0)
    norm = gradient_norm(parameters, gradients, world)
    assert norm.dtype == torch.float64 and math.isclose(norm, 6.0, rel_tol=1e-6)
    parameters[1].spec.owner = False
    assert math.isclose(gradient_norm(parameters, gradients, world), math.sqrt(20), rel_tol=1e-6)
    parameters[0].spec.owner = parameters[2].spec.owner = False
    assert gradient_norm(parameters, gradients, world) == 0
