"""Text as tokens, what is no text, the cache that processes share, and the order of samples."""

import errno
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.constants import HF_HOME

from common.errors import UsageError
from common.launching.command_line import parse
from common.presets import hub_errors_in_one_line
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.data import batches as batches_module
from step01_single_gpu.data import text_sources, token_cache
from step01_single_gpu.data.batches import Batches, load_batches, random_order
from step01_single_gpu.data.token_cache import Corpus, load_corpus
from tests.harness.small_tokenizer import save_tokenizer

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


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.txt"])
def test_documents_become_the_ids_of_byt5(tmp_path, name):
    from transformers import ByT5Tokenizer

    corpus = load_corpus(write(tmp_path / name, *DOCUMENTS, ""), None, 1)
    documents = ["".join(DOCUMENTS)] if name == "x.txt" else DOCUMENTS
    assert corpus.tokens.tolist() == byte_ids(*documents)
    plain = [text.replace("</s>", "") for text in documents]  # which the tokenizer takes for a control id
    assert byte_ids(*plain) == [token for text in plain for token in ByT5Tokenizer()(text)["input_ids"]]
    assert corpus.tokens.dtype == np.uint16 and isinstance(corpus.tokens, np.memmap) and corpus.vocab == 384


def test_folders_are_read_in_the_order_of_their_paths(tmp_path, monkeypatch, capfd):
    names = ["a.md", "a/b.TXT", "a/c.jsonl", "b", "c.parquet", "d.py"]
    for name in reversed([*names, ".git/x.txt", ".hidden", "picture.png"]):
        write(tmp_path / "folder" / name, f"this is {name}\n", "and more")
    (tmp_path / "folder/broken.txt").symlink_to("nowhere")
    with monkeypatch.context() as patch:
        patch.setattr(text_sources, "LONGEST", 5)  # longer text files become several documents, at line ends
        corpus = load_corpus(str(tmp_path / "folder"), None, 1)
    assert corpus.tokens.tolist() == byte_ids(*(text for name in names for text in (f"this is {name}\n", "and more")))

    others = {"package.json": '{"name": "x"}', "ts.json": "// {", "list.json": "[1, 2]", "no.json": ""}
    for name, text in others.items():
        (tmp_path / "folder" / name).write_text(text)
    write(tmp_path / "folder/e.json", "in a .json file")
    capfd.readouterr()
    again = load_corpus(str(tmp_path / "folder"), None, 1)
    assert again.tokens.tolist()[-16:] == byte_ids("in a .json file") and again.tokens[-17] == 1
    line = f'--data {tmp_path}/folder: without 4 .json files that hold no rows with "text": list.json, no.json, package'
    assert capfd.readouterr().err == f"{line}.json, ...\n"
    (tmp_path / "folder/e.json").write_text('{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(UsageError, match='--data .*/e.json cannot be read .there is no "text" in row 2'):
        load_corpus(str(tmp_path / "folder"), None, 1)

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


def test_files_of_rows_are_what_their_names_say_and_may_be_empty(tmp_path):
    """`datasets` takes a path for a pattern, and fails on a file without rows."""
    for name in ("part[1].jsonl", "q?*.jsonl", "[ab]/x.parquet"):
        write(tmp_path / name, "right")
    for name in ("part1.jsonl", "q!!.jsonl", "a/x.parquet"):  # which these patterns match
        write(tmp_path / name, "wrong")
    for name in ("part[1].jsonl", "q?*.jsonl", "[ab]/x.parquet", "[ab]"):
        assert load_corpus(str(tmp_path / name), None, 1).tokens.tolist() == byte_ids("right"), name
    (tmp_path / "[ab]" / "a.jsonl").touch()
    write(tmp_path / "[ab]" / "b.parquet")
    write(tmp_path / "[ab]" / "y.jsonl", "too")
    assert load_corpus(str(tmp_path / "[ab]"), None, 1).tokens.tolist() == byte_ids("right", "too")


def test_only_the_text_of_a_row_counts(tmp_path):
    """The other fields may be of any type, and of another in rows far below; a text may look like a date."""
    texts = ["2020-01-01", "\u2028\U0001f600", "", *["x" * 1_000_000] * 11, "7", '"']
    others = [{"id": 1}, {"id": "x"}, *[{"id": None}] * 12, {"meta": {"a": [1, "b"]}}, {"id": "y", "meta": []}]
    rows = [json.dumps({"text": text, **other}) for text, other in zip(texts, others, strict=True)]
    for name, content in ("x.jsonl", "\ufeff" + "\r\n".join(rows)), ("y.json", f"\n [{','.join(rows)}]\n"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        tokens = load_corpus(str(tmp_path / name), None, 1).tokens
        assert tokens[:19].tolist() == byte_ids(*texts[:2]) and tokens[-4:].tolist() == byte_ids(*texts[-2:])
        assert len(tokens) == 19 + 11 * 1_000_001 + 4


def test_bad_data_is_refused_in_one_line(tmp_path, cache, capfd, monkeypatch):
    text = write(tmp_path / "x.txt", "text")
    cases = [(text, "no/tokenizer", "--tokenizer no/tokenizer cannot be read (")]
    for name, content, words in [
        ("missing.txt", None, "(which is no local path) cannot be read ("),
        ("x.csv", b"a,b", "holds no file of a kind that can be read"),
        ("a.txt", b"fine\n\xff\xfe", "is not readable UTF-8 text ("),
        ("b.txt", b"", "holds no text"),
        ("b.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', 'cannot be read (there is no "text" in row 2)'),
        ("c.jsonl", b'{"text": "a"}\n{"text"\n', "cannot be read (Expecting ':' delimiter in row 2)"),
        ("e.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}', "cannot be read ('utf-8' codec can't encode character"),
        ("g.jsonl", b'{"text": "a", "b": ' + b"[" * 10**5, "cannot be read (maximum recursion depth exceeded"),
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


def test_a_read_only_home_is_not_the_data_s_fault():
    """The libraries of Hugging Face keep a cache of their own, also of local files."""
    home = Path(HF_HOME)
    for file in (home.parent, home, home / "datasets" / "json"):
        with pytest.raises(UsageError, match=f"^--data a.jsonl needs the cache .* in {home} .*; HF_HOME names another"):
            with hub_errors_in_one_line("--data a.jsonl"):
                raise PermissionError(errno.EACCES, "Permission denied", str(file))
    with pytest.raises(UsageError, match="^--data a.jsonl cannot be read .*a.jsonl'.$"):
        with hub_errors_in_one_line("--data a.jsonl"):
            raise PermissionError(errno.EACCES, "Permission denied", "/data/a.jsonl")


def test_hugging_face_tokenizers(tmp_path):
    path = write(tmp_path / "x.jsonl", "the end", "def the the")
    for words, ids in [(("def", "end"), [2, 4, 1, 3, 2, 2, 1]), (("end", "def"), [2, 3, 1, 4, 2, 2, 1])]:
        tokenizer = save_tokenizer(tmp_path / "mine", *words)  # other files under the same name: another cache
        corpus = load_corpus(path, tokenizer, 1)
        assert corpus.tokens.tolist() == ids and corpus.vocab == 5
    documents = write(tmp_path / "y.jsonl", "the <eos> the", "<eos>")  # words of the vocabulary, but no ends
    assert load_corpus(documents, str(tmp_path / "mine"), 1).tokens.tolist() == [2, 0, 2, 1, 0, 1]
    many = load_corpus(path, save_tokenizer(tmp_path / "many", *map(str, range(65534)), "end", end=None), 1)
    assert many.tokens.tolist() == [2, 65537, 0, 2, 2] and many.tokens.dtype == np.uint32


@pytest.mark.parametrize("unknown", [None, "<|endoftext|>"])  # the latter in GPT-2's
def test_text_never_becomes_a_control_token(tmp_path, unknown):
    """A tokenizer of bytes, as those of GPT-2 and Llama 3 are: the text of its special tokens is text in a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<|user|>"], pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(["some text"] * 3, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    options = {"eos_token": special[0], "unk_token": unknown, "extra_special_tokens": special[1:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **options)
    assert tokenizer("some<|endoftext|>").input_ids[-1] == 0, "what transformers does unless told otherwise"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = ["some<|endoftext|> text", "<|endoftext|>", "<|user|>some text"]
    corpus = load_corpus(write(tmp_path / "x.jsonl", *texts), str(tmp_path / "tokenizer"), 1)
    assert corpus.end == 0 and 1 not in corpus.tokens, "0 ends a document, 1 is <|user|>"
    documents = np.split(corpus.tokens, np.flatnonzero(corpus.tokens == 0) + 1)
    assert [tokenizer.decode(each[:-1]) for each in documents[:-1]] == texts and not len(documents[-1])


def test_hub_dataset_is_streamed_only_as_far_as_needed(monkeypatch):
    import datasets

    calls = []

    def endless(path, **options):
        calls.append((path, options["name"], options["split"], options["streaming"]))
        return ({"text": "x" * 9999} for _ in itertools.count())

    monkeypatch.setattr(datasets, "load_dataset", endless)
    for name, needed, most in (("some/set:plain:validation", 1000, 2), ("some/set", (1 << 20) + 1, 4)):
        assert max(needed, 1 << 20) <= len(load_corpus(name, None, needed).tokens) < most << 20
    load_corpus("some/set:plain:validation", None, 1 << 20)  # from the cache
    assert calls == [("some/set", "plain", "validation", True), ("some/set", None, "train", True)]


def test_damaged_and_outdated_caches_are_built_again(tmp_path, cache, capsys):
    path = write(tmp_path / "some.txt", "some words and return 1 " * 100)
    good = load_corpus(path, None, 1)
    good = good._replace(tokens=good.tokens.tolist())  # which remain when the file is damaged
    [tokens], [facts] = cache.glob("*some.txt-bytes-*.npy"), cache.glob("*.json")
    damages = [(tokens, content) for content in (b"", tokens.read_bytes()[:1000], b"x" * 5000)]
    for damaged, content in [*damages, (facts, b'{"name": "x"'), (facts, b'{"name": "x"}')]:
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


def test_order_of_samples():
    """Epochs repeat nothing and miss nothing, and depend on the seed and their number alone."""
    for samples, global_batch in [(12, 4), (13, 4), (7, 7), (5, 3)]:
        batches = Batches(numbered(samples), 4, global_batch, seed=3)
        ids = sum((sample_ids(batches, step) for step in range(samples * 3 // global_batch + 1)), [])
        epochs = {tuple(ids[first : first + samples]) for first in range(0, samples * 3, samples)}
        assert len(epochs) == 3 and all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    random_order.cache_clear()
    batches = Batches(numbered(1000), 4, 8, seed=0)
    later = [sample_ids(batches, step) for step in range(200)]
    assert random_order.cache_info().misses == 2, "the order of an epoch is made once"
    assert [sample_ids(batches, step) for step in (150, 3)] == [later[150], later[3]]
    keys = itertools.product((0, 1, 2**32 - 1), (0, 1), (0, 1))
    assert len({tuple(random_order(*key, 1000)) for key in keys}) == 12


@pytest.mark.parametrize("data", ["synthetic", "some/set"])
def test_more_steps_see_the_same_samples_first(data, monkeypatch):
    """Synthetic tokens, and those of the Hub, are made or read only so far; a longer resume must find the same."""
    import datasets

    texts = [bytes(np.random.RandomState(each).randint(97, 123, 5000)).decode() for each in range(100)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": text} for text in texts])
    for module in (batches_module, text_sources, token_cache):
        monkeypatch.setattr(module, "WINDOW", 96 * 32)  # 7 samples of 400, and something left over
    earlier, facts = [], None
    for steps in (1, 3, 4, 5, 40, 90):
        flags = f"--data {data} --seq-len 400 --global-batch 2 --steps {steps} --device cpu"
        batches = load_batches(parse(1, flags.split()), build_mesh(Degrees(), torch.device("cpu")))
        found = [tuple(row) for step in range(steps) for row in batches.micro_batch(step, 0, 2)[1].tolist()]
        assert found[: len(earlier)] == earlier
        assert facts in (None, batches.corpus._replace(tokens=None)), "the hashes do not depend on the steps"
        earlier, facts = found, batches.corpus._replace(tokens=None)
    assert batches.window == 7 and len(set(found)) == 180, "no sample comes twice before all have come"
    assert sorted(found[:7]) != found[:7]


def test_batches_that_cannot_be_made_are_refused():
    with pytest.raises(UsageError, match="^--data numbered is too small: .* 7 samples of --seq-len 4"):
        Batches(numbered(7), 4, 8, seed=0)
    with pytest.raises(ValueError, match="--data numbered: token 16 of a vocabulary of 16"):
        Batches(numbered(4)._replace(vocab=16), 4, 4, seed=0).micro_batch(0, 0, 4)
    config = parse(1, ["--data", "synthetic", "--vocab", "255", "--device", "cpu"])
    with pytest.raises(UsageError, match="^--vocab 255 is below the 256 ids of the tokenizer$"):
        load_batches(config, build_mesh(Degrees(), torch.device("cpu")))
