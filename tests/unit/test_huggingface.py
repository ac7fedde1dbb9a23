"""Weights from and for Hugging Face: round trips through transformers, reading of boxes, refusals."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from common import export
from common.checkpoints import checkpoint
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.huggingface import huggingface_name, stored_values
from common.initialisation import materialise, random_values
from common.model import Decoder
from common.model_config import ModelConfig, RopeScaling
from common.presets import resolve
from common.process_groups import Degrees, build_mesh

SMALL = ModelConfig(384, 32, 2, 4, 2, 48, tie_embeddings=False, max_positions=256)
TIED = replace(SMALL, tie_embeddings=True, norm_eps=1e-6)
LLAMA3 = replace(SMALL, rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), kv_heads=1)
CPU = torch.device("cpu")


def built(config: ModelConfig, dtype: torch.dtype, values, **layers) -> Decoder:
    model = Decoder(config, **layers)
    materialise(model, dtype, CPU, values)
    return model


def exported(folder: Path, config=SMALL, dtype=torch.float32, tokenizer: str | None = None) -> Decoder:
    """A random model, which `python -m common.export` has written to `folder` from a checkpoint."""
    model = built(config, dtype, random_values(seed=0))
    boxes = []
    for parameter in model.parameters():
        parameter.data.mul_(5)  # far from uniform logits
        boxes += SavedBox.of("parameter", parameter.spec, parameter)
    run = folder.with_name("run")
    checkpoint.save(run, 1, boxes, {}, build_mesh(Degrees(), CPU))
    record = {"model_config": asdict(config), "dtype": str(dtype).removeprefix("torch."), "tokenizer": tokenizer}
    (run / "config.json").write_text(json.dumps(record))
    assert export.main([str(run), str(folder)]) == 0
    return model


@pytest.fixture
def folder(tmp_path) -> Path:
    """The exported small model."""
    exported(tmp_path / "export")
    return tmp_path / "export"


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [SMALL, TIED, LLAMA3, replace(SMALL, head_dim=16)])
def test_round_trip(config, dtype, tmp_path):
    """Random model -> checkpoint -> export -> transformers: the same logits -> stored_values: the same bits."""
    from transformers import AutoModelForCausalLM

    model = exported(tmp_path / "export", config, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == dtype
    again = built(config, dtype, stored_values(str(tmp_path / "export"), config))
    for loaded, parameter in zip(again.parameters(), model.parameters(), strict=True):
        assert loaded.dtype == dtype and torch.equal(loaded, parameter)
    assert resolve(str(tmp_path / "export")) == replace(config, head_dim=config.head_width)
    stored = load_file(tmp_path / "export/model.safetensors")
    assert ("lm_head.weight" in stored) != config.tie_embeddings, "a tied head is stored once"

    if dtype == torch.bfloat16:  # in which the two round in different places
        model, theirs = model.float(), theirs.float()
    tokens = torch.randint(384, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, other = model(tokens), theirs(tokens).logits
    # float64: transformers computes norms and rotary tables in float32 (test_model.py goes to 1e-12)
    assert (ours - other).norm() / other.norm() < (2e-6 if dtype == torch.float64 else 1e-6)


def test_generation_and_tokenizers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

    model = exported(tmp_path / "export")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (1, 0)
    prompt = tokenizer("héllo", add_special_tokens=False, return_tensors="pt").input_ids
    assert prompt.tolist() == [[byte + 3 for byte in "héllo".encode()]]
    produced = theirs.generate(prompt, max_new_tokens=8, do_sample=False)
    while prompt.shape[1] < produced.shape[1]:
        prompt = torch.cat((prompt, model(prompt)[:, -1:].argmax(-1)), 1)
    assert torch.equal(produced, prompt)

    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "mine")
    exported(tmp_path / "other", tokenizer=str(tmp_path / "mine"))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "other")) == 259
    exported(tmp_path / "few", replace(SMALL, vocab=64))
    assert not (tmp_path / "few/tokenizer_config.json").exists(), "its ids would not fit the model"


def test_checkpoint_that_transformers_saved_in_several_files(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.zeros(100, 32)}
    save_file(extra, tmp_path / "model-as-old-files.safetensors")  # which are no parameters of their own

    config = replace(resolve(str(tmp_path)), max_positions=10**6)  # a longer context is no other model
    model = built(config, torch.float32, stored_values(str(tmp_path), config))
    assert model.head.weight is model.embedding.weight
    x = tokens = torch.randint(100, (2, 100))
    for layers in ({"last": 1}, {"first": 1}):  # pipeline stages; the last one's tied head is the embedding
        x = built(config, torch.float32, stored_values(str(tmp_path), config), **layers)(x)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-6)
    assert torch.equal(x, model(tokens))


# ---- boxes -----------------------------------------------------------------------------------------------------------


class Reads:
    """Replaces safetensors.safe_open: allows slices only, and counts the elements that were read of each weight."""

    elements: dict[str, int] = {}

    def __init__(self, *args, **kwargs):
        self.file = REAL_SAFE_OPEN(*args, **kwargs)
        self.keys, self.metadata = self.file.keys, self.file.metadata

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def get_slice(self, name):
        view = self.file.get_slice(name)

        def read(_, index):
            values = view[index]
            Reads.elements[name] = Reads.elements.get(name, 0) + values.numel()
            return values

        shape, kind = view.get_shape, view.get_dtype
        return type("Slice", (), {"__getitem__": read, "get_shape": shape, "get_dtype": kind})()


REAL_SAFE_OPEN = safetensors.safe_open
BOXES = {
    "embedding.weight": ((288, 400), (0, 32)),  # vocabulary rows, the last 16 of which are padding
    "layers.0.attention.q_proj.weight": ((8, 16), (0, 32)),
    "layers.1.mlp.down_proj.weight": ((0, 32), (12, 36)),
    "layers.1.mlp_norm.weight": ((5, 9),),
    "head.weight": ((384, 400), (0, 32)),  # nothing but padding
}


@pytest.mark.parametrize("flat", [None, (7, 101), (0, 5)])
def test_only_boxes_are_read(flat, tmp_path, monkeypatch):
    """Slices of tensor parallelism, and flat ranges of them, as ZeRO's shards have; into another dtype."""
    whole = {p.spec.name: p.double() for p in exported(tmp_path / "export").parameters()}
    monkeypatch.setattr(safetensors, "safe_open", Reads)
    tensors, expected, count = [], [], {}
    for name, box in BOXES.items():
        region = torch.zeros([stop - start for start, stop in box], dtype=torch.float64)
        inside = torch.zeros_like(region)
        values = whole[name][tuple(slice(start, stop) for start, stop in box)]
        region[: len(values)], inside[: len(values)] = values, 1
        piece = slice(*(flat or (None,)))
        tensors.append(torch.full_like(region.flatten()[piece] if flat else region, 9))
        flat_range = flat and (flat[0], flat[0] + tensors[-1].numel())
        spec = next(p.spec for p in Decoder(SMALL).parameters() if p.spec.name == name)
        tensors[-1].spec = replace(spec, box=box, flat_range=flat_range)
        expected.append(region.flatten()[piece] if flat else region)
        count[huggingface_name(name)] = int(inside.flatten()[piece].sum())
    Reads.elements = {}
    stored_values(str(tmp_path / "export"), SMALL)(tensors)
    for tensor, values in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, values), tensor.spec.name
    assert Reads.elements == {name: elements for name, elements in count.items() if elements}


# ---- refusals --------------------------------------------------------------------------------------------------------


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | {name: tensor}
    save_file({key: value for key, value in weights.items() if value is not None}, folder / "model.safetensors")


NORM, UNKNOWN = "model.layers.1.post_attention_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
DAMAGES = {
    f"{NORM} is None, that of --model is (32,)": lambda folder: change(folder, NORM, None),
    f"{NORM} is (33,), that of --model is (32,)": lambda folder: change(folder, NORM, torch.ones(33)),
    f"{NORM} is quantised (torch.int8)": lambda folder: change(folder, NORM, torch.ones(32, dtype=torch.int8)),
    f"{NORM} is quantised (torch.float8": lambda f: change(f, NORM, torch.ones(32, dtype=torch.float8_e4m3fn)),
    f"{UNKNOWN} is (2, 2), that of --model is None": lambda folder: change(folder, UNKNOWN, torch.ones(2, 2)),
    "cannot be read (": lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
    "cannot be read ( ": lambda folder: (folder / "model.safetensors").open("r+").truncate(1000),
    "cannot be read (it holds no .safetensors files)": lambda folder: (folder / "model.safetensors").unlink(),
    "cannot be read (It looks like the config": lambda folder: (folder / "config.json").write_text("{"),
    "has model_type gpt2": lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'),
}


def refusal(name_or_path: str, config: ModelConfig = SMALL) -> str:
    """The one line that a UsageError says."""
    with pytest.raises(UsageError) as caught:
        stored_values(name_or_path, config)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"--init-from {name_or_path}")
    return str(caught.value)


def test_damaged_and_foreign_checkpoints_are_refused(folder, tmp_path):
    for number, (words, damage) in enumerate(DAMAGES.items()):
        damaged = shutil.copytree(folder, tmp_path / str(number))
        damage(damaged)
        assert words.strip() in refusal(str(damaged)), words
    for field, here in {"heads": 8, "rope_theta": 5e5, "norm_eps": 1e-6, "layers": 3, "tie_embeddings": True}.items():
        line = refusal(str(folder), replace(SMALL, **{field: here}))
        assert line.endswith(f": its {field} is {getattr(SMALL, field)}, that of --model {here}") or field == "heads"
        assert "is another model" in line, "even if all shapes agree"
    for name in ("", "smollm-135m", str(tmp_path / "nothing"), "a/b/c", "owner/no-such-model"):
        assert "cannot be read (" in refusal(name)


def test_hub_checkpoint(folder, monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *names, **o: asked.update(o, names=names) or str(folder)
    )
    model = built(SMALL, torch.float32, stored_values("owner/Model-1.7B", SMALL))
    assert torch.equal(model.norm.weight, torch.full((32,), 5.0)) and asked["names"] == ("owner/Model-1.7B",)
    files = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"]
    assert (
        list(huggingface_hub.utils.filter_repo_objects(files + others, allow_patterns=asked["allow_patterns"])) == files
    )


def test_what_cannot_be_exported_is_one_line(folder, tmp_path, capsys):
    run, _ = str(tmp_path / "run"), capsys.readouterr()
    (tmp_path / "file").write_text("")
    record = json.loads((tmp_path / "run/config.json").read_text())
    for source, out, tokenizer, words in [
        (str(tmp_path / "nothing"), "out", None, "nothing: there is no complete checkpoint"),
        ("auto", "out", None, "./auto: there is no complete checkpoint"),
        (run, folder, None, f"{folder} is not empty"),
        (run, tmp_path / "file", None, "File exists"),
        (run, tmp_path / "file/out", None, "Not a directory"),
        (run, tmp_path / "out", str(tmp_path / "no-tokenizer"), "no-tokenizer"),
    ]:
        (tmp_path / "run/config.json").write_text(json.dumps(record | {"tokenizer": tokenizer}))
        assert export.main([source, str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()
