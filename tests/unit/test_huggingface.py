"""Weights from and for Hugging Face: round trips through transformers, reading of boxes, refusals."""

import json
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from common.checkpoints import checkpoint
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.model import Decoder
from common.model_config import ModelConfig, RopeScaling
from common.presets import resolve
from common.process_groups import Degrees, build_mesh
from common.weights import export
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.initial_weights import stored_values

SMALL = ModelConfig(384, 32, 2, 4, 2, 48, tie_embeddings=False, max_positions=256)
TIED = replace(SMALL, tie_embeddings=True, norm_eps=1e-6)
LLAMA3 = replace(SMALL, rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), kv_heads=1)
CPU = torch.device("cpu")


def built(config: ModelConfig, dtype: torch.dtype, values, **layers) -> Decoder:
    model = Decoder(config, **layers)
    materialise(model, dtype, CPU, values)
    return model


def exported(folder: Path, config=SMALL, dtype=torch.float32) -> Decoder:
    """A random model, which the command has exported to `folder` from a checkpoint in `folder`-run."""
    model = built(config, dtype, random_values(seed=0))
    for parameter in model.parameters():
        parameter.data.mul_(5)  # far from uniform logits
    boxes = [box for p in model.parameters() for box in SavedBox.of("parameter", p.spec, p)]
    run = folder.with_name(f"{folder.name}-run")
    checkpoint.save(run, 1, boxes, {}, build_mesh(Degrees(), CPU))
    record = {"model_config": asdict(config), "dtype": str(dtype).removeprefix("torch."), "tokenizer": None}
    (run / "config.json").write_text(json.dumps(record))
    assert export.main([str(run), str(folder)]) == 0
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [SMALL, TIED, LLAMA3, replace(SMALL, head_dim=16, vocab=300)])
def test_round_trip(config, dtype, tmp_path):
    """Random model -> checkpoint -> export -> transformers: the same logits -> stored_values: the same bits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = exported(tmp_path / "out", config, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == dtype
    again = built(config, dtype, stored_values(str(tmp_path / "out"), config))
    for loaded, parameter in zip(again.parameters(), model.parameters(), strict=True):
        assert loaded.dtype == dtype and torch.equal(loaded, parameter)
    assert resolve(str(tmp_path / "out")) == replace(config, head_dim=config.head_width)
    assert ("lm_head.weight" in load_file(tmp_path / "out/model.safetensors")) != config.tie_embeddings
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (1, 0)
    assert (tmp_path / "out/tokenizer_config.json").exists() == (config.vocab >= 384), "ids must fit the model"
    if config == SMALL:
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("é")["input_ids"] == [198, 172, 1]

    if dtype == torch.bfloat16:  # in which the two round in different places
        model, theirs = model.float(), theirs.float()
    tokens = torch.randint(300, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, other = model(tokens), theirs(tokens).logits
    # float64: transformers computes norms and rotary tables in float32 (test_model.py goes to 1e-12)
    assert (ours - other).norm() / other.norm() < (2e-6 if dtype == torch.float64 else 1e-6)


def test_checkpoint_on_the_hub_that_transformers_saved_in_several_files(tmp_path, monkeypatch):
    import huggingface_hub
    from transformers import LlamaConfig, LlamaForCausalLM

    exported(tmp_path / "out", replace(LLAMA3, tie_embeddings=True))
    theirs, folder = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "out")), tmp_path / "shards"
    theirs.save_pretrained(folder, max_shard_size="20KB")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.zeros(384, 32)}
    save_file(extra, folder / "model-as-old-files.safetensors")  # which are no parameters of their own

    def download(name, allow_patterns):
        files = ["config.json", "model-1-of-2.safetensors", "pytorch_model.bin", "consolidated.safetensors"]
        assert list(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns)) == files[:2]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = replace(resolve(str(folder)), max_positions=10**6)  # a longer context is no other model
    x = tokens = torch.randint(384, (2, 100))
    for layers in ({"last": 1}, {"first": 1}):  # pipeline stages; the last one's tied head is the embedding
        x = built(config, torch.float32, stored_values("owner/Model-1.7B", config), **layers)(x)
    torch.testing.assert_close(x, theirs(tokens).logits, rtol=0, atol=1e-6)


elements_read: Counter[str] = Counter()  # of each weight
REAL_SAFE_OPEN = safetensors.safe_open


class CountedSlice:
    def __init__(self, name, view):
        self.name, self.view, self.get_shape, self.get_dtype = name, view, view.get_shape, view.get_dtype

    def __getitem__(self, index):
        values = self.view[index]
        elements_read[self.name] += values.numel()
        return values


@contextmanager
def counting_safe_open(*args, **kwargs):
    """safetensors.safe_open that allows slices only, and counts the elements read of each weight."""
    with REAL_SAFE_OPEN(*args, **kwargs) as file:
        yield SimpleNamespace(
            keys=file.keys, metadata=file.metadata, get_slice=lambda name: CountedSlice(name, file.get_slice(name))
        )


NORM, UNKNOWN = "model.layers.1.post_attention_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
REFUSED = [  # a weight or a file, what it becomes (None: it is missing), and words of the line
    (NORM, None, f"{NORM} is None, that of --model is (32,)"),
    (NORM, torch.ones(33), f"{NORM} is (33,), that of --model is (32,)"),
    (NORM, torch.ones(32, dtype=torch.float8_e4m3fn), f"{NORM} is quantised (torch.float8"),
    (UNKNOWN, torch.ones(2, 2), f"{UNKNOWN} is (2, 2), that of --model is None"),
    ("model.safetensors", b"x" * 100, "cannot be read ("),
    ("model.safetensors", None, "cannot be read (it holds no .safetensors files"),
    ("config.json", b"{", "cannot be read (It looks like the config"),
]


def test_loading_is_refused_in_one_line(tmp_path):
    exported(tmp_path / "out")
    cases = [("a/b/c", SMALL, "cannot be read ("), ("owner/no-such-model", SMALL, "cannot be read (")]
    for field, here in {"heads": 8, "rope_theta": 5e5, "norm_eps": 1e-6, "layers": 3, "tie_embeddings": True}.items():
        cases.append((str(tmp_path / "out"), replace(SMALL, **{field: here}), "is another model: its "))
    for number, (name, content, words) in enumerate(REFUSED):
        folder = shutil.copytree(tmp_path / "out", tmp_path / str(number))
        if name in (NORM, UNKNOWN):
            weights = load_file(folder / "model.safetensors") | {name: content}
            save_file({key: value for key, value in weights.items() if value is not None}, folder / "model.safetensors")
        else:
            (folder / name).write_bytes(content) if content else (folder / name).unlink()
        cases.append((str(folder), SMALL, words))
    for name_or_path, config, words in cases:
        with pytest.raises(UsageError) as caught:
            stored_values(name_or_path, config)
        line = str(caught.value)
        assert line.startswith(f"--init-from {name_or_path}") and words in line and "\n" not in line, line


def test_export_is_refused_in_one_line(tmp_path, capsys):
    exported(tmp_path / "out")
    run, new, config = tmp_path / "out-run", tmp_path / "new", tmp_path / "out-run/config.json"
    for source, out, words in [
        ("auto", new, "./auto: there is no complete checkpoint"),
        (run, tmp_path / "out", f"{tmp_path / 'out'} is not empty"),
        (run, config, "File exists"),
        (run, new, "error: --tokenizer no/tokenizer cannot be read ("),
    ]:
        if "--tokenizer" in words:
            config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer": "no/tokenizer"}))
        capsys.readouterr()
        assert export.main([str(source), str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1, error
