"""Text from everywhere as the tokens it should become, what is no text, and the cache that processes share."""

import hashlib
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from common.data import text_sources, token_cache
from common.data.token_cache import load_corpus
from common.errors import UsageError
from tests.harness.ranks import ROOT, torchrun

DOCUMENTS = ["def f():\n    return 1\n", "naïve café – 漢字 🙂\r\n", "\x00 tab\t and</s>  spaces ", "the end"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def byte_ids(*texts: str) -> list[int]:
    """What a byte corpus of these documents is."""
    return [token for text in texts for token in [*(byte + 3 for byte in text.encode()), 1]]


def write(path: Path, *texts: str) -> str:
    """Write documents in the format that the suffix of `path` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        from pyarrow import parquet, table

        parquet.write_table(table({"id": range(len(texts)), "text": texts}), path)
    elif path.suffix in (".jsonl", ".json"):
        path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in texts))
    else:
        path.write_bytes("".join(texts).encode())
    return str(path)


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.txt"])
def test_documents_become_the_ids_of_byt5(tmp_path, name):
    from transformers import ByT5Tokenizer

    corpus = load_corpus(write(tmp_path / name, *DOCUMENTS, ""), None, 1)
    documents = ["".join(DOCUMENTS)] if name == "x.txt" else DOCUMENTS
    assert corpus.tokens.tolist() == byte_ids(*documents)
    plain = [text.replace("</s>", "") for text in documents]  # which the tokenizer takes for a control id
    assert byte_ids(*plain) == [token for text in plain for token in ByT5Tokenizer()(text)["input_ids"]]
    assert corpus.tokens.dtype == np.uint16 and isinstance(corpus.tokens, np.memmap) and corpus.vocab == 384
    assert corpus.sha256 == hashlib.sha256("".join(DOCUMENTS).encode()).hexdigest()


def test_default_corpus_is_the_library(tmp_path, monkeypatch):
    corpus = load_corpus(None, None, 1)
    text = (corpus.tokens[corpus.tokens != 1] - 3).astype(np.uint8).tobytes()
    assert corpus.name in ("stdlib", "torch") and len(text) > 4_000_000 and b"def " in text
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    kept, others = ["a.py", "a/z.py", "b.py"], ["a/test/x.py", "a/x.txt", "site-packages/x.py", "_sysconfigdata_x.py"]
    for name in reversed([*kept, *others]):
        write(tmp_path / "lib" / name, f"# {name}")
    monkeypatch.setattr(text_sources.sysconfig, "get_path", lambda name: tmp_path / "lib")
    monkeypatch.setattr(text_sources, "LIBRARY_LEAST", 10)
    assert load_corpus("stdlib", None, 1).tokens.tolist() == byte_ids(*(f"# {name}" for name in kept))
    monkeypatch.setattr(text_sources, "LIBRARY_LEAST", 1000)
    assert load_corpus("stdlib", None, 1).name == "torch", "in a stripped installation"


def test_folder_is_read_in_the_order_of_its_paths(tmp_path, monkeypatch):
    names = ["a.md", "a/b.TXT", "a/c.jsonl", "b", "c.parquet", "d.py"]
    for name in reversed([*names, ".git/x.txt", ".hidden", "picture.png"]):
        write(tmp_path / "folder" / name, f"this is {name}\n", "and more")
    (tmp_path / "folder/broken.txt").symlink_to("nowhere")
    monkeypatch.setattr(text_sources, "LONGEST", 5)  # longer text files become several documents, at line ends
    corpus = load_corpus(str(tmp_path / "folder"), None, 1)
    assert corpus.tokens.tolist() == byte_ids(*(text for name in names for text in (f"this is {name}\n", "and more")))


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
    "x.parquet": (b"PAR1 or not", "cannot be read (Parquet magic bytes"),
}


def refusal(data: str, tokenizer: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_corpus(data, tokenizer, 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_data_is_refused_in_one_line(tmp_path, cache, capfd, monkeypatch):
    for name, (content, words) in BAD.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert refusal(str(tmp_path / name)).startswith(f"--data {tmp_path / name} {words}")
    assert capfd.readouterr().err == "" and not list(cache.glob("*.npy"))
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "x.csv"))
    assert "cannot keep tokens in" in refusal(write(tmp_path / "x.txt", "text"))


def test_bad_data_ends_all_ranks_with_one_line(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(BAD["a.jsonl"][0])
    flags = ["--device", "cpu", "--steps", "1", "--data", tmp_path / "bad.jsonl"]
    done = torchrun(2, ROOT / "step02_data_parallel/train.py", *flags)
    assert done.stderr.count("error: --data ") == 1 and 'there is no "text" in row 2' in done.stderr, done.stderr
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr


def test_hugging_face_tokenizers(tmp_path):
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

    path = write(tmp_path / "x.jsonl", "the end", "def the the")
    corpus = load_corpus(path, saved("mine", "<eos>", "def", "end"), 1)
    assert corpus.tokens.tolist() == [2, 4, 1, 3, 2, 2, 1] and corpus.vocab == 5
    changed = load_corpus(path, saved("mine", "<eos>", "end", "def"), 1)  # other files, other cache
    assert changed.tokens.tolist() == [2, 3, 1, 4, 2, 2, 1]
    many = load_corpus(path, saved("many", None, *map(str, range(65534)), "end"), 1)
    assert many.tokens.tolist() == [2, 65537, 0, 2, 2] and many.tokens.dtype == np.uint32
    assert refusal(path, "no/tokenizer").startswith("--tokenizer no/tokenizer cannot be read (")


def test_hub_dataset_is_streamed_only_as_far_as_needed(monkeypatch):
    import datasets

    calls = []

    def endless(path, **options):
        calls.append((path, options["name"], options["split"], options["streaming"]))
        return ({"text": "x" * 9999} for _ in itertools.count())

    monkeypatch.setattr(datasets, "load_dataset", endless)
    corpus = load_corpus("some/set:plain:validation", None, 1000)
    assert calls == [("some/set", "plain", "validation", True)] and len(corpus.tokens) == 128 * 10_000 >= 1 << 20
    assert load_corpus("some/set:plain:validation", None, 1 << 20).sha256 == corpus.sha256 and len(calls) == 1
    assert len(load_corpus("some/set", None, (1 << 20) + 1).tokens) >= 1 << 21
    assert calls[1:] == [("some/set", None, "train", True)]


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_damaged_and_outdated_caches_are_built_again(tmp_path, cache, capsys):
    path = write(tmp_path / "some.txt", "some words and return 1 " * 100)
    good = load_corpus(path, None, 1)
    good = good._replace(tokens=good.tokens.tolist())
    [tokens], [facts] = cache.glob("*some.txt-bytes-*.npy"), cache.glob("*.json")
    for damaged, content in [(tokens, whole) for whole in (b"", tokens.read_bytes()[:1000], b"x" * 5000)] + [
        (facts, content) for content in (b"", b'{"name": "x"', b'{"name": "x"}')
    ]:
        damaged.write_bytes(content)
        again = load_corpus(path, None, 1)
        assert again._replace(tokens=again.tokens.tolist()) == good
        assert capsys.readouterr().err == f"{tokens} is damaged: building it again\n"
    load_corpus(path, None, 1)
    assert capsys.readouterr().err == ""
    stat = os.stat(path)
    write(tmp_path / "some.txt", "some words and return 2 " * 100)  # of the same size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load_corpus(path, None, 1).sha256 != good.sha256


CONTEXT = multiprocessing.get_context("fork")


def load_slowly(data: str, seconds: float, started, results) -> None:
    """Load the corpus with a tokenizer that takes some time; `started` counts the processes that tokenise."""
    real = token_cache.load_tokenizer

    def slow(name):
        started.release()
        time.sleep(seconds)
        return real(name)

    token_cache.load_tokenizer = slow
    results.put(load_corpus(data, None, 1).sha256)


def test_one_process_tokenises_others_wait_and_the_next_takes_over_from_a_killed_one(tmp_path, cache):
    path, started, results = write(tmp_path / "some.txt", "text " * 100), CONTEXT.Semaphore(0), CONTEXT.Queue()
    writer = CONTEXT.Process(target=load_slowly, args=(path, 600, started, results))
    writer.start()
    assert started.acquire(timeout=60)
    waiting = [CONTEXT.Process(target=load_slowly, args=(path, 0.5, started, results)) for _ in range(3)]
    for process in waiting:
        process.start()
    assert not started.acquire(timeout=0.5) and results.empty(), "a second process tokenises as well"
    [lock] = cache.glob("*.lock")
    lock.with_suffix(".tmp.npy").write_bytes(b"half a file")
    writer.kill()
    assert {results.get(timeout=60) for _ in waiting} == {load_corpus(path, None, 1).sha256}
    assert started.acquire(timeout=1) and not started.acquire(timeout=0.1), "only one takes over"
    for process in (writer, *waiting):
        process.join()
    assert [each.suffix for each in sorted(cache.iterdir())] == [".json", ".lock", ".npy"]
