"""Experts as transformers has them: the same logits and gradients, and its files, written and read."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from common.checkpoints import checkpoint
from common.checkpoints.boxes import SavedBox
from common.config import TrainConfig
from common.errors import UsageError
from common.model import Decoder
from common.presets import resolve
from common.process_groups import Group
from common.weights import export
from common.weights.huggingface import as_stored
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.initial_weights import stored_values
from step07_expert_parallel.moe import apply_experts
from step07_expert_parallel.router import Router
from tests.harness.observing import configure, mesh_of

BASE = "--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 96 --seq-len 20 --global-batch 2 --micro-batch 2"
BASE += " --balance none --data synthetic --device cpu"
FAMILIES = {  # transformers' type, and the flags
    "mixtral": "--experts 6 --top-k 2 --expert-ffn 40",
    "glm4_moe": "--experts 8 --top-k 3 --gate sigmoid --shared-experts 2 --expert-ffn 24 --dense-layers 1"
    " --expert-groups 4 --node-limit 2",
}
CPU, ALONE = torch.device("cpu"), Group("ep", (0,), 0)


def built(config: TrainConfig, values, ep: Group = ALONE) -> tuple[Decoder, list[torch.Tensor]]:
    """A model and all that is saved of it: parameters and the biases of routers."""
    model = Decoder(config.model_config)
    apply_experts(model, config, replace(mesh_of(config), ep=ep))
    materialise(model, config.torch_dtype, CPU, values)
    tensors = [*model.parameters(), *(each.bias for each in model.modules() if isinstance(each, Router))]
    values(tensors)
    return model, tensors


def exported(folder: Path, config: TrainConfig, biased: bool = True) -> tuple[Decoder, list[torch.Tensor]]:
    """A random model, and a folder that `python -m common.export` makes of its checkpoint."""
    model, tensors = built(config, random_values(seed=0))
    for tensor in tensors:
        if tensor.spec.name.endswith("bias"):
            tensor.copy_(torch.linspace(0, 0.3 * biased, len(tensor)))
        else:
            tensor.data.mul_(5)
    boxes = [box for each in tensors for box in SavedBox.of("parameter", each.spec, each)]
    run = folder.with_name(f"{folder.name}-run")
    checkpoint.save(run, 1, boxes, {}, mesh_of(config))
    (run / "config.json").write_text(
        json.dumps({"model_config": asdict(config.model_config), "dtype": config.dtype, "tokenizer": None})
    )
    assert export.main([str(run), str(folder)]) == 0
    return model, tensors


def in_float64(monkeypatch, module) -> None:
    """transformers computes norms, rotary tables and scores in float32, whatever the model's type."""
    wide = {"float32": torch.float64, "float": torch.float64}
    monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), **wide}))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_gradients_and_back_again(family, dtype, tmp_path, monkeypatch):
    """Random model -> checkpoint -> export -> transformers -> its own files -> the same bits."""
    from transformers import AutoModelForCausalLM
    from transformers.models.glm4_moe import modeling_glm4_moe
    from transformers.models.mixtral import modeling_mixtral

    config = configure(7, f"{BASE} {FAMILIES[family]} --dtype {dtype}")
    model, tensors = exported(tmp_path / "out", config, biased=family == "glm4_moe")
    if dtype == "float64":
        in_float64(monkeypatch, {"mixtral": modeling_mixtral, "glm4_moe": modeling_glm4_moe}[family])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    assert theirs.config.model_type == family and theirs.dtype == config.torch_dtype

    tokens = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(2))
    losses, all_logits = [], [model(tokens), theirs(tokens).logits]
    for logits in all_logits:
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
    monkeypatch.undo()
    theirs.save_pretrained(tmp_path / "theirs")
    again, shape = resolve(str(tmp_path / "theirs")), config.model_config
    assert replace(again, head_dim=None, ffn=48) == shape, "in Mixtral, ffn has no meaning"
    _, loaded = built(config, stored_values(str(tmp_path / "theirs"), shape))
    assert all(map(torch.equal, loaded, tensors)), [each.spec.name for each in tensors]
    for rank in range(2):  # one of two that divide the experts
        _, parts = built(config, stored_values(str(tmp_path / "theirs"), shape), Group("ep", (0, 1), rank))
        for part, whole in zip(parts, tensors, strict=True):
            assert torch.equal(part, whole[tuple(slice(*each) for each in part.spec.box)]), part.spec

    for parameter in theirs.parameters():  # fused ones; as weights they are written as they are found in files
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients/model.safetensors")
    found = {each.name: each.tensor for p in model.parameters() for each in as_stored(p.spec, p.grad, shape)}
    assert expected.keys() - found.keys() == {name for name in expected if name.endswith("bias")}
    pairs = [tuple(all_logits), tuple(losses), *((found[name], expected[name]) for name in found)]
    assert max(difference(*pair) for pair in pairs) < (1e-12 if dtype == "float64" else 5e-6)


def test_what_transformers_cannot_express_is_refused_in_one_line(tmp_path, capsys):
    for index, (flags, words) in enumerate((("--shared-experts 1", "its shared_experts"), ("", "--balance bias"))):
        with pytest.raises(AssertionError):
            exported(tmp_path / str(index), configure(7, f"{BASE} {FAMILIES['mixtral']} {flags}"), biased=not flags)
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and words in error, error
    exported(tmp_path / "out", configure(7, f"{BASE} {FAMILIES['glm4_moe']}"))
    for flags in ("--top-k 2", "--node-limit 3", "--dense-layers 2", "--gate softmax"):
        with pytest.raises(UsageError, match="^--init-from .* is another model: "):
            stored_values(str(tmp_path / "out"), configure(7, f"{BASE} {FAMILIES['glm4_moe']} {flags}").model_config)
