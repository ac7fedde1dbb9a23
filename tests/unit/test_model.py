"""The decoder: parity with transformers' Llama, stages, precision, causality."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.huggingface import huggingface_name
from common.initialisation import materialise, random_values
from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum, rope_tables
from common.model_config import ModelConfig, RopeScaling

GQA = ModelConfig(vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, ffn=112, tie_embeddings=False)
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
CASES = {
    "gqa": GQA,
    "gqa-tied": replace(GQA, tie_embeddings=True),
    "mqa": replace(GQA, kv_heads=1, norm_eps=1e-6),
    "mha": replace(GQA, kv_heads=4, rope_theta=1e6),
    "head_dim": replace(GQA, head_dim=24),
    "llama3": replace(GQA, rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=32),
    "llama3-tied-mqa": replace(GQA, kv_heads=1, rope_scaling=LLAMA3, tie_embeddings=True),
}
CORES = sorted(ATTENTION_CORES)


def build(config: ModelConfig, dtype=torch.float64, core="fused", first=0, last=None, seed=0) -> Decoder:
    model = Decoder(config, ATTENTION_CORES[core], first, last)
    materialise(model, dtype, torch.device("cpu"), random_values(seed))
    return model


def liven(model: Decoder) -> Decoder:
    """Larger weights than initially, gains other than 1: attention that picks, norms that matter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        scale = 1.5 / math.sqrt(parameter.shape[-1])
        parameter.data.copy_(1 + 0.3 * noise if parameter.dim() == 1 else scale * noise)
    return model


def tokens_of(config: ModelConfig, batch=2, seq=80) -> torch.Tensor:
    return torch.randint(config.vocab, (batch, seq), generator=torch.Generator().manual_seed(2))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm()).item()


# ---- parity with transformers -------------------------------------------------------------------------


def peer(model: Decoder, attention: str = "sdpa"):
    """transformers' LlamaForCausalLM with the same weights; its configuration is written a second time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_width,
            tie_word_embeddings=config.tie_embeddings,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_positions,
            rope_parameters=rope,
            attn_implementation=attention,
        )
    ).to(next(model.parameters()).dtype)
    weights = dict(theirs.named_parameters())
    for parameter in model.parameters():
        weights[huggingface_name(parameter.spec.name)].data.copy_(parameter.detach())
    return theirs


def worst_difference(model: Decoder, theirs, loss_of_peer) -> tuple[float, float, float]:
    """Relative differences of logits, loss and the worst gradient of a parameter."""
    tokens = tokens_of(model.config)
    positions = torch.arange(30, 30 + tokens.shape[1])  # across the 64 that were there before the scaling
    logits = model(tokens, positions)
    loss = cross_entropy_sum(logits[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    output = theirs(tokens, position_ids=positions[None], labels=tokens)
    their_loss = loss_of_peer(output, tokens)
    their_loss.backward()
    peers = dict(theirs.named_parameters())
    parameters = list(model.parameters())
    assert len(parameters) == len(peers)
    worst = max(difference(p.grad, peers[huggingface_name(p.spec.name)].grad) for p in parameters)
    return difference(logits, output.logits), difference(loss, their_loss), worst


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, core, monkeypatch):
    """2e-6 as transformers is; 1e-12 in float64 once its own casts to float32 are patched away."""
    model = liven(build(CASES[case], torch.float32, core))
    theirs = peer(model, {"naive": "eager", "fused": "sdpa"}[core])
    assert max(worst_difference(model, theirs, lambda output, _: output.loss)) < 2e-6

    remove_casts(monkeypatch)
    model = liven(build(CASES[case], torch.float64, core))

    def loss(output, tokens):
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    assert max(worst_difference(model, peer(model), loss)) < 1e-12


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


def test_llama3_scaling_has_its_three_regimes():
    """So that the parity above covers all of them: unchanged, blended and stretched frequencies."""
    position = torch.tensor([1])
    scaled, plain = (
        rope_tables(replace(CASES["llama3"], rope_scaling=scaling), position, torch.float64)[1].asin()[0, :16]
        for scaling in (LLAMA3, None)
    )
    ratio = plain / scaled
    assert torch.isclose(ratio, torch.tensor(1.0).double()).sum() >= 2
    assert torch.isclose(ratio, torch.tensor(8.0).double()).sum() >= 2
    assert ((ratio > 1.01) & (ratio < 7.99)).sum() >= 1


# ---- a range of layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (1, 3), (2, 3)])
def test_stages_compose_to_the_whole(cuts, tied):
    config = replace(GQA, layers=4, tie_embeddings=tied)
    whole = build(config)
    edges = (0, *cuts, 4)
    stages = [build(config, first=a, last=b) for a, b in zip(edges, edges[1:])]
    x = tokens = tokens_of(config)
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, whole(tokens), rtol=0, atol=0)

    values = {p.spec.name: p for p in whole.parameters()}
    held = [p for stage in stages for p in stage.parameters()]
    assert {p.spec.name for p in held} == values.keys()
    for parameter in held:
        assert torch.equal(parameter, values[parameter.spec.name])
    if tied:  # the head alone on the last stage is the embedding of the first
        head, embedding = stages[-1].head.weight, stages[0].embedding.weight
        assert head.spec.name == embedding.spec.name == "embedding.weight"
        assert torch.equal(head, embedding)


def test_stage_backward_equals_the_whole():
    config = replace(GQA, layers=2, tie_embeddings=True)
    whole, first, last = build(config), build(config, last=1), build(config, first=1)
    tokens = tokens_of(config)
    for logits in (whole(tokens), last(first(tokens))):
        cross_entropy_sum(logits, tokens).backward()
    gradients = {}
    for parameter in (*first.parameters(), *last.parameters()):  # a tied weight gets two parts
        name = parameter.spec.name
        gradients[name] = gradients.get(name, 0) + parameter.grad
    for parameter in whole.parameters():
        assert difference(gradients[parameter.spec.name], parameter.grad) < 1e-14


def test_tied_parameter_is_one():
    model = build(replace(GQA, tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len({p.spec.name for p in model.parameters()}) == 2 * 9 + 2


# ---- precision ----------------------------------------------------------------------------------------


class Only64(TorchDispatchMode):
    """Fails when any operation makes a floating-point tensor that is not float64."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                assert leaf.dtype == torch.float64, f"{function} makes {leaf.dtype}"
                self.seen += 1
        return result


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", ["gqa-tied", "llama3"])
def test_float64_never_passes_through_float32(case, core):
    model, tokens = build(CASES[case], core=core), tokens_of(GQA)
    with Only64() as mode:
        cross_entropy_sum(model(tokens), tokens).backward()
    assert mode.seen > 100


@pytest.mark.parametrize("core", CORES)
def test_bfloat16_runs_near_float32(core):
    config = CASES["llama3"]
    narrow, full = build(config, torch.bfloat16, core), build(config, torch.float32, core)
    tokens = tokens_of(config)
    logits = narrow(tokens)
    loss = cross_entropy_sum(logits, tokens)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in narrow.parameters())
    assert difference(logits, full(tokens)) < 0.03  # bf16 has 8 bits: 0.4% a rounding


def test_bfloat16_rope_tables_are_float32():
    for table in rope_tables(GQA, torch.arange(5), torch.bfloat16):
        assert table.dtype == torch.float32


# ---- attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gqa", "mqa", "mha", "llama3"])
def test_naive_and_fused_agree(case):
    results = []
    for core in CORES:
        model, tokens = liven(build(CASES[case], core=core)), tokens_of(GQA)
        logits = model(tokens)
        cross_entropy_sum(logits, tokens).backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    assert max(difference(a, b) for a, b in zip(*results, strict=True)) < 1e-12


@pytest.mark.parametrize("core", CORES)
def test_causality(core):
    model, tokens = liven(build(CASES["llama3"], core=core)), tokens_of(GQA)
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 50] = (changed[:, 50] + 1) % GQA.vocab
    after = model(changed)
    assert difference(after[:, :50], before[:, :50]) < 1e-14
    assert ((after - before)[:, 50:].abs().amax(-1) > 1e-6).all()  # it is not causal by ignoring everything


@pytest.mark.parametrize("core", CORES)
def test_logits_depend_on_distances_alone(core):
    """RoPE is relative: shifting all positions changes nothing. Other positions do."""
    model, tokens = liven(build(GQA, core=core)), tokens_of(GQA)
    positions = torch.arange(tokens.shape[1])
    default = model(tokens)
    assert torch.equal(model(tokens, positions), default)
    assert difference(model(tokens, positions + 1000), default) < 1e-10
    assert difference(model(tokens, positions * 2), default) > 1e-3


def test_cross_entropy_sum_is_a_sum():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
    torch.testing.assert_close(cross_entropy_sum(logits, targets), expected)
