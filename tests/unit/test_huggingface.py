"""The border to Hugging Face: what a config.json may say, and runs that go out to transformers and come back."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from common import export
from common.checkpoints import boxes, checkpoint
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.metrics import read_metrics
from common.presets import EXPERT_NAMES, HUGGINGFACE_NAMES, LATENT_NAMES, resolve
from common.weights.initialisation import random_values
from step01_single_gpu.data.batches import load_batches
from step01_single_gpu.initial_weights import _reader, stored_values
from step01_single_gpu.train import train as train_dense
from step07_expert_parallel.train import train as train_experts
from step08_5d.train import build as build_5d
from step08_5d.train import train as train_5d
from tests.harness.observing import configure, mesh_of
from tests.unit.test_transformers import built, config_of, difference

SMALL = "--layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 64 --vocab 384 --seq-len 32 --global-batch 2 --steps 2"
FAMILIES = {  # of presets, and flags that make them small
    "smollm-135m": "",
    "llama3-1b": "",
    "mixtral-8x7b": "--experts 4 --expert-ffn 48 --balance none",
    "deepseek-v3-like": "--experts 8 --top-k 2 --expert-ffn 32 --dense-layers 1 --expert-groups 4 --node-limit 2",
}


@pytest.mark.parametrize("preset, fp8", [*((preset, "none") for preset in FAMILIES), ("mixtral-8x7b", "delayed")])
def test_a_run_of_each_family_of_presets_can_be_exported_and_trained_on(preset, fp8, tmp_path):
    """Real run -> its checkpoint, moved away from its record -> export -> transformers -> --init-from of a real run."""
    from transformers import AutoModelForCausalLM

    def trained(run_dir, flags: str) -> list[dict]:
        flags = f"--model {preset} {SMALL} {FAMILIES[preset]} --data synthetic --device cpu --run-dir {run_dir} {flags}"
        step, train = (7, train_experts) if "experts" in flags else (1, train_dense)
        if fp8 != "none":  # whose histories are no weights
            step, train, flags = 8, train_5d, f"{flags} --fp8 {fp8}"
        config = configure(step, flags)
        train(config, mesh_of(config))
        return config, read_metrics(run_dir / "metrics.jsonl")

    config, _ = trained(tmp_path / "run", "--lr 0.03 --warmup 0 --save-every 2")
    moved = (tmp_path / "run/checkpoints/step-00000002").rename(tmp_path / "moved")
    assert export.main([str(moved), str(tmp_path / "out")]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["moved", "out", "run"]
    theirs, shape = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), config.model_config
    assert resolve(str(tmp_path / "out")).rope_scaling == shape.rope_scaling == resolve(preset).rope_scaling
    ends = theirs.generation_config  # of synthetic documents, which no tokenizer has made
    assert (ends.eos_token_id, ends.bos_token_id, ends.pad_token_id) == (0, None, None)
    assert not (tmp_path / "out/tokenizer_config.json").exists()
    ours, tensors = built(config, random_values(seed=1))
    checkpoint.load(
        moved, [box for each in tensors for box in SavedBox.of("parameter", each.spec, each)], mesh_of(config)
    )
    tokens = torch.randint(1, 300, (1, 4000), generator=torch.Generator().manual_seed(2))  # so far, a RoPE differs
    with torch.no_grad():
        assert difference(ours(tokens), theirs(tokens).logits) < 1e-5
        tokens, targets = load_batches(config, mesh_of(config)).micro_batch(0, 0, 2)
        expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten()).item()
    _, records = trained(tmp_path / "again", f"--init-from {tmp_path / 'out'}")
    assert records[0]["loss"] == pytest.approx(expected, rel=1e-5 if fp8 == "none" else 1e-2)


def test_a_second_prediction_goes_out_and_comes_back(tmp_path):
    """transformers opens the model without the block; --init-from reads it, or leaves it out if it is not trained."""
    from transformers import AutoModelForCausalLM

    def configured(flags: str):
        flags = f"{SMALL} {FAMILIES['deepseek-v3-like']} --data synthetic --device cpu --lr 0.03 --warmup 0 {flags}"
        config = configure(8, f"--model deepseek-v3-like {flags}")
        return config, mesh_of(config)

    def values(parameters) -> dict[str, torch.Tensor]:
        return {each.spec.name: each.detach().flatten() for each in parameters}

    out = str(tmp_path / "out")
    trained = values(train_5d(*configured(f"--mtp 1 --run-dir {tmp_path / 'run'} --save-every 2")))
    assert export.main([str(tmp_path / "run"), out]) == 0
    _, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"] and all(name.startswith("model.layers.2.") for name in found["unexpected_keys"])
    of_block = {f"model.layers.2.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    assert of_block < set(found["unexpected_keys"])
    published = load_file(f"{out}/model.safetensors")  # DeepSeek's have the shared tables once more
    for name, table in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        published[f"model.layers.2.{name}.weight"] = published[f"{table}.weight"].clone()
    save_file(published, f"{out}/model.safetensors")
    for flags, lacks in (("--mtp 1", 0), ("", 4 + 4 + 2 + 2 + 3 + 3)):  # its own, attention, norms, router, experts
        _, optimizer, _ = build_5d(*configured(f"{flags} --init-from {out}"))
        again = values([*optimizer.parameters, *optimizer.buffers])
        assert all(torch.equal(trained[name], value) for name, value in again.items())
        assert len(trained) - len(again) == lacks
    del published["model.layers.2.eh_proj.weight"]
    save_file(published, f"{out}/model.safetensors")
    with pytest.raises(UsageError, match="the shape of model.layers.2.eh_proj.weight is None"):
        build_5d(*configured(f"--mtp 1 --init-from {out}"))


PARTIAL, HALF = {"partial_rotary_factor": 0.5}, {"rope_type": "default", "rope_theta": 1e4}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
COMPUTED = [  # a model of transformers, what its config.json says, and what is refused (None: nothing)
    ("llama", {"attention_bias": True}, "attention_bias True"),
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ("llama", {"is_causal": False}, "is_causal False"),
    ("llama", PARTIAL, "rope_parameters {"),
    ("llama", {"rope_parameters": HALF | PARTIAL}, "rope_parameters {"),
    ("llama", {"rope_parameters": HALF | SCALED | PARTIAL | {"rope_type": "llama3"}}, "rope_parameters {"),
    ("llama", PARTIAL | {"rope_scaling": SCALED | {"rope_type": "llama3"}}, "rope_parameters {"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters {"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters {"),
    ("llama", {"rope_scaling": SCALED | {"rope_type": "llama3", "factor": "8"}}, "cannot be read ("),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "cannot be read ("),
    ("llama", {"rope_theta": "10000"}, "cannot be read ("),
    ("llama", {"rope_theta": 0}, "rope_parameters {"),
    ("llama", {"rope_scaling": SCALED | {"type": "llama3"}}, None),  # as it was spelled once
    ("llama", {"rope_parameters": HALF | SCALED | {"rope_type": "llama3", "rope_theta": 5e5}}, None),
    ("llama", {"pretraining_tp": 2}, None),  # divides products, and changes none
    ("llama", {"head_dim": 24, "tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}, None),
    ("mistral", {}, "sliding_window 4096"),  # what it is when nothing is said
    ("mistral", {"sliding_window": 0}, "sliding_window 0"),
    ("mistral", {"sliding_window": None}, None),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    ("glm4_moe", {}, "rope_parameters {"),  # half of each head, when nothing is said
    ("glm4_moe", {"partial_rotary_factor": 1.0, "use_qk_norm": True}, "use_qk_norm True"),
    ("glm4_moe", {"partial_rotary_factor": 1.0, "n_group": 2}, None),  # without head_dim
    ("gpt2", {}, "model_type gpt2"),
]
READ = {*HUGGINGFACE_NAMES.values(), *(each for names in EXPERT_NAMES.values() for each in names.values())}
READ |= {"model_type", "attention_bias", "mlp_bias", "hidden_act", "attention_dropout", "is_causal", "sliding_window"}
READ |= {*LATENT_NAMES.values(), "rope_interleave", "rope_parameters", "router_jitter_noise", "use_qk_norm"}
# What a forward pass does not depend on: how it is computed, its initial values, and the terms of their own loss
READ |= {"_attn_implementation", "initializer_range", "pad_token_id", "output_router_logits", "router_aux_loss_coef"}


def written(folder: Path, kind: str, changes: dict) -> str:
    """A small model's config.json as people publish it. Returns its folder."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_theta": 1e4}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    folder.mkdir()
    content = {"model_type": kind} | sizes | (experts if kind in ("mixtral", "glm4_moe") else {}) | changes
    if "rope_parameters" in content:
        del content["rope_theta"]
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("kind, changes, refused", COMPUTED)
def test_what_changes_the_computation_is_honoured_or_refused(kind, changes, refused, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = written(tmp_path / "model", kind, changes)
    if refused:
        with pytest.raises(UsageError) as caught:
            resolve(folder, "--init-from")
        line = str(caught.value)
        assert line.startswith(f"--init-from {folder} ") and refused in line and "\n" not in line, line
        return
    config = config_of(resolve(folder))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs.save_pretrained(tmp_path / "weights")
    ours, _ = built(config, stored_values(str(tmp_path / "weights"), config.model_config))
    tokens = torch.randint(1, 96, (2, 200), generator=torch.Generator().manual_seed(0))
    assert difference(ours(tokens), theirs(tokens).logits) < 5e-6


def test_transformers_reads_nothing_else_from_a_configuration():
    """A field that is new there may change the computation: it has to be honoured, refused, or found harmless."""
    import transformers

    for kind in ("llama", "mistral", *EXPERT_NAMES):
        source = Path(transformers.__file__).parent / f"models/{kind}/modeling_{kind}.py"
        found = re.findall(r"config\.(\w+)|getattr\([\w.]*config, \"(\w+)\"", source.read_text(encoding="utf-8"))
        fields = {name for names in found for name in names if name}
        assert "rms_norm_eps" in fields and fields <= READ


def test_the_files_of_the_weights_are_those_that_transformers_reads(tmp_path):
    """Whatever else lies beside them: another format's, or an older save's."""
    files = {"model.safetensors": 1.0, "consolidated.safetensors": 2.0}

    def save(values: dict[str, float], weight_map: dict[str, str] | None = None, **names: str) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for file, value in values.items():
            save_file({names.get(file[0], "w"): torch.full((2,), value)}, folder / file)
        if weight_map is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    def read(folder: Path) -> dict[str, float]:
        reader = _reader(str(folder))
        found = {name: torch.zeros(2) for name in reader.read_metadata().state_dict_metadata}
        boxes.read(reader, [SavedBox(name, (2,), ((0, 2),), values) for name, values in found.items()])
        return {name: values[0].item() for name, values in found.items()}

    single, old = save(files), save(files | {"model-00001-of-00002.safetensors": 3.0})
    assert read(single) == read(old) == {"w": 1.0}
    parts = {"a-1.safetensors": 4.0, "b-2.safetensors": 5.0}
    assert read(save(parts, a="v", b="w")) == {"v": 4.0, "w": 5.0}, "without an index all files count"
    index = {"v": "a-1.safetensors", "w": "b-2.safetensors"}
    assert read(save(parts | {"c-3.safetensors": 6.0}, index, a="v", b="w", c="w")) == {"v": 4.0, "w": 5.0}
    for folder, words in [
        (save(files | parts, index), "it holds model.safetensors and model.safetensors.index.json, which names other"),
        (
            save(parts, {"w": "a-1.safetensors", "v": "b-2.safetensors"}),
            "it holds only a part of w, or several versions",
        ),
    ]:
        with pytest.raises(UsageError, match=f"{re.escape(words)}"):
            read(folder)
