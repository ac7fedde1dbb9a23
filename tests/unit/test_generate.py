"""`python -m common.generate`: a trained model writes."""

import torch

from common import generate
from tests.unit.test_transformers import config_of, exported

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


def test_what_cannot_write_says_why(tmp_path, capsys):
    exported(
        tmp_path / "out", config_of(MODEL.replace("384", "96"))
    )  # a vocabulary too small for bytes has no tokenizer
    capsys.readouterr()
    for arguments, words in (
        ([tmp_path], "holds no complete checkpoint, nor a model that transformers opens"),
        ([tmp_path / "nowhere"], "holds no complete checkpoint, nor a model that transformers opens"),
        ([tmp_path / "out-run"], "has no tokenizer"),
        ([tmp_path / "out", "--tokens", "0"], "--tokens is at least 1"),
        ([tmp_path / "out", "--temperature", "-1"], "--temperature a number from 0 on"),
        ([tmp_path / "out", "--temperature", "nan"], "--temperature a number from 0 on"),
    ):
        assert generate.main([*map(str, arguments)]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and words in line and line.count("\n") == 1, line
