"""`python -m common.generate`: a trained model writes."""

import pytest
import torch

from common import generate
from common.weights.byte_tokenizer import byte_tokenizer
from tests.harness.small_tokenizer import save_tokenizer
from tests.unit.test_transformers import GLM, MIXTRAL, config_of, exported

MODEL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 384 --seq-len 64"


def test_a_checkpoint_and_its_export_write_what_the_model_finds_likeliest(tmp_path, capsys):
    model, _ = exported(tmp_path / "out", config_of(MODEL))
    ids = torch.tensor([[1, *(byte + 3 for byte in b"def f")]])  # the end of a document comes before the prompt
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    capsys.readouterr()
    for source in ("out-run", "out-run/checkpoints/step-00000001", "out"):
        arguments = [str(tmp_path / source), "--prompt", "def f", "--tokens", "12"]
        assert generate.main([*arguments, "--temperature", "0"]) == 0
        _, tokenizer = generate.opened(str(tmp_path / source))
        assert 1 not in ids[0, 1:] and len({*ids[0].tolist()}) > 8
        assert capsys.readouterr().out == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"
    texts = []
    for seed in (0, 0, 1):
        assert generate.main([*arguments, "--seed", f"{seed}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and all(text.startswith("def f") for text in texts)


@pytest.mark.parametrize("flags", [MIXTRAL, GLM.replace("--shared-experts 2", "--shared-experts 0"), "--vocab 1000"])
def test_models_with_experts_and_with_wide_vocabularies_write_without_a_report(flags, tmp_path, capfd):
    """Their exports need a tokenizer that AutoTokenizer opens beside them, and that is silent about ids it lacks."""
    from transformers import AutoTokenizer

    model, _ = exported(tmp_path / "out", config_of(f"{MODEL} {flags}"), biased=False)
    capfd.readouterr()
    for source in ("out-run", "out"):
        assert generate.main([str(tmp_path / source), "--prompt", "a</s>b", "--tokens", "8", "--temperature", "0"]) == 0
        out, err = capfd.readouterr()
        assert out.startswith("a</s>b") and not err, "in training, too, these four characters end no document"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, *(byte + 3 for byte in b"a</s>b")]])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) + "\n" == out


def test_bytes_have_the_ids_of_byt5():
    from transformers import ByT5Tokenizer

    ours, theirs = byte_tokenizer(), ByT5Tokenizer()
    assert (len(ours), ours.pad_token_id, ours.eos_token_id) == (384, 0, 1)
    every = "".join(map(chr, range(0x800))) + " \n\t  two  \u4f60\U0001f642</s><pad>"
    for text in ("", " ", every):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        ids = ours.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == [byte + 3 for byte in text.encode()] and ours.decode(ids) == text


def test_weights_that_are_missing_are_not_made_up(tmp_path, capfd):
    from safetensors.torch import load_file, save_file

    exported(tmp_path / "out", config_of(MODEL))
    weights = load_file(tmp_path / "out/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "out/model.safetensors", {"format": "pt"})
    capfd.readouterr()
    assert generate.main([str(tmp_path / "out")]) == 2
    line = f"error: {tmp_path}/out lacks 1 of the model's weights, such as model.layers.1.mlp.up_proj.weight\n"
    assert capfd.readouterr() == ("", line)


def test_what_cannot_write_says_why(tmp_path, capsys):
    exported(
        tmp_path / "out", config_of(MODEL.replace("384", "96"))
    )  # a vocabulary too small for bytes has no tokenizer
    other = save_tokenizer(tmp_path / "other", *(f"w{index}" for index in range(100)))
    capsys.readouterr()
    for arguments, words in (
        ([tmp_path], "holds no complete checkpoint, nor a model that transformers opens"),
        ([tmp_path / "nowhere"], "holds no complete checkpoint, nor a model that transformers opens"),
        ([tmp_path / "out-run"], "has no tokenizer"),
        ([tmp_path / "out", "--tokens", "0"], "--tokens is at least 1"),
        ([tmp_path / "out", "--temperature", "-1"], "--temperature 0 or a number"),
        ([tmp_path / "out", "--temperature", "nan"], "--temperature 0 or a number"),
        ([tmp_path / "out", "--temperature", "1e-300"], "--temperature 0 or a number"),
        ([tmp_path / "out", "--seed", f"{1 << 63}"], "--seed is a number"),
        ([tmp_path / "out", "--prompt", "\udcff"], "--prompt is not text"),
        ([tmp_path / "out", "--prompt", "w99", "--tokenizer", other], "token 102 is none of 96"),
    ):
        assert generate.main([*map(str, arguments)]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and words in line and line.count("\n") == 1, line
