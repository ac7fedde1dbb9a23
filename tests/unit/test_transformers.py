"""The model is that of transformers, dense or with experts: the same logits and gradients, and files that both read."""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from common import export
from common.checkpoints import checkpoint
from common.checkpoints.boxes import SavedBox
from common.config import TrainConfig
from common.errors import UsageError
from common.group import Group
from common.model import Decoder
from common.model_config import LatentShape, ModelConfig
from common.presets import resolve
from common.rope_scaling import RopeScaling, YarnScaling
from common.weights.huggingface import as_stored, model_type
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.initial_weights import stored_values
from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel.apply_experts import apply_experts
from step07_expert_parallel.router import Router
from tests.harness.observing import configure, mesh_of
from tests.harness.small_tokenizer import save_tokenizer

BASE = "--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 384 --seq-len 20 --global-batch 2"
BASE += " --micro-batch 2 --data synthetic --device cpu"
GQA = ModelConfig(384, 32, 2, 4, 2, 48, tie_embeddings=False, max_positions=256)
# DeepSeek-V3's, for sequences five times as long as before: one pair keeps its frequency, one is blended, one stretched
YARN = YarnScaling(40.0, original_max_positions=20, beta_fast=2.0, mscale=1.0, mscale_all_dim=1.0)
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
MIXTRAL = "--experts 6 --top-k 2 --expert-ffn 40 --balance none"
GLM = "--experts 8 --top-k 3 --gate sigmoid --shared-experts 2 --expert-ffn 24 --dense-layers 1"
GLM += " --expert-groups 4 --node-limit 2 --balance none"
LATENT = "--kv-heads 4 --latent 24,16,8,4,12"
DEEPSEEK = f"{GLM} {LATENT}"
CASES = {  # a model, or the flags of one
    "gqa": GQA,
    "tied": replace(GQA, tie_embeddings=True, vocab=300),
    "mqa": replace(GQA, kv_heads=1, norm_eps=1e-6),
    "mha": replace(GQA, kv_heads=4, rope_theta=1e6),
    "head_dim": replace(GQA, head_dim=24),
    # Some frequencies stay, some are blended, some stretched
    "llama3": replace(GQA, rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=32),
    "llama3-tied-mqa": replace(GQA, kv_heads=1, rope_scaling=LLAMA3, tie_embeddings=True),
    "mixtral": MIXTRAL,
    "glm4_moe": GLM,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 without experts": replace(GQA, kv_heads=4, latent=LatentShape(0, 20, 6, 8, 10), norm_eps=1e-6),
    "deepseek_v3 with YaRN": replace(
        GQA, kv_heads=4, latent=LatentShape(12, 20, 6, 16, 10), norm_eps=1e-6, rope_scaling=YARN
    ),
    "yarn": replace(GQA, head_dim=16, rope_scaling=replace(YARN, mscale=0.0, mscale_all_dim=0.0)),
}
EVERY = [(case, dtype) for case in CASES for dtype in ("float64", "float32", "bfloat16")]
FEW = [(case, dtype) for case, dtype in EVERY if dtype == "float64" or case in ("llama3-tied-mqa", "deepseek_v3")]
ALONE = Group("ep", (0,), 0)


def config_of(model: ModelConfig | str, dtype: str = "float32") -> TrainConfig:
    config = configure(7, f"{BASE} --dtype {dtype} {model if isinstance(model, str) else ''}")
    if isinstance(model, ModelConfig):
        config.model_config = model
    return config


def built(config: TrainConfig, values, ep: Group = ALONE, **layers) -> tuple[Decoder, list[torch.Tensor]]:
    """A model and all that is saved of it: parameters and the biases of routers."""
    model = Decoder(config.model_config, **layers)
    apply_experts(model, config, replace(mesh_of(config), ep=ep), LossScaler(config.torch_dtype))
    materialise(model, config.torch_dtype, torch.device("cpu"), values)
    tensors = [*model.parameters(), *(each.bias for each in model.modules() if isinstance(each, Router))]
    values(tensors)
    return model, tensors


def exported(folder: Path, config: TrainConfig, biased: bool = True) -> tuple[Decoder, list[torch.Tensor]]:
    """A random model, and a folder that `python -m common.export` makes of its checkpoint in `folder`-run."""
    (model, tensors), generator = built(config, random_values(seed=0)), torch.Generator().manual_seed(1)
    for tensor in tensors:  # attention selects, norms matter, experts differ
        if tensor.spec.name.endswith("bias"):
            tensor.copy_(torch.linspace(0, 0.3 * biased, len(tensor)))
        elif tensor.dim() == 1:
            tensor.data.add_(0.3 * torch.randn(tensor.shape, generator=generator))
        else:
            tensor.data.mul_(5)
    boxes = [box for each in tensors for box in SavedBox.of("parameter", each.spec, each)]
    run = folder.with_name(f"{folder.name}-run")
    shape = json.loads(json.dumps(asdict(config.model_config), sort_keys=True))  # no order of keys means anything
    extra = {"model": shape, "dtype": config.dtype, "tokenizer": None}
    extra |= {"end": 1} if config.dtype == "float32" else {}  # older checkpoints do not say it
    checkpoint.save(run, 1, boxes, extra, mesh_of(config))
    assert export.main([str(run), str(folder)]) == 0
    return model, tensors


def in_float64(monkeypatch) -> None:
    """transformers computes norms, rotary tables and scores in float32, whatever the model's type."""
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.glm4_moe import modeling_glm4_moe
    from transformers.models.llama import modeling_llama
    from transformers.models.mistral import modeling_mistral
    from transformers.models.mixtral import modeling_mixtral

    wide = SimpleNamespace(**{**vars(torch), "float32": torch.float64, "float": torch.float64})
    for module in (
        modeling_rope_utils,
        modeling_deepseek_v3,
        modeling_glm4_moe,
        modeling_llama,
        modeling_mistral,
        modeling_mixtral,
    ):
        monkeypatch.setattr(module, "torch", wide)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("case, dtype", EVERY if os.environ.get("TEST_ALL") else FEW)
def test_same_logits_and_gradients_and_back_again(case, dtype, tmp_path, monkeypatch):
    """Random model -> checkpoint -> export -> transformers -> its own files -> the same bits.

    2e-6 with transformers as it is, and 1e-12 in float64 when its casts to float32 are patched away.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = config_of(CASES[case], dtype)
    shape = config.model_config
    model, tensors = exported(tmp_path / "out", config, biased=case in ("glm4_moe", "deepseek_v3"))
    if dtype == "float64":
        in_float64(monkeypatch)
    eager = {"experts_implementation": "eager"} if shape.experts else {}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **eager)
    assert theirs.config.model_type == model_type(shape) and theirs.dtype == config.torch_dtype
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (1, 0)
    assert (tmp_path / "out/tokenizer_config.json").exists() == (shape.vocab >= 384), "ids must fit the model"
    if shape.vocab >= 384:
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("é")["input_ids"] == [198, 172, 1]
    theirs.save_pretrained(tmp_path / "theirs")
    again = resolve(str(tmp_path / "theirs"))
    ffn = shape.ffn if model_type(shape) == "mixtral" else again.ffn  # where it has no meaning
    assert replace(again, ffn=ffn) == replace(shape, head_dim=None if shape.latent else shape.head_width)
    _, loaded = built(config, stored_values(str(tmp_path / "theirs"), shape))
    assert all(map(torch.equal, loaded, tensors)), [each.spec.name for each in tensors]
    for rank in range(2 if shape.experts else 0):  # one of two that divide the experts
        _, parts = built(config, stored_values(str(tmp_path / "theirs"), shape), Group("ep", (0, 1), rank))
        for part, whole in zip(parts, tensors, strict=True):
            assert torch.equal(part, whole[tuple(slice(*each) for each in part.spec.box)]), part.spec

    if dtype == "bfloat16":  # in which the two round in different places
        model, theirs = model.float(), theirs.float()
    tokens = torch.randint(1, 300, (2, 100), generator=torch.Generator().manual_seed(2))  # there, 0 has no gradient
    losses, all_logits = [], [model(tokens), theirs(tokens).logits]
    for logits in all_logits:
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
    monkeypatch.undo()
    for parameter in theirs.parameters():  # fused ones; as weights they are written as they are found in files
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients/model.safetensors")
    found = {each.name: each.tensor for p in model.parameters() for each in as_stored(p.spec, p.grad, shape)}
    assert expected.keys() - found.keys() == {name for name in expected if name.endswith("bias")}
    pairs = [tuple(all_logits), tuple(losses), *((found[name], expected[name]) for name in found)]
    bound = 1e-12 if dtype == "float64" else 5e-6 if shape.experts else 2e-6
    assert max(difference(*pair) for pair in pairs) < bound


def test_checkpoint_on_the_hub_that_transformers_saved_in_several_files(tmp_path, monkeypatch):
    import huggingface_hub
    from transformers import LlamaForCausalLM

    config = config_of(CASES["llama3-tied-mqa"])
    exported(tmp_path / "out", config)
    theirs, folder = LlamaForCausalLM.from_pretrained(tmp_path / "out"), tmp_path / "shards"
    theirs.save_pretrained(folder, max_shard_size="20KB")
    embedding = theirs.model.embed_tokens.weight.detach().clone()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": embedding}
    index = {"weight_map": {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}}
    index["weight_map"] |= dict.fromkeys(extra, "old.safetensors")  # old files have more than the parameters
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(extra, folder / "old.safetensors")

    def download(name, allow_patterns):
        files = ["config.json", "model-1-of-2.safetensors", "pytorch_model.bin", "consolidated.safetensors"]
        assert list(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns)) == files[:2]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config.model_config = replace(resolve(str(folder)), max_positions=10**6)  # a longer context is no other model
    x = tokens = torch.randint(384, (2, 100))
    for layers in ({"last": 1}, {"first": 1}):  # pipeline stages; the last one's tied head is the embedding
        x = built(config, stored_values("owner/Model-1.7B", config.model_config), **layers)[0](x)
    torch.testing.assert_close(x, theirs(tokens).logits, rtol=1e-6, atol=1e-5)
    embedding[-1] += 1e-3
    save_file(extra, folder / "old.safetensors")
    with pytest.raises(UsageError, match="^--init-from .*: lm_head.weight is not the embedding, [^\n]*to false there$"):
        stored_values("owner/Model-1.7B", config.model_config)


def test_what_transformers_cannot_express_is_refused_in_one_line(tmp_path, capsys):
    for index, (flags, words) in enumerate((("--shared-experts 1", "its shared_experts"), ("", "--balance bias"))):
        with pytest.raises(AssertionError):
            exported(tmp_path / str(index), config_of(f"{MIXTRAL} {flags}"), biased=not flags)
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and words in error, error
    exported(tmp_path / "out", config_of(GLM))
    for flags in ("--top-k 2", "--node-limit 3", "--dense-layers 2", "--gate softmax"):
        with pytest.raises(UsageError, match="^--init-from .* is another model: "):
            stored_values(str(tmp_path / "out"), config_of(f"{GLM} {flags}").model_config)


# ---- what is refused -------------------------------------------------------------------------------------------------

NORM, UNKNOWN = "model.layers.1.post_attention_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
REFUSED = [  # a weight or a file, what it becomes (None: it is missing), and words of the line
    (NORM, None, f"{NORM} is None, that of --model is (32,)"),
    (NORM, torch.ones(33), f"{NORM} is (33,), that of --model is (32,)"),
    (NORM, torch.ones(32, dtype=torch.float8_e4m3fn), f"{NORM} is quantised (torch.float8"),
    (UNKNOWN, torch.ones(2, 2), f"{UNKNOWN} is (2, 2), that of --model is None"),
    ("model.safetensors", b"x" * 100, "cannot be read ("),
    ("model.safetensors", None, "cannot be read (it holds no .safetensors files"),
    ("config.json", b"{", "cannot be read (Expecting property name"),
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
    for kind, flags in (("mixtral", MIXTRAL), ("glm4_moe", GLM)):  # what only the holder of an expert would read
        shape = config_of(flags).model_config
        exported(tmp_path / kind, config_of(flags), biased=kind == "glm4_moe")
        weights = load_file(tmp_path / kind / "model.safetensors")
        [name, *_] = [
            each for each in sorted(weights) if ".2.mlp.experts.3." in each or ".2.block_sparse_moe.e" in each
        ]
        narrow, more = weights[name].to(torch.float8_e4m3fn), name.replace(".weight", ".weight_scale_inv")
        changes = [
            ({name: narrow, more: torch.ones(1, 1)}, "quantised (torch.float8"),
            ({more: torch.ones(1, 1)}, more),
        ]
        changes += [({name: weights[name][1:]}, f"the shape of {name} is ("), ({name: None}, f"of {name} is None")]
        for number, (change, words) in enumerate(changes):
            folder = shutil.copytree(tmp_path / kind, tmp_path / f"{kind}{number}")
            changed = {key: value for key, value in (weights | change).items() if value is not None}
            save_file({key: value.contiguous() for key, value in changed.items()}, folder / "model.safetensors")
            cases.append((str(folder), shape, words))
    for name_or_path, config, words in cases:
        with pytest.raises(UsageError) as caught:
            stored_values(name_or_path, config)
        line = str(caught.value)
        assert line.startswith(f"--init-from {name_or_path}") and words in line and "\n" not in line, line


def test_export_is_refused_in_one_line(tmp_path, capsys):
    exported(tmp_path / "out", config_of(GQA))
    run, new, file = tmp_path / "out-run", tmp_path / "new", tmp_path / "file"
    other = save_tokenizer(run / "tokenizer", end="the")
    file.write_text("")
    for source, out, options, words in [
        ("auto", new, [], "./auto: there is no complete checkpoint"),
        (run, tmp_path / "out", [], f"{tmp_path / 'out'} is not an empty folder"),
        (run, file, [], f"{file} is not an empty folder"),
        (run, new, ["--tokenizer", "no/tokenizer"], "error: --tokenizer no/tokenizer cannot be read ("),
        (run, new, ["--tokenizer", other], f"error: --tokenizer {other} ends a document with 2, and {run}"),
    ]:
        capsys.readouterr()
        assert export.main([str(source), str(out), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1, error
        assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "out", "out-run"], "nothing is left behind"
    (tmp_path / "new.unfinished").mkdir()  # as a killed export leaves it
    (tmp_path / "new.unfinished/model.safetensors").write_text("half a file")
    assert export.main([str(run), str(new)]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "new", "out", "out-run"]
    assert sorted(each.name for each in new.iterdir()) == sorted(each.name for each in (tmp_path / "out").iterdir())
