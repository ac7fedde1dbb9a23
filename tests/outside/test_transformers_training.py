"""transformers and torch's optimizer as judges: a published model goes in, is trained, and comes out as theirs does."""

import pytest
import torch
import torch.nn.functional as F

from common import export
from common.metrics import read_metrics
from step01_single_gpu.data.batches import load_batches
from step08_5d.train import train
from tests.harness.observing import configure, mesh_of
from tests.unit.test_transformers import in_float64

SIZES = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
KINDS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama, tied, its RoPE scaled": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mixtral": EXPERTS | {"model_type": "mixtral", "num_local_experts": 4},
    "glm4_moe": EXPERTS
    | {"model_type": "glm4_moe", "n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    | {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "partial_rotary_factor": 1.0, "norm_topk_prob": True},
}
FLAGS = "--dtype float64 --data synthetic --seq-len 20 --global-batch 4 --micro-batch 2 --steps 2 --save-every 2"
FLAGS += " --device cpu --lr 0.01 --warmup 0 --clip 0.1 --weight-decay 0.1"


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_change_a_published_model_as_torch_does(kind, tmp_path, monkeypatch):
    """save_pretrained -> --init-from -> two real steps -> the run's checkpoint -> export -> from_pretrained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    in_float64(monkeypatch)
    torch.manual_seed(0)
    settings = AutoConfig.for_model(**SIZES | KINDS[kind], initializer_range=0.2)
    settings._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(settings).double()
    theirs.save_pretrained(tmp_path / "published")
    before = [each.detach().clone() for each in theirs.parameters()]

    experts = "--balance none" if "moe" in kind or kind == "mixtral" else ""
    out, run = tmp_path / "out", tmp_path / "run"
    config = configure(
        8, f"{FLAGS} --model {tmp_path}/published --init-from {tmp_path}/published {experts} --run-dir {run}"
    )
    train(config, mesh_of(config))
    assert export.main([str(run), str(out)]) == 0
    ours = AutoModelForCausalLM.from_pretrained(out, experts_implementation="eager")

    decay = [each for each in theirs.parameters() if each.dim() > 1]
    groups = [{"params": decay, "weight_decay": config.weight_decay}]
    groups += [{"params": [each for each in theirs.parameters() if each.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-5)
    batches = load_batches(config, mesh_of(config))
    for step, record in enumerate(read_metrics(run / "metrics.jsonl")):
        tokens, targets = batches.micro_batch(step, 0, config.global_batch)
        loss = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-10) and norm > config.clip
    for name, mine in ours.named_parameters():
        expected = theirs.get_parameter(name)
        assert (mine - expected).norm() <= 1e-10 * expected.norm(), name
    moved = [(a - b).abs().max().item() for a, b in zip(before, theirs.parameters(), strict=True)]
    assert min(moved) > 1e-3, "every weight has been trained"
