"""Text from everywhere, as the tokens it should become; refusals of what is no text."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from common.data import text_sources
from common.data.token_cache import load_corpus
from common.errors import UsageError

DOCUMENTS = ["def f():\n    return 1\n", "naïve café – 漢字 🙂\r\n", "\x00 tab\t and</s>  spaces ", "the end"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def byte_ids(*texts: str) -> list[int]:
    """What a byte corpus of these documents is."""
    return [token for text in texts for token in [*(byte + 3 for byte in text.encode()), 1]]


def write_documents(path: Path, texts: list[str]) -> Path:
    """Write `texts` in the format that the suffix of `path` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        from pyarrow import parquet, table

        parquet.write_table(table({"id": range(len(texts)), "text": texts}), path)
    elif path.suffix in (".jsonl", ".json"):
        path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in texts))
    else:
        path.write_bytes("".join(texts).encode())
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.txt"])
def test_documents_become_the_ids_of_byt5(tmp_path, name):
    from transformers import ByT5Tokenizer

    corpus = load_corpus(str(write_documents(tmp_path / name, [*DOCUMENTS, ""])), None, 1)
    documents = ["".join(DOCUMENTS)] if name == "x.txt" else DOCUMENTS
    assert corpus.tokens.tolist() == byte_ids(*documents)
    plain = [text.replace("</s>", "") for text in documents]  # which the tokenizer takes for a control id
    assert byte_ids(*plain) == [token for text in plain for token in ByT5Tokenizer()(text)["input_ids"]]
    assert corpus.tokens.dtype == np.uint16 and isinstance(corpus.tokens, np.memmap) and corpus.vocab == 384
    assert corpus.sha256 == hashlib.sha256("".join(DOCUMENTS).encode()).hexdigest()


def test_long_text_file_becomes_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "LONGEST", 20)
    corpus = load_corpus(str(write_documents(tmp_path / "x.txt", DOCUMENTS)), None, 1)
    assert corpus.tokens.tolist() == byte_ids("def f():\n    return 1\n", "".join(DOCUMENTS[1:]))


def test_default_corpus_is_the_library(tmp_path, monkeypatch):
    corpus = load_corpus(None, None, 1)
    text = (corpus.tokens[corpus.tokens != 1] - 3).astype(np.uint8).tobytes()
    assert corpus.name in ("stdlib", "torch") and len(text) > 4_000_000 and b"def " in text
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    kept, left_out = ["a.py", "a/z.py", "b.py"], ["a/test/x.py", "a/data.txt", "site-packages/x.py"]
    for name in reversed([*kept, *left_out, "_sysconfigdata_linux.py"]):
        write_documents(tmp_path / "lib" / name, [f"# {name}"])
    monkeypatch.setattr(text_sources.sysconfig, "get_path", lambda name: tmp_path / "lib")
    monkeypatch.setattr(text_sources, "LIBRARY_LEAST", 10)
    assert load_corpus("stdlib", None, 1).tokens.tolist() == byte_ids(*(f"# {name}" for name in kept))
    monkeypatch.setattr(text_sources, "LIBRARY_LEAST", 1000)
    assert load_corpus("stdlib", None, 1).name == "torch", "in a stripped installation"


def test_folder_is_read_in_the_order_of_its_paths(tmp_path):
    names = ["a.md", "a/b.TXT", "a/c.jsonl", "b", "c.parquet", "d.py"]
    for name in reversed([*names, ".git/x.txt", ".hidden", "picture.png"]):
        write_documents(tmp_path / "folder" / name, [f"this is {name}"])
    (tmp_path / "folder/broken.txt").symlink_to("nowhere")
    corpus = load_corpus(str(tmp_path / "folder"), None, 1)
    assert corpus.tokens.tolist() == byte_ids(*(f"this is {name}" for name in names))


BAD = {
    "missing.txt": (None, "(which is no local path) cannot be read ("),
    "x.csv": (b"a,b", "holds no file of a kind that can be read:  .txt .md .py .jsonl .json .parquet"),
    "a.txt": (b"fine\n\xff\xfe", "is not readable UTF-8 text ('utf-8' codec"),
    "b.txt": (b"", "holds no text"),
    "a.jsonl": (b'{"text": "a"}\n\n{"body": "b"}\n', 'cannot be read (there is no "text" in row 2)'),
    "b.jsonl": (b'{"text": 5}\n', 'cannot be read (there is no "text" in row 1)'),
    "c.jsonl": (b'{"text": "a"}\n{"text"\n', "cannot be read (JSON parse error"),
    "d.jsonl": (b"[" * 100_000, "cannot be read ("),
    "e.jsonl": (b'{"text": ""}\n', "holds no text"),
    "f.jsonl": (b"", "cannot be read ("),
    "x.parquet": (b"PAR1 or not", "cannot be read (Parquet magic bytes"),
}


def refusal(data: str, tokenizer: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_corpus(data, tokenizer, 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_in_one_line(tmp_path, cache, capfd, name):
    content, words = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refusal(str(tmp_path / name))
    assert line.startswith(f"--data {tmp_path / name} {words}") and capfd.readouterr().err == ""
    assert not list(cache.glob("*.npy"))


def test_hugging_face_tokenizers(tmp_path, cache):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def saved(name: str, eos: str | None, *words: str) -> str:
        vocab = {word: index for index, word in enumerate(["[UNK]", "<eos>", "the", *words])}
        fast = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token=eos).save_pretrained(
            tmp_path / name
        )
        return str(tmp_path / name)

    path = str(write_documents(tmp_path / "x.jsonl", ["the end", "def the the"]))
    corpus = load_corpus(path, saved("mine", "<eos>", "def", "end"), 1)
    assert corpus.tokens.tolist() == [2, 4, 1, 3, 2, 2, 1] and corpus.vocab == 5
    changed = load_corpus(path, saved("mine", "<eos>", "end", "def"), 1)  # other files, other cache
    assert changed.tokens.tolist() == [2, 3, 1, 4, 2, 2, 1]
    assert load_corpus(path, saved("plain", None, "def", "end"), 1).tokens.tolist() == [2, 4, 3, 2, 2]
    many = load_corpus(path, saved("many", None, *map(str, range(65534)), "end"), 1)
    assert many.tokens.tolist() == [2, 65537, 0, 2, 2] and many.tokens.dtype == np.uint32
    (tmp_path / "mine/tokenizer.json").write_text("{")
    for name in ("mine", "none"):
        assert refusal(path, str(tmp_path / name)).startswith(f"--tokenizer {tmp_path / name} cannot be loaded (")


def test_hub_dataset_is_streamed_only_as_far_as_needed(monkeypatch):
    import datasets

    calls = []

    def endless(path, **options):
        calls.append((path, options["name"], options["split"], options["streaming"]))
        return ({"text": f"document {number:03}"} for number in itertools.count())

    def broken(path, **options):
        yield {"text": "a"}
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", endless)
    monkeypatch.setattr(text_sources, "HUB_LEAST", 64)
    corpus = load_corpus("some/set:plain:validation", None, 1000)
    assert calls == [("some/set", "plain", "validation", True)]
    assert len(corpus.tokens) % (32 * 13) == 0 and 1024 <= len(corpus.tokens) <= 1024 + 32 * 13
    assert load_corpus("some/set:plain:validation", None, 1024).sha256 == corpus.sha256 and len(calls) == 1
    load_corpus("some/set", None, 1025)
    assert calls[1:] == [("some/set", None, "train", True)]
    monkeypatch.setattr(datasets, "load_dataset", broken)
    assert refusal("far") == "--data far (which is no local path) cannot be read (no route)"
