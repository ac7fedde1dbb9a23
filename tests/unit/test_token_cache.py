"""The token cache: what is damaged is made again, and the processes that share it neither hang nor differ."""

import hashlib
import json
import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from common.data import batches as data_module
from common.data import text_sources as corpus_module
from common.data import token_cache
from common.data.batches import load_corpus
from common.data.text_sources import Tokenizer
from common.data.token_cache import HEADER, TokenCache
from common.errors import UsageError
from tests.harness.ranks import run_ranks


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("some words and return 1 " * 100)
    return path


def only_file(folder, pattern="*.tokens"):
    (path,) = folder.glob(pattern)
    return path


# ---- damage ------------------------------------------------------------------------------------------------


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def replace_header(path, old, new):
    content = path.read_bytes()
    assert old in content[:HEADER] and len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


DAMAGES = {
    "does not match its checksum": lambda path: flip(path, HEADER + 5),
    "does not match its checksum ": lambda path: replace_header(path, b'"vocab": 384', b'"vocab": 385'),
    "has a damaged header": lambda path: replace_header(path, b'"vocab": 384', b'"vocab": 38x'),
    "has a damaged header ": lambda path: replace_header(path, b'"count"', b'"counT"'),
    "has 5,000 bytes instead of": lambda path: os.truncate(path, 5000),
    "is no token cache": lambda path: path.write_bytes(b"something else"),
    "is no token cache ": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_built_again(tmp_path, cache, capsys, damage):
    (tmp_path / "x.txt").write_text("some words " * 1000)
    good = load_corpus(str(tmp_path / "x.txt"), None, 1, cache).tokens.tolist()
    path = only_file(cache)
    DAMAGES[damage](path)
    capsys.readouterr()
    assert load_corpus(str(tmp_path / "x.txt"), None, 1, cache).tokens.tolist() == good
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"token cache {path} {damage.strip()}"), lines
    assert lines[0].endswith(": building it again")
    load_corpus(str(tmp_path / "x.txt"), None, 1, cache)
    assert capsys.readouterr().err == ""


def test_foreign_cache_is_built_again(tmp_path, cache, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"this is {name}")
    load_corpus(str(tmp_path / "a.txt"), None, 1, cache)
    path = only_file(cache)
    load_corpus(str(tmp_path / "b.txt"), None, 1, cache)
    (other,) = set(cache.glob("*.tokens")) - {path}
    os.replace(other, path)
    digest = hashlib.sha256(b"this is a.txt").hexdigest()
    assert load_corpus(str(tmp_path / "a.txt"), None, 1, cache).sha256 == digest
    assert "was made from something else: building it again" in capsys.readouterr().err


def test_changed_file_is_read_again(text_file, cache):
    before = load_corpus(str(text_file), None, 1, cache)
    stat = text_file.stat()
    text_file.write_bytes(text_file.read_bytes().replace(b"return 1", b"return 2"))  # the same size
    os.utime(text_file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load_corpus(str(text_file), None, 1, cache).sha256 != before.sha256


def test_large_caches_are_sampled(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setattr(token_cache, "SAMPLED", 10_000)
    monkeypatch.setattr(token_cache, "BLOCK", 100)
    monkeypatch.setattr(token_cache, "BLOCKS", 4)
    (tmp_path / "x.txt").write_text("0123456789" * 1000)
    load_corpus(str(tmp_path / "x.txt"), None, 1, cache)
    path = only_file(cache)
    for position, noticed in ((HEADER, True), (path.stat().st_size - 1, True), (HEADER + 1000, False)):
        flip(path, position)
        load_corpus(str(tmp_path / "x.txt"), None, 1, cache)
        assert ("does not match its checksum" in capsys.readouterr().err) == noticed, position


# ---- one process writes, the others wait -------------------------------------------------------------------


def slow_tokenizer(name):
    """Bytes, but slow enough that the ranks that wait really wait."""
    tokenizer = corpus_module.load_tokenizer(None)
    if name == "fails":
        raise UsageError("--tokenizer fails cannot be loaded (of course)")
    if name == "breaks":
        raise ZeroDivisionError("in the tokenizer")

    def encode(texts):
        time.sleep(0.3)
        return tokenizer.encode(texts)

    return Tokenizer(tokenizer.vocab, tokenizer.eos, encode)


def load_on_a_rank(data, folder, tokenizer, late=None):
    """(result or error, whether this rank tokenised); rank `late` comes after the writer has ended."""
    calls = []
    data_module.load_tokenizer = lambda name: calls.append(name) or slow_tokenizer(name)
    rank = int(os.environ["RANK"])
    if rank == late:
        time.sleep(1)
    try:
        corpus = load_corpus(data, tokenizer, 1, folder, writer=rank == 0)
        return corpus.sha256, len(corpus.tokens), calls
    except Exception as error:
        return type(error).__name__, str(error), calls


def test_ranks_wait_for_the_writer(text_file, cache):
    results = run_ranks(3, load_on_a_rank, str(text_file), cache, None, late=0)
    digest = hashlib.sha256(text_file.read_bytes()).hexdigest()
    expected = (digest, len(text_file.read_bytes()) + 1)
    assert results == [(*expected, [None]), (*expected, []), (*expected, [])]


def test_ranks_share_the_error_of_the_writer(text_file, cache):
    message = "--tokenizer fails cannot be loaded (of course)"
    results = run_ranks(3, load_on_a_rank, str(text_file), cache, "fails", late=2)  # one waits, one comes late
    assert results == [("UsageError", message, ["fails"])] + [("UsageError", message, [])] * 2
    results = run_ranks(2, load_on_a_rank, str(text_file), cache, "breaks")
    assert results[0][:2] == ("ZeroDivisionError", "in the tokenizer")
    assert results[1][0] == "RuntimeError" and results[1][1].endswith("failed: ZeroDivisionError: in the tokenizer")
    assert not list(cache.glob("*.tmp"))


def fill_with(*tokens):
    def fill(file):
        file.write(np.array(tokens, np.uint16))
        return {"dtype": "uint16", "count": len(tokens)}

    return fill


@pytest.mark.parametrize("stale", [{"attempt": "an earlier launch"}, {"time": 0}, {"attempt": None}, "damaged"])
def test_error_of_an_earlier_attempt_confuses_nobody(cache, stale):
    tokens = TokenCache(cache, "x", {"source": "x"})
    cache.mkdir()
    tokens._leave_error(UsageError("long ago"))
    content = json.loads(tokens.error_path.read_text())
    tokens.error_path.write_text(stale if stale == "damaged" else json.dumps(content | stale))
    writer = threading.Timer(0.3, TokenCache(cache, "x", {"source": "x"}).build, [fill_with(5, 6, 7)])
    writer.start()
    assert tokens.wait()[0].tolist() == [5, 6, 7]
    writer.join()
    assert not tokens.error_path.exists()


class Clock:
    """Stands in for the module `time`: every sleep takes ten seconds, and `meanwhile` happens in it."""

    def __init__(self, meanwhile):
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += 10
        self.meanwhile(self.now)


def test_ranks_wait_as_long_as_the_writer_lives(cache, monkeypatch):
    def writer(now):
        if now <= 500:
            (cache / "x-v1.1234.tmp").touch()
            os.utime(cache / "x-v1.1234.tmp", (now, now))

    clock = Clock(writer)
    monkeypatch.setattr(token_cache, "time", clock)
    with pytest.raises(TimeoutError, match="the rank that makes it has shown no sign of life for 60 s"):
        TokenCache(cache, "x", {}).wait()
    assert clock.now == 500 + 70
    clock.now = 1000.0  # what is left there gives no new sign of life
    with pytest.raises(TimeoutError):
        TokenCache(cache, "x", {}).wait()
    assert clock.now == 1070


def test_writer_gives_signs_of_life(cache, monkeypatch):
    monkeypatch.setattr(token_cache, "BEAT", 0.01)

    def fill(file):
        path = only_file(cache, "*.tmp")
        for _ in range(3):
            os.utime(path, (0, 0))
            deadline = time.monotonic() + 30
            while path.stat().st_mtime == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert path.stat().st_mtime > 0
        return fill_with(1, 2)(file)

    assert TokenCache(cache, "x", {}).build(fill)[0].tolist() == [1, 2]


def hang_in_build(folder, ready):
    def fill(file):
        ready.set()
        time.sleep(60)

    TokenCache(folder, "x", {}).build(fill)


def test_killed_writer_is_noticed_and_its_file_removed(cache, monkeypatch):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    writer = context.Process(target=hang_in_build, args=(cache, ready))
    writer.start()
    assert ready.wait(30)
    writer.kill()
    writer.join()
    monkeypatch.setattr(token_cache, "SILENCE", 0.2)
    with pytest.raises(TimeoutError):
        TokenCache(cache, "x", {}).wait()
    os.utime(only_file(cache, "*.tmp"), (0, 0))
    assert TokenCache(cache, "x", {}).build(fill_with(1, 2))[0].tolist() == [1, 2]
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


def test_two_writers_do_no_harm(cache):
    def fill(file):
        TokenCache(cache, "x", {}).build(fill_with(1, 2))  # the other one is faster
        return fill_with(1, 2)(file)

    assert TokenCache(cache, "x", {}).build(fill)[0].tolist() == [1, 2]
    assert len(list(cache.iterdir())) == 1
