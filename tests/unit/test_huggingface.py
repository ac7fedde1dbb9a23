"""Weights for and from Hugging Face: what is refused, and a reader that counts. test_transformers has round trips."""

import json
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from common.errors import UsageError
from common.weights import export
from step01_single_gpu.initial_weights import stored_values
from tests.unit.test_transformers import GQA, config_of, exported

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
    exported(tmp_path / "out", config_of(GQA))
    cases = [("a/b/c", GQA, "cannot be read ("), ("owner/no-such-model", GQA, "cannot be read (")]
    for field, here in {"heads": 8, "rope_theta": 5e5, "norm_eps": 1e-6, "layers": 3, "tie_embeddings": True}.items():
        cases.append((str(tmp_path / "out"), replace(GQA, **{field: here}), "is another model: its "))
    for number, (name, content, words) in enumerate(REFUSED):
        folder = shutil.copytree(tmp_path / "out", tmp_path / str(number))
        if name in (NORM, UNKNOWN):
            weights = load_file(folder / "model.safetensors") | {name: content}
            save_file({key: value for key, value in weights.items() if value is not None}, folder / "model.safetensors")
        else:
            (folder / name).write_bytes(content) if content else (folder / name).unlink()
        cases.append((str(folder), GQA, words))
    for name_or_path, config, words in cases:
        with pytest.raises(UsageError) as caught:
            stored_values(name_or_path, config)
        line = str(caught.value)
        assert line.startswith(f"--init-from {name_or_path}") and words in line and "\n" not in line, line


def test_export_is_refused_in_one_line(tmp_path, capsys):
    exported(tmp_path / "out", config_of(GQA))
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
