"""Text from everywhere, as the tokens it should become; refusals of what is no text."""

import hashlib
import itertools
import json
import time

import numpy as np
import pytest

from common.data import batches as data_module
from common.data import text_sources as corpus_module
from common.data.batches import load_corpus
from common.data.text_sources import Tokenizer
from common.data.token_cache import HEADER
from common.errors import UsageError

DOCUMENTS = ["def f():\n    return 1\n", "naïve café – 漢字 🙂\r\n", "\x00 tab\t and  spaces ", "the end"]


def byte_ids(*texts: str) -> list[int]:
    """What a byte corpus of these documents is."""
    return [token for text in texts for token in [*(byte + 3 for byte in text.encode()), 1]]


def only_file(folder, pattern="*.tokens"):
    (path,) = folder.glob(pattern)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes("".join(DOCUMENTS).encode())
    return path


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, and a torch that stands in for it."""
    for name in ("b.py", "a/z.py", "a.py", "a/test/x.py", "a/tests/x.py", "site-packages/x.py", "a/data.txt"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "lib/latin.py").write_bytes("# -*- coding: latin-1 -*-\n# é".encode("latin-1"))
    (tmp_path / "lib/_sysconfigdata_linux.py").write_text("build_time_vars = {}\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/nn.py").write_text("class Module: pass\n")
    monkeypatch.setattr(corpus_module, "LIBRARY_LEAST", 10)
    monkeypatch.setattr(corpus_module, "_standard_library", lambda: tmp_path / "lib")
    monkeypatch.setattr(corpus_module, "_torch", lambda: tmp_path / "torch")
    return tmp_path / "lib"


# ---- text to tokens ----------------------------------------------------------------------------------------


def test_bytes_are_those_of_byt5(tmp_path, cache):
    from transformers import ByT5Tokenizer

    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*DOCUMENTS, ""]))
    corpus = load_corpus(str(path), None, 1, cache)
    theirs = ByT5Tokenizer()
    assert corpus.tokens.tolist() == [token for text in DOCUMENTS for token in theirs(text)["input_ids"]]
    assert corpus.tokens.tolist() == byte_ids(*DOCUMENTS)
    assert (corpus.vocab, corpus.eos) == (len(theirs), theirs.eos_token_id) == (384, 1)
    assert corpus.tokens.dtype == np.uint16 and isinstance(corpus.tokens, np.memmap)


def test_text_never_becomes_a_control_id():
    (ids,) = corpus_module.load_tokenizer(None).encode(["a</s><pad>"])
    assert ids.tolist() == [byte + 3 for byte in b"a</s><pad>"]


def test_default_corpus_is_the_real_library(cache, monkeypatch):
    corpus = load_corpus(None, None, 1, cache)
    text = (corpus.tokens[corpus.tokens != 1] - 3).astype(np.uint8).tobytes()
    assert len(text) > 4_000_000 and b"def " in text and text.decode()
    assert corpus.sha256 in (corpus_module.find_source("stdlib", 1).digest,)
    assert corpus.name in ("stdlib", "torch")
    monkeypatch.setattr(data_module, "load_tokenizer", None)  # a second load must not tokenise
    start = time.perf_counter()
    again = load_corpus("stdlib", None, 1, cache, writer=False)
    assert time.perf_counter() - start < 2  # about 0.05 s; the rest is for a busy machine
    assert again.sha256 == corpus.sha256 and np.array_equal(again.tokens, corpus.tokens)


def test_library_is_sorted_without_tests_and_foreign_files(library, cache):
    corpus = load_corpus(None, None, 1, cache)
    texts = ["# a.py\n", "# a/z.py\n", "# b.py\n"]
    assert corpus.tokens.tolist() == byte_ids(*texts)
    assert corpus.sha256 == hashlib.sha256("\0".join(texts).encode()).hexdigest()
    (library / "b.py").write_text("# changed\n")
    assert load_corpus(None, None, 1, cache).sha256 != corpus.sha256


def test_stripped_install_takes_torch(library, cache, monkeypatch):
    monkeypatch.setattr(corpus_module, "_standard_library", lambda: library / "missing")
    corpus = load_corpus(None, None, 1, cache)
    assert corpus.name == "torch" and corpus.tokens.tolist() == byte_ids("class Module: pass\n")
    monkeypatch.setattr(corpus_module, "LIBRARY_LEAST", 1000)
    with pytest.raises(UsageError, match="--data: neither Python's nor torch's sources are installed"):
        load_corpus(None, None, 1, cache)


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_text_file_is_one_document(text_file, cache, monkeypatch, piece):
    monkeypatch.setattr(corpus_module, "PIECE", piece)  # 7: many pieces
    monkeypatch.setattr(data_module, "PIECE", piece)
    corpus = load_corpus(str(text_file), None, 1, cache)
    assert corpus.tokens.tolist() == byte_ids("".join(DOCUMENTS))
    assert corpus.sha256 == hashlib.sha256(text_file.read_bytes()).hexdigest()


def write_documents(path, texts):
    """Write `texts` in the format that the suffix of `path` names."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path)
    elif path.suffix in (".jsonl", ".json"):
        path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    else:
        path.write_bytes("".join(texts).encode())


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_rows_are_documents(tmp_path, cache, name):
    write_documents(tmp_path / name, DOCUMENTS)
    corpus = load_corpus(str(tmp_path / name), None, 1, cache)
    assert corpus.tokens.tolist() == byte_ids(*DOCUMENTS)
    assert corpus.sha256 == hashlib.sha256("\0".join(DOCUMENTS).encode()).hexdigest()


def test_folder_is_read_in_the_order_of_its_paths(tmp_path, cache, monkeypatch):
    folder = tmp_path / "folder"
    names = ["a.md", "a/b.TXT", "a/c.jsonl", "b", "c.parquet", "d.py"]
    for name in reversed([*names, ".git/x.txt", ".hidden", "picture.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_documents(folder / name, [f"this is {name}"])
    (folder / "broken.txt").symlink_to("nowhere")
    corpus = load_corpus(str(folder), None, 1, cache)
    assert corpus.tokens.tolist() == byte_ids(*(f"this is {name}" for name in names))
    monkeypatch.chdir(tmp_path)
    assert len(load_corpus("folder", None, 1, cache).tokens) == len(corpus.tokens)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"^--data \S+missing.txt does not exist$"),
        (
            "x.csv",
            b"a,b",
            r"^--data \S+x.csv: cannot read .csv files, only .txt, .py, .md, .jsonl, .json, .parquet",
        ),
        ("x.txt", b"\xff\xfe", r"^--data \S+x.txt is not valid UTF-8 text$"),
        ("x.txt", b"", r"^--data \S+x.txt holds no text$"),
        ("x.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', r'^--data \S+x.jsonl: no "text" field in line 3$'),
        ("x.jsonl", b"[" * 100_000, r"^--data \S+x.jsonl: line 1 is not a JSON object$"),
        ("x.jsonl", b'{"text": 5}\n', r'no "text" field in line 1$'),
        ("x.jsonl", b'{"text": "a"}\n{"text"\n', r"^--data \S+x.jsonl: line 2 is not a JSON object$"),
        ("x.jsonl", b'"text"\n', r'no "text" field in line 1$'),
        ("x.jsonl", b'{"text": "\\ud800"}\n', r'not valid Unicode in the "text" field in line 1$'),
        ("x.jsonl", b'{"text": ""}\n', r"holds no text$"),
        ("x.jsonl", b"\x80", r"not valid UTF-8 text$"),
        ("x.parquet", b"PAR1 or not", r"^--data \S+x.parquet is not a readable parquet file"),
    ],
)
def test_bad_data_is_refused_in_one_line(tmp_path, cache, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_corpus(str(tmp_path / name), None, 1, cache)
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*.tokens")) and not list(cache.glob("*.tmp"))


def test_more_refusals(tmp_path, cache, text_file):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "columns.parquet")
    with pytest.raises(UsageError, match=r'columns.parquet has no "text" column \(but body\)'):
        load_corpus(str(tmp_path / "columns.parquet"), None, 1, cache)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(UsageError, match='null.parquet: no "text" in row 2'):
        load_corpus(str(tmp_path / "null.parquet"), None, 1, cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no file that ends in .txt"):
        load_corpus(str(tmp_path / "empty"), None, 1, cache)
    for data, message in (
        ("", "--data is empty"),
        ("a:b:c:d", "is not NAME, NAME:CONFIG or NAME:CONFIG:SPLIT"),
    ):
        with pytest.raises(UsageError, match=message):
            load_corpus(data, None, 1, cache)
    for data in ("../no-such-folder-anywhere", "data/of/mine", "data.jsonl", "~/nothing-there"):
        with pytest.raises(UsageError, match=f"^--data {data} does not exist$"):
            load_corpus(data, None, 1, cache)
    for writer in (True, False):  # the folder is a file: ranks that wait find out by themselves
        with pytest.raises(UsageError, match="cannot keep tokens in .*; ULTRASCALE_CACHE names another folder"):
            load_corpus(str(text_file), None, 1, text_file, writer=writer)


def test_cache_folder_from_the_environment(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "elsewhere"))
    load_corpus(str(text_file), None, 1)
    only_file(tmp_path / "elsewhere")


# ---- Hugging Face tokenizers -------------------------------------------------------------------------------


def save_tokenizer(folder, eos: str | None, words=("return", "def")):
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(["[UNK]", "<eos>", "the", "end", *words])}
    fast = Fast(models.WordLevel(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token=eos).save_pretrained(folder)
    return str(folder)


def test_local_hugging_face_tokenizer(tmp_path, cache, capsys):
    path = tmp_path / "x.jsonl"
    write_documents(path, ["the end", "return the the", "def"])
    tokenizer = save_tokenizer(tmp_path / "mine", "<eos>")
    corpus = load_corpus(str(path), tokenizer, 1, cache)
    assert corpus.tokens.tolist() == [2, 3, 1, 4, 2, 2, 1, 5, 1]
    assert (corpus.vocab, corpus.eos) == (6, 1)
    first = only_file(cache)
    assert "mine" in first.name
    save_tokenizer(tmp_path / "mine", "<eos>", words=("def", "return"))  # other files, other cache
    assert load_corpus(str(path), tokenizer, 1, cache).tokens.tolist() == [2, 3, 1, 5, 2, 2, 1, 4, 1]
    assert len(list(cache.glob("*.tokens"))) == 2
    first.unlink()
    plain = load_corpus(str(path), save_tokenizer(tmp_path / "plain", None), 1, cache)
    assert plain.tokens.tolist() == [2, 3, 4, 2, 2, 5] and plain.eos is None
    assert capsys.readouterr().err == ""  # no progress bar but on a terminal


def test_tokenizer_that_cannot_be_loaded(tmp_path, text_file, cache):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"^--tokenizer \S+/broken cannot be loaded \(.+\)$") as caught:
        load_corpus(str(text_file), str(tmp_path / "broken"), 1, cache)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^--tokenizer \S+/none does not exist$"):
        load_corpus(str(text_file), str(tmp_path / "none"), 1, cache)
    with pytest.raises(UsageError, match="^--tokenizer mine has nothing to do: --data synthetic"):
        load_corpus("synthetic", "mine", 1, cache)


def test_large_vocabulary_takes_four_bytes(text_file, cache, monkeypatch):
    for vocab, dtype in ((65536, "uint16"), (65537, "uint32")):
        tokenizer = Tokenizer(vocab, None, lambda texts, vocab=vocab: [[vocab - 1, 0] for _ in texts])
        monkeypatch.setattr(data_module, "load_tokenizer", lambda name, tokenizer=tokenizer: tokenizer)
        corpus = load_corpus(str(text_file), f"words-{vocab}", 1, cache)
        assert corpus.tokens.dtype == dtype and corpus.tokens.tolist() == [vocab - 1, 0]
        assert only_file(cache, f"*words-{vocab}*.{dtype}.tokens").stat().st_size == HEADER + corpus.tokens.nbytes
    wrong = Tokenizer(5, None, lambda texts: [[5] for _ in texts])
    monkeypatch.setattr(data_module, "load_tokenizer", lambda name: wrong)
    with pytest.raises(UsageError, match="--tokenizer wrong has 5 ids but gave 5"):
        load_corpus(str(text_file), "wrong", 1, cache)


# ---- the Hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Replaces `datasets.load_dataset`: set `rows`; `calls` and `taken` tell how it was used."""
    import datasets

    class Hub:
        rows, calls, taken = (), [], 0

        def load(self, name, config=None, **options):
            self.calls.append((name, config, options))
            for row in self.rows:
                self.taken += 1
                yield row

    hub = Hub()
    hub.calls = []
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    monkeypatch.setattr(corpus_module, "HUB_LEAST", 64)
    return hub


def test_hub_dataset_is_streamed_only_as_far_as_needed(hub, cache, monkeypatch):
    monkeypatch.setattr(data_module, "PIECE", 50)
    hub.rows = ({"text": f"document {number:03}"} for number in itertools.count())  # never ends
    corpus = load_corpus("some/set:plain:validation", None, 100, cache)
    assert hub.calls == [("some/set", "plain", {"split": "validation", "streaming": True})]
    assert len(corpus.tokens) == 10 * 13 >= 128 > 9 * 13  # 100 rounded up, and the document that reaches it
    assert hub.taken <= 13  # a few more, read ahead for the tokenizer
    texts = [f"document {number:03}" for number in range(10)]
    assert corpus.tokens.tolist() == byte_ids(*texts)
    assert corpus.sha256 == hashlib.sha256("\0".join(texts).encode()).hexdigest()

    assert load_corpus("some/set:plain:validation", None, 128, cache).sha256 == corpus.sha256  # the same cache
    assert len(hub.calls) == 1
    assert len(load_corpus("some/set:plain:validation", None, 129, cache).tokens) >= 256  # another one
    assert len(hub.calls) == 2


def test_hub_defaults_and_failures(hub, cache):
    hub.rows = [{"text": "a"}, {"text": "b"}]  # ends before it reaches what is needed
    assert load_corpus("small", None, 10, cache).tokens.tolist() == byte_ids("a", "b")
    assert hub.calls[-1] == ("small", None, {"split": "train", "streaming": True})
    hub.rows = [{"text": "a"}, {"body": "b"}]
    with pytest.raises(UsageError, match='^--data other: no "text" column in row 2$'):
        load_corpus("other", None, 10, cache)

    def failing(rows):
        yield from rows
        raise ConnectionError("no route\nto host")

    for rows, message in (
        ([], "is no local path and no dataset to be had"),
        ([{"text": "a"}], "broke off after row 1"),
    ):
        hub.rows = failing(rows)
        with pytest.raises(UsageError, match=rf"^--data far {message} \(no route\)$"):
            load_corpus("far", None, 10, cache)


def test_streaming_through_the_real_library(tmp_path, monkeypatch):
    """A folder is what `datasets` can stream without a network; `--data` itself would read it directly."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    write_documents(tmp_path / "set/train.jsonl", DOCUMENTS)
    source = corpus_module._hub(str(tmp_path / "set"), 10)
    assert list(source.pieces()) == [(text, True) for text in DOCUMENTS]
