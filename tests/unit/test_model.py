"""The decoder: parity with transformers' Llama, precision; and the initial values of its parameters."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum
from common.model_config import ModelConfig, RopeScaling
from common.parameter import ParameterSpec
from common.weights import initialisation
from common.weights.huggingface import huggingface_name
from common.weights.initialisation import materialise, random_box, random_values

GQA = ModelConfig(vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, ffn=112, tie_embeddings=False)
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
CASES = {
    "gqa": GQA,
    "gqa-tied": replace(GQA, tie_embeddings=True),
    "mqa": replace(GQA, kv_heads=1, norm_eps=1e-6),
    "mha": replace(GQA, kv_heads=4, rope_theta=1e6),
    "head_dim": replace(GQA, head_dim=24),
    # Some frequencies stay, some are blended, some stretched
    "llama3": replace(GQA, rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=32),
    "llama3-tied-mqa": replace(GQA, kv_heads=1, rope_scaling=LLAMA3, tie_embeddings=True),
}
CORES = sorted(ATTENTION_CORES)


def build(config: ModelConfig, dtype=torch.float64, core="fused") -> Decoder:
    model = Decoder(config, ATTENTION_CORES[core])
    materialise(model, dtype, torch.device("cpu"), random_values(seed=0))
    return model


def liven(model: Decoder) -> Decoder:
    """Larger weights than at first and gains other than 1: attention selects, norms matter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(1 + 0.3 * noise if noise.dim() == 1 else 1.5 / math.sqrt(noise.shape[-1]) * noise)
    return model


def tokens_of(config: ModelConfig, batch=2, seq=80) -> torch.Tensor:
    return torch.randint(config.vocab, (batch, seq), generator=torch.Generator().manual_seed(2))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def peer(model: Decoder, attention: str = "sdpa"):
    """transformers' LlamaForCausalLM with the same weights; its configuration is written a second time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    shape = {"vocab_size": config.vocab, "hidden_size": config.hidden, "intermediate_size": config.ffn}
    shape |= {"num_hidden_layers": config.layers, "tie_word_embeddings": config.tie_embeddings}
    shape |= {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    shape |= {"head_dim": config.head_width, "max_position_embeddings": config.max_positions}
    shape |= {"rms_norm_eps": config.norm_eps, "rope_parameters": rope, "attn_implementation": attention}
    theirs = LlamaForCausalLM(LlamaConfig(**shape)).to(next(model.parameters()).dtype)
    weights = dict(theirs.named_parameters())
    for parameter in model.parameters():
        weights[huggingface_name(parameter.spec.name)].data.copy_(parameter.detach())
    return theirs


def worst_difference(model: Decoder, theirs) -> float:
    """The largest relative difference of the logits, the loss and the gradients of all parameters."""
    tokens = tokens_of(model.config)
    positions = torch.arange(30, 30 + tokens.shape[1])  # beyond the 64 positions before the scaling
    logits, their_logits = model(tokens, positions), theirs(tokens, position_ids=positions[None]).logits
    loss = cross_entropy_sum(logits[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    their_loss = F.cross_entropy(their_logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss + their_loss).backward()
    pairs = [(logits, their_logits), (loss, their_loss)]
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    pairs += [(p.grad, gradients.pop(huggingface_name(p.spec.name))) for p in model.parameters()]
    assert not gradients
    return max(difference(*pair) for pair in pairs)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, core, monkeypatch):
    """2e-6 with transformers as it is; 1e-12 in float64 when its casts to float32 are patched away."""
    model = liven(build(CASES[case], torch.float32, core))
    assert worst_difference(model, peer(model, {"naive": "eager", "fused": "sdpa"}[core])) < 2e-6
    remove_casts(monkeypatch)
    model = liven(build(CASES[case], torch.float64, core))
    assert worst_difference(model, peer(model)) < 1e-12


def remove_casts(monkeypatch) -> None:
    """transformers computes norms and rotary tables in float32, whatever the model's type."""
    from transformers.models.llama import modeling_llama

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def tables(self, x, position_ids):
        rope, d = self.config.rope_parameters, self.config.head_dim
        frequency = rope["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        if rope["rope_type"] == "llama3":  # Llama 3.1's own code, a frequency at a time
            old, factor = rope["original_max_position_embeddings"], rope["factor"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            for i, f in enumerate(frequency.tolist()):
                wavelength = 2 * math.pi / f
                if wavelength > old / low:
                    frequency[i] = f / factor
                elif wavelength >= old / high:
                    smooth = (old / wavelength - low) / (high - low)
                    frequency[i] = (1 - smooth) * f / factor + smooth * f
        angles = position_ids[..., None].double() * frequency
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", tables)


CPU = torch.device("cpu")


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


@pytest.mark.parametrize("tied", [False, True])
def test_materialise(tied):
    model = Decoder(ModelConfig(32, 16, 2, 4, 2, 24, tie_embeddings=tied))
    specs = {name: p.spec for name, p in model.named_parameters()}
    materialise(model, torch.float64, CPU, random_values(5))
    assert (model.head.weight is model.embedding.weight) == tied
    for name, parameter in model.named_parameters():
        assert parameter.spec is specs[name] and parameter.dtype == torch.float64
        assert torch.equal(parameter, random_box(parameter.spec, 5).double())  # drawn in float32 for every type
    assert model.norm.weight.eq(1).all()
    down, embedding = model.layers["0"].mlp.down_proj.weight, model.embedding.weight
    for weight, std in ((down, 0.02 / math.sqrt(4)), (embedding, 0.02 if tied else 1.0), (model.head.weight, 0.02)):
        assert math.isclose(weight.detach().std(), std, rel_tol=0.15)


def test_neighbours_do_not_correlate():
    """Neighbouring seeds, names, rows and columns."""
    pairs = [("layers.0.mlp.up_proj.weight", seed) for seed in (0, 1, 10, 2**40)]
    pairs += [("layers.1.mlp.up_proj.weight", 0), ("layers.0.mlp.gate_proj.weight", 0)]
    base, *others = (random_box(spec_of(400, 500, name=name, std=1.0), seed).flatten() for name, seed in pairs)
    for index, other in enumerate([*others, base.roll(1), base.roll(500), base.roll(256)]):
        for a, b in ((base, other), (base.square() - 1, other.square() - 1)):
            correlation = (a * b).mean() / (a.std() * b.std())
            assert abs(correlation) < 5 / math.sqrt(200_000), index
