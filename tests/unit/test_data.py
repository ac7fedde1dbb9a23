"""Text as the tokens it should become, what is no text, the cache that processes share, and batches of the tokens."""

import hashlib
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UsageError
from common.launching.command_line import parse
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.data import text_sources, token_cache
from step01_single_gpu.data.batches import Batches, epoch_order, load_batches
from step01_single_gpu.data.token_cache import Corpus, load_corpus

DOCUMENTS = ["def f():\n    return 1\n", "naïve café – 漢字 🙂\r\n", "\x00 tab\t and</s>  spaces ", "the end"]
# A recorded run can be repeated for ever, with any version of numpy and Python.
GOLDEN_ORDER = [882, 907, 205, 842, 743, 611, 332, 987, 73, 409, 602, 700, 245, 548, 494, 995]
GOLDEN_SYNTHETIC = "098a1be4ad62d29d5d4a4ff2a266e594d8816a016269ef09a0d1236c50e22be8"


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
    kept, others = ["a.py", "a/z.py", "b.py"], ["a/test/x.py", "a/x.txt", "site-packages/x.py", "_sysconfigdata_x.py"]
    for name in reversed([*kept, *others]):
        write(tmp_path / "lib" / name, f"# {name}")
    monkeypatch.setattr(text_sources.sysconfig, "get_path", lambda name: tmp_path / "lib")
    monkeypatch.setattr(text_sources, "LIBRARY_LEAST", 10)
    assert load_corpus(None, None, 1).tokens.tolist() == byte_ids(*(f"# {name}" for name in kept))
    write(tmp_path / "torch" / "x.py", "#" * 1000)
    monkeypatch.setattr(text_sources.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
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


def test_bad_data_is_refused_in_one_line(tmp_path, cache, capfd, monkeypatch):
    text = write(tmp_path / "x.txt", "text")
    cases = [(text, "no/tokenizer", "--tokenizer no/tokenizer cannot be read (")]
    for name, content, words in [
        ("missing.txt", None, "(which is no local path) cannot be read ("),
        ("x.csv", b"a,b", "holds no file of a kind that can be read"),
        ("a.txt", b"fine\n\xff\xfe", "is not readable UTF-8 text ("),
        ("b.txt", b"", "holds no text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', 'cannot be read (there is no "text" in row 2)'),
        ("b.jsonl", b'{"text": 5}\n', 'cannot be read (there is no "text" in row 1)'),
        ("c.jsonl", b'{"text": "a"}\n{"text"\n', "cannot be read (JSON parse error"),
        ("d.jsonl", b"[" * 100_000, "cannot be read ("),
        ("x.parquet", b"PAR1 or not", "cannot be read (Parquet magic bytes"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        cases.append((str(tmp_path / name), None, f"--data {tmp_path / name} {words}"))
    for data, tokenizer, words in cases:
        with pytest.raises(UsageError) as caught:
            load_corpus(data, tokenizer, 1)
        assert str(caught.value).startswith(words) and "\n" not in str(caught.value)
    assert capfd.readouterr().err == "" and not list(cache.glob("*.npy"))
    monkeypatch.setenv("ULTRASCALE_CACHE", text)
    with pytest.raises(UsageError, match="^cannot keep tokens in .*$"):
        load_corpus(text, None, 1)


def test_hugging_face_tokenizers(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def saved(name: str, eos: str | None, *words: str) -> str:
        vocab = {word: index for index, word in enumerate(["[UNK]", "<eos>", "the", *words])}
        fast = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        whole = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token=eos)
        whole.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    path = write(tmp_path / "x.jsonl", "the end", "def the the")
    for words, ids in [(("def", "end"), [2, 4, 1, 3, 2, 2, 1]), (("end", "def"), [2, 3, 1, 4, 2, 2, 1])]:
        corpus = load_corpus(path, saved("mine", "<eos>", *words), 1)  # other files under the same name: another cache
        assert corpus.tokens.tolist() == ids and corpus.vocab == 5
    many = load_corpus(path, saved("many", None, *map(str, range(65534)), "end"), 1)
    assert many.tokens.tolist() == [2, 65537, 0, 2, 2] and many.tokens.dtype == np.uint32


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


def test_damaged_and_outdated_caches_are_built_again(tmp_path, cache, capsys):
    path = write(tmp_path / "some.txt", "some words and return 1 " * 100)
    good = load_corpus(path, None, 1)
    good = good._replace(tokens=good.tokens.tolist())  # which remain when the file is damaged
    [tokens], [facts] = cache.glob("*some.txt-bytes-*.npy"), cache.glob("*.json")
    damages = [(tokens, content) for content in (b"", tokens.read_bytes()[:1000], b"x" * 5000)]
    damages += [(facts, content) for content in (b"", b'{"name": "x"', b'{"name": "x"}')]
    for damaged, content in damages:
        damaged.write_bytes(content)
        again = load_corpus(path, None, 1)
        assert again._replace(tokens=again.tokens.tolist()) == good and "is damaged" in capsys.readouterr().err
    assert load_corpus(path, None, 1).sha256 == good.sha256 and capsys.readouterr().err == ""
    write(tmp_path / "some.txt", "some words and return 2 " * 100)  # of the same size
    os.utime(path, ns=(0, 1))  # even if the clock has not moved on
    assert load_corpus(path, None, 1).sha256 != good.sha256


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
    path, fork = write(tmp_path / "some.txt", "text " * 100), multiprocessing.get_context("fork")
    started, results = fork.Semaphore(0), fork.Queue()
    arguments = [(path, seconds, started, results) for seconds in (600, 0.5, 0.5, 0.5)]
    writer, *waiting = (fork.Process(target=load_slowly, args=each) for each in arguments)
    writer.start()
    assert started.acquire(timeout=60)
    for process in waiting:
        process.start()
    assert not started.acquire(timeout=0.5) and results.empty(), "a second process tokenises as well"
    next(cache.glob("*.lock")).with_suffix(".tmp.npy").write_bytes(b"half a file")
    writer.kill()
    assert {results.get(timeout=60) for _ in waiting} == {load_corpus(path, None, 1).sha256}
    assert started.acquire(timeout=1) and not started.acquire(timeout=0.1), "only one takes over"
    for process in (writer, *waiting):
        process.join()
    assert [each.suffix for each in sorted(cache.iterdir())] == [".json", ".lock", ".npy"]


def numbered(samples: int, seq_len: int = 4) -> Corpus:
    """A corpus whose token i is i, and three tokens that are not enough for another sample."""
    return Corpus("numbered", np.arange(samples * seq_len + 4, dtype=np.uint32), "", samples * seq_len + 4, None)


def sample_ids(batches: Batches, step: int) -> list[int]:
    """The samples of a global batch of a `numbered` corpus."""
    return (batches.micro_batch(step, 0, batches.global_batch)[0][:, 0] // batches.seq_len).tolist()


def test_epochs_repeat_nothing_and_miss_nothing():
    for samples, global_batch in [(12, 4), (13, 4), (7, 7), (100, 8), (5, 3)]:
        batches = Batches(numbered(samples), 4, global_batch, seed=3)
        ids = sum((sample_ids(batches, step) for step in range(samples * 3 // global_batch + 1)), [])
        epochs = {tuple(ids[first : first + samples]) for first in range(0, samples * 3, samples)}
        assert len(epochs) == 3 and all(sorted(epoch) == list(range(samples)) for epoch in epochs)


def test_order_depends_on_seed_and_step_alone():
    epoch_order.cache_clear()
    batches = Batches(numbered(1000), 4, 8, seed=0)
    later = [sample_ids(batches, step) for step in range(200)]
    assert epoch_order.cache_info().misses == 2, "the order of an epoch is made once"
    epoch_order.cache_clear()
    resumed = Batches(numbered(1000), 4, 8, seed=0)
    assert [sample_ids(resumed, step) for step in (150, 3, 150)] == [later[150], later[3], later[150]]
    orders = {(seed, epoch): epoch_order(seed, epoch, 1000).tolist() for seed in (0, 1, 2**32 - 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 6
    assert later[0] + later[125] == orders[0, 0][:8] + orders[0, 1][:8] == GOLDEN_ORDER


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_and_micro_batches_are_slices_of_the_global_batch(device):
    batches = Batches(numbered(24), 4, 24, seed=0)
    whole = tokens, targets = batches.micro_batch(5, 0, 24)
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape == (24, 4)
    assert tokens.is_contiguous() and targets.is_contiguous() and torch.equal(targets, tokens + 1)
    assert sorted(targets.flatten().tolist()) == list(range(1, 97)), "samples overlap by the last target"
    for dp, micro_batch in [(1, 1), (1, 8), (2, 2), (4, 1), (2, 12), (4, 6), (3, 4)]:
        for index, rank in itertools.product(range(24 // (dp * micro_batch)), range(dp)):
            first = (index * dp + rank) * micro_batch
            for part, of in zip(batches.micro_batch(5, index, micro_batch, rank, dp, device), whole):
                assert part.device.type == device and torch.equal(part.cpu(), of[first : first + micro_batch])
        with pytest.raises(ValueError, match="outside the 24 rows"):
            batches.micro_batch(5, 24 // (dp * micro_batch), micro_batch, 0, dp)


def test_batches_that_cannot_be_made_are_refused():
    with pytest.raises(UsageError, match="^--data numbered is too small: .* 7 samples of --seq-len 4"):
        Batches(numbered(7), 4, 8, seed=0)
    with pytest.raises(ValueError, match="--data numbered: token 16 of a vocabulary of 16"):
        Batches(numbered(4)._replace(vocab=16), 4, 4, seed=0).micro_batch(0, 0, 4)
    config = parse(1, ["--data", "synthetic", "--vocab", "255", "--device", "cpu"])
    with pytest.raises(UsageError, match="^--vocab 255 is below the 256 ids of the tokenizer$"):
        load_batches(config, build_mesh(Degrees(), torch.device("cpu")))


def test_synthetic_tokens_are_always_the_same():
    corpus, longer = load_corpus("synthetic", None, 1000), load_corpus("synthetic", None, 2_000_000)
    assert (corpus.vocab, corpus.tokens.dtype, corpus.sha256) == (256, np.uint16, GOLDEN_SYNTHETIC)
    assert hashlib.sha256(corpus.tokens.astype("<u2")).hexdigest() == GOLDEN_SYNTHETIC
    assert len(corpus.tokens) >= 1000 and len(longer.tokens) >= 2_000_000 and longer.tokens.max() < 256
