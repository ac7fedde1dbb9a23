"""Hugging Face weights: round trips through transformers, reading of boxes, the Hub, refusals."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common import huggingface
from common.errors import UsageError
from common.huggingface import export, huggingface_name, load_weights, stored_values, whole_tensors
from common.initialisation import materialise, random_values
from common.model import Decoder
from common.model_config import ModelConfig, RopeScaling
from common.presets import PRESETS, from_huggingface, resolve

SMALL = ModelConfig(384, 32, 2, 4, 2, 48, tie_embeddings=False, max_positions=256)
TIED = replace(SMALL, tie_embeddings=True, norm_eps=1e-6)
LLAMA3 = replace(SMALL, rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), kv_heads=1)
CPU = torch.device("cpu")


def build(config=SMALL, dtype=torch.float32, seed=0, **layers) -> Decoder:
    model = Decoder(config, **layers)
    materialise(model, dtype, CPU, random_values(seed))
    for parameter in model.parameters():  # far from uniform logits
        parameter.data.mul_(5)
    return model


def exported(folder, config=SMALL, dtype=torch.float32, **options):
    model = build(config, dtype)
    export(whole_tensors(model.parameters()), config, folder, **options)
    return model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The exported small model; tests copy what they damage."""
    folder = tmp_path_factory.mktemp("small") / "export"
    exported(folder)
    return folder


@pytest.fixture
def copy(small, tmp_path):
    return shutil.copytree(small, tmp_path / "copy")


def refusal(function, *args, **kwargs) -> str:
    """The one line that a UsageError says."""
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tokens_of(seq=100) -> torch.Tensor:
    return torch.randint(384, (2, seq), generator=torch.Generator().manual_seed(2))


# ---- round trips ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [SMALL, TIED, LLAMA3, replace(SMALL, head_dim=16)])
def test_round_trip(config, dtype, tmp_path):
    """Random model -> export -> transformers: the same logits -> load_weights: the same bits."""
    from transformers import AutoModelForCausalLM

    model = exported(tmp_path / "export", config, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == dtype
    again = build(config, dtype, seed=1)
    load_weights(again, str(tmp_path / "export"))
    for loaded, parameter in zip(again.parameters(), model.parameters(), strict=True):
        assert loaded.dtype == dtype and torch.equal(loaded, parameter)
    assert resolve(str(tmp_path / "export")) == replace(config, head_dim=config.head_width)

    if dtype == torch.bfloat16:  # in which the two round in different places
        model, theirs = model.float(), theirs.float()
    with torch.no_grad():
        ours, other = model(tokens_of()), theirs(tokens_of()).logits
    # float64: transformers computes norms and rotary tables in float32 (test_model.py goes to 1e-12)
    assert (ours - other).norm() / other.norm() < (2e-6 if dtype == torch.float64 else 1e-6)


def test_generate_and_tokenizer(small):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(small), AutoTokenizer.from_pretrained(small)
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert theirs.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    prompt = tokenizer("héllo", add_special_tokens=False, return_tensors="pt").input_ids
    assert prompt.tolist() == [[byte + 3 for byte in "héllo".encode()]]
    produced = theirs.generate(prompt, max_new_tokens=8, do_sample=False)
    model = build()
    for _ in range(8):
        prompt = torch.cat((prompt, model(prompt)[:, -1:].argmax(-1)), 1)
        if prompt[0, -1] == 1:
            break
    assert torch.equal(produced, prompt)
    assert tokenizer.decode(torch.tensor([107, 108])) == "hi"


def test_a_vocabulary_too_small_for_bytes_goes_without_tokenizer(tmp_path):
    from transformers import AutoModelForCausalLM

    config = replace(SMALL, vocab=64)
    exported(tmp_path / "export", config)
    assert not (tmp_path / "export" / "tokenizer_config.json").exists()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert theirs.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_another_tokenizer(tmp_path):
    """Its files and special ids go into the export. Here a local byte tokenizer without the extra ids."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    ByT5Tokenizer(extra_ids=0, bos_token="</s>").save_pretrained(tmp_path / "tokenizer")
    exported(tmp_path / "export", tokenizer=str(tmp_path / "tokenizer"))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "export")) == 259
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    message = refusal(exported, tmp_path / "other", tokenizer=str(tmp_path / "nothing"))
    assert message.startswith(f"--tokenizer {tmp_path / 'nothing'} could not be read: ")
    assert not (tmp_path / "other").exists()


def test_several_files(tmp_path):
    """A small limit gives many files and an index; transformers and load_weights read them all the same."""
    from transformers import AutoModelForCausalLM

    model = exported(tmp_path / "export", TIED, shard_bytes=20_000)
    files = sorted(tmp_path.glob("export/*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert sum(sizes) == 4 * sum(p.numel() for p in model.parameters())
    biggest = 4 * 384 * 32  # one weight alone may exceed the limit
    assert all(size <= 20_000 or size == biggest for size in sizes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_of()).logits, model(tokens_of()), rtol=0, atol=1e-5)
    again = build(TIED, seed=1)
    load_weights(again, str(tmp_path / "export"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_saved_by_transformers(tmp_path):
    """A checkpoint that transformers wrote, in several files, without a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"rope_parameters": rope, "tie_word_embeddings": True},
    )
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = Decoder(resolve(str(tmp_path)))
    materialise(model, torch.float32, CPU, stored_values(str(tmp_path), model.config))
    assert model.head.weight is model.embedding.weight
    tokens = tokens_of() % 100
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-6)


# ---- loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_load_into_meta(config, tmp_path):
    model = exported(tmp_path / "export", config)
    empty = Decoder(config)
    specs = [p.spec for p in empty.parameters()]
    materialise(empty, torch.float64, CPU, stored_values(str(tmp_path / "export"), empty.config))
    assert (empty.head.weight is empty.embedding.weight) == config.tie_embeddings
    for loaded, spec, parameter in zip(empty.parameters(), specs, model.parameters(), strict=True):
        assert isinstance(loaded, nn.Parameter) and loaded.requires_grad and loaded.spec is spec
        assert loaded.dtype == torch.float64 and torch.equal(loaded, parameter.double())


def test_load_keeps_the_parameters_of_a_model_with_values(small):
    """An optimizer may hold them already."""
    model = build(seed=1)
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    load_weights(model, str(small))
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build().parameters(), strict=True))


def test_materialise_from_weights(small):
    model = Decoder(SMALL)
    materialise(model, torch.float64, CPU, stored_values(str(small), model.config))
    assert all(torch.equal(a, b.double()) for a, b in zip(model.parameters(), build().parameters(), strict=True))


def test_a_stage_reads_its_layers(tmp_path):
    """Weights of other stages are not unknown ones. The last stage's tied head is the embedding."""
    model = exported(tmp_path / "export", TIED)
    stages = Decoder(TIED, last=1), Decoder(TIED, first=1)
    x = tokens_of()
    for stage in stages:
        materialise(stage, torch.float32, CPU, stored_values(str(tmp_path / "export"), stage.config))
        x = stage(x)
    assert torch.equal(x, model(tokens_of()))


class Reads:
    """Stands for safetensors.safe_open: allows slices only, and remembers how much they held."""

    elements = {}

    def __init__(self, *args, **kwargs):
        self.file = REAL_SAFE_OPEN(*args, **kwargs)

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.opened.keys()

    def get_slice(self, name):
        view = self.opened.get_slice(name)

        def read(index):
            values = view[index]
            Reads.elements[name] = values.numel()
            return values

        shape, kind = view.get_shape, view.get_dtype
        return type("Slice", (), {"__getitem__": lambda _, i: read(i), "get_shape": shape, "get_dtype": kind})()


REAL_SAFE_OPEN = safetensors.safe_open
BOXES = {
    "embedding.weight": ((288, 400), (0, 32)),  # vocabulary rows, the last 16 being padding
    "layers.0.attention.q_proj.weight": ((8, 16), (0, 32)),
    "layers.1.mlp.down_proj.weight": ((0, 32), (12, 36)),
    "layers.1.mlp_norm.weight": ((5, 9),),
    "head.weight": ((384, 400), (0, 32)),  # nothing but padding
}


@pytest.mark.parametrize("meta", [True, False])
def test_only_the_box_is_read(meta, small, monkeypatch):
    monkeypatch.setattr(safetensors, "safe_open", Reads)
    whole = {p.spec.name: p for p in build().parameters()}
    model = Decoder(SMALL)
    for child in model.modules():
        for key, parameter in child._parameters.items():
            if parameter is None:
                continue
            box = BOXES.get(parameter.spec.name, parameter.spec.box)
            shape = [stop - start for start, stop in box]
            held = torch.empty(shape, device="meta") if meta else torch.full(shape, 9.0)
            child._parameters[key] = nn.Parameter(held)
            child._parameters[key].spec = replace(parameter.spec, box=box)
    Reads.elements = {}
    if meta:
        materialise(model, torch.float32, CPU, stored_values(str(small), model.config))
    else:
        load_weights(model, str(small))
    for parameter in model.parameters():
        spec = parameter.spec
        expected = whole[spec.name][tuple(slice(start, stop) for start, stop in spec.box)]
        padding = parameter.shape[0] - expected.shape[0]
        assert torch.equal(parameter[: len(expected)], expected)
        assert padding == {"embedding.weight": 16, "head.weight": 16}.get(spec.name, 0)
        assert parameter[len(expected) :].eq(0).all()
        assert Reads.elements.get(huggingface_name(spec.name), 0) == expected.numel()


def test_old_files_with_rotary_buffers_and_a_second_tied_head(tmp_path):
    model = exported(tmp_path / "export", TIED)
    change(tmp_path / "export", add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    change(tmp_path / "export", add={"lm_head.weight": torch.zeros(384, 32)})
    again = build(TIED, seed=1)
    load_weights(again, str(tmp_path / "export"))
    assert torch.equal(again.head.weight, model.embedding.weight)


# ---- refusals of the loader -------------------------------------------------------------------------


def change(folder, add=None, drop=None) -> None:
    weights = load_file(folder / "model.safetensors") | (add or {})
    weights.pop(drop, None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.post_attention_layernorm.weight"


def test_weights_that_do_not_fit(copy):
    model = Decoder(SMALL)
    change(copy, drop=NORM)
    assert refusal(load_weights, model, str(copy)) == f"--init-from {copy} lacks the weight {NORM}"
    change(copy, add={NORM: torch.ones(33)})
    message = refusal(load_weights, model, str(copy))
    assert message.endswith(f"model.safetensors: {NORM} has shape (33,) instead of (32,)")
    change(copy, add={NORM: torch.ones(32, dtype=torch.int8)})
    assert f"{NORM} is quantised (I8)" in refusal(load_weights, model, str(copy))
    change(copy, add={NORM: torch.ones(32), "model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)})
    message = refusal(load_weights, model, str(copy))
    assert message.endswith("has a weight that this model lacks: model.layers.2.mlp.up_proj.weight")


def test_an_index_that_names_what_is_not_there(tmp_path):
    folder = tmp_path / "export"
    exported(folder, shard_bytes=20_000)
    first = sorted(folder.glob("*.safetensors"))[0]
    first.rename(folder / "elsewhere")
    assert "is damaged at" in refusal(load_weights, Decoder(SMALL), str(folder))
    (folder / "elsewhere").rename(first)
    index = folder / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    listing["weight_map"][NORM] = first.name
    index.write_text(json.dumps(listing))
    assert f"is damaged at {NORM}" in refusal(load_weights, Decoder(SMALL), str(folder))
    index.write_text("{}")
    assert "is damaged" in refusal(load_weights, Decoder(SMALL), str(folder))


def test_damaged_and_missing_files(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"--init-from {copy} is damaged" in refusal(load_weights, Decoder(SMALL), str(copy))
    weights.unlink()
    message = refusal(load_weights, Decoder(SMALL), str(copy))
    assert message.endswith("holds neither model.safetensors nor model.safetensors.index.json")
    (copy / "config.json").write_text("{")
    assert "has no readable config.json" in refusal(load_weights, Decoder(SMALL), str(copy))
    (copy / "config.json").unlink()
    assert "has no readable config.json" in refusal(load_weights, Decoder(SMALL), str(copy))
    (copy / "config.json").write_text('{"model_type": "gpt2"}')
    message = refusal(load_weights, Decoder(SMALL), str(copy))
    assert message == f"--init-from {copy} has model_type gpt2; llama, mistral and mixtral can be read"


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 8, "kv_heads": 4},
        {"rope_theta": 5e5},
        {"norm_eps": 1e-6},
        {"layers": 3},
        {"tie_embeddings": True},
    ],
)
def test_weights_of_another_model(change, small):
    """Also where all shapes agree: other heads or another RoPE would give wrong logits without a word."""
    message = refusal(load_weights, Decoder(replace(SMALL, **change)), str(small))
    name = next(iter(change))
    there, here = getattr(SMALL, name), change[name]
    assert message == f"--init-from {small} is another model: its {name} is {there}, that of --model {here}"


def test_a_longer_context_is_no_other_model(small):
    load_weights(Decoder(replace(SMALL, max_positions=4096)), str(small))


def test_models_with_experts_are_not_supported_yet(tmp_path):
    assert "experts" in refusal(huggingface.whole_shapes, PRESETS["mixtral-8x7b"])
    assert "experts" in refusal(export, {}, PRESETS["mixtral-8x7b"], tmp_path / "export")
    assert not any(tmp_path.iterdir())


# ---- the Hub ----------------------------------------------------------------------------------------


def test_hub_checkpoint(small, monkeypatch):
    import huggingface_hub

    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(small)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = Decoder(SMALL)
    materialise(model, torch.float32, CPU, stored_values("owner/Model-1.7B", model.config))
    assert torch.equal(model.norm.weight, build().norm.weight)
    assert asked["name"] == "owner/Model-1.7B"
    files = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    others = [
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "onnx/model.onnx",
    ]
    assert list(huggingface_hub.utils.filter_repo_objects(files + others, allow_patterns=asked["patterns"])) == files


@pytest.mark.parametrize("error", [OSError("no\nroute"), ValueError(""), RuntimeError("no\nroute")])
def test_hub_failure_is_one_line(error, monkeypatch):
    import huggingface_hub

    def download(name, allow_patterns):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    reason = "no" if str(error) else "ValueError"
    expected = f"--init-from owner/model could not be read from the Hub: {reason}"
    assert refusal(load_weights, Decoder(SMALL), "owner/model") == expected


def test_hub_offline():
    """The real client, which tests/conftest.py keeps from the network."""
    import huggingface_hub

    huggingface_hub.utils.logging.set_verbosity_warning()
    message = refusal(load_weights, Decoder(SMALL), "owner/no-such-model")
    assert message.startswith("--init-from owner/no-such-model could not be read from the Hub: ")
    message = refusal(resolve, "owner/no-such-model-1.7B")
    assert message.startswith("--model owner/no-such-model-1.7B could not be read from the Hub: ")
    assert huggingface_hub.utils.logging.get_verbosity() == logging.ERROR, "retries are not logged"


def test_names_that_are_no_hub_names(tmp_path):
    assert refusal(load_weights, Decoder(SMALL), "") == "--init-from is empty"
    for name in ("smollm-135m", str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        message = refusal(load_weights, Decoder(SMALL), name)
        assert message == f"--init-from {name} is neither a folder nor a Hub name such as owner/model"


# ---- export -----------------------------------------------------------------------------------------


def test_padding_is_not_exported(tmp_path):
    """A vocabulary padded to 400 rows is exported with its 384; the padding may hold anything."""
    model = build()
    for module in (model.embedding, model.head):
        spec, values = module.weight.spec, module.weight.data
        module.weight = nn.Parameter(torch.cat((values, torch.full((16, 32), float("nan")))))
        module.weight.spec = replace(spec, box=((0, 400), (0, 32)))
    export(whole_tensors(model.parameters()), SMALL, tmp_path / "export")
    weights = load_file(tmp_path / "export" / "model.safetensors")
    for name, module in (("model.embed_tokens.weight", model.embedding), ("lm_head.weight", model.head)):
        assert torch.equal(weights[name], module.weight[:384])
    load_weights(build(seed=1), str(tmp_path / "export"))


def test_a_tied_head_is_not_stored(tmp_path):
    exported(tmp_path / "export", TIED)
    assert "lm_head.weight" not in load_file(tmp_path / "export" / "model.safetensors")


def test_what_is_not_owned_or_not_whole(tmp_path):
    model = build()
    model.norm.weight.spec.owner = False  # as on the second of two replicas
    message = refusal(export, whole_tensors(model.parameters()), SMALL, tmp_path / "export")
    assert message == "cannot export: the parameter norm.weight is missing"
    model.norm.weight.spec = replace(model.norm.weight.spec, owner=True, box=((0, 16),))
    message = refusal(export, whole_tensors(model.parameters()), SMALL, tmp_path / "export")
    assert message == "cannot export norm.weight from one rank of several: it holds only ((0, 16),) of it"
    assert not any(tmp_path.iterdir())


def test_export_refuses_what_is_no_whole_model(tmp_path):
    good = dict(whole_tensors(build().parameters()))
    gain = good["norm.weight"]
    cases = {
        "cannot export norm.weight: its shape is (31,) instead of (32,)": good | {"norm.weight": gain[:31]},
        "cannot export bias: the model has no such parameter, or it came twice": good | {"bias": gain},
        "cannot export norm.weight: the model has no such parameter, or it came twice": [
            *good.items(),
            ("norm.weight", gain),
        ],
        "cannot export parameters of several types: torch.bfloat16, torch.float32": good
        | {"norm.weight": gain.bfloat16()},
    }
    for expected, tensors in cases.items():
        assert refusal(export, tensors, SMALL, tmp_path / "export") == expected
        assert not any(tmp_path.iterdir())
    odd = replace(SMALL, hidden=33, head_dim=8)
    assert "heads (4) do not divide 33" in refusal(export, {}, odd, tmp_path / "export")


def test_export_into_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file/out", "/proc/out"):
        assert refusal(exported, folder).startswith(f"{folder} cannot be made: ")


def test_export_takes_a_dictionary_and_an_empty_folder(tmp_path, small):
    (tmp_path / "export").mkdir()
    export(dict(whole_tensors(build().parameters())), SMALL, str(tmp_path / "export"))
    for file in small.iterdir():
        assert (tmp_path / "export" / file.name).read_bytes() == file.read_bytes()
    with safetensors.safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers 4 refuses files without
    message = refusal(export, {}, SMALL, tmp_path / "export")
    assert message == f"{tmp_path / 'export'} exists and is not an empty folder; an export would mix two models"


def test_parameters_on_their_way_are_not_all_held(tmp_path):
    """An iterator is read a file at a time: no more than one file's worth is alive."""
    import weakref

    alive = []

    def tensors():
        for name, values in whole_tensors(build().parameters()):
            copy = values.clone()
            del values
            alive.append(weakref.ref(copy))
            assert sum(each().nbytes for each in alive if each() is not None) <= 2 * 4 * 384 * 32
            yield name, copy
            del copy

    export(tensors(), SMALL, tmp_path / "export", shard_bytes=20_000)
    assert len(alive) == 21


def test_exported_config_is_read_by_transformers(tmp_path):
    from transformers import AutoConfig

    exported(tmp_path / "export", LLAMA3)
    theirs = AutoConfig.from_pretrained(tmp_path / "export")
    assert theirs.rope_parameters == {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    }
    back = from_huggingface(theirs.to_dict(), "here")
    assert back == replace(LLAMA3, head_dim=8)
