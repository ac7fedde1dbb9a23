"""The token cache: what is damaged is made again, and the processes that share it neither hang nor differ."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from common.data import token_cache
from common.data.token_cache import load_corpus
from common.errors import UsageError
from tests.harness.ranks import ROOT, torchrun

CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text("some words and return 1 " * 100)
    return path


DAMAGES = {
    "truncated": lambda tokens, facts: os.truncate(tokens, 1000),
    "empty": lambda tokens, facts: os.truncate(tokens, 0),
    "something else": lambda tokens, facts: tokens.write_bytes(b"x" * 5000),
    "no facts": lambda tokens, facts: facts.unlink(),
    "half the facts": lambda tokens, facts: facts.write_text('{"name": "x"'),
    "other facts": lambda tokens, facts: facts.write_text('{"name": "x"}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_built_again(text_file, cache, capsys, damage):
    good = load_corpus(str(text_file), None, 1)
    good = good._replace(tokens=good.tokens.tolist())
    [tokens], [facts] = cache.glob("*.npy"), cache.glob("*.json")
    DAMAGES[damage](tokens, facts)
    again = load_corpus(str(text_file), None, 1)
    assert again._replace(tokens=again.tokens.tolist()) == good
    assert capsys.readouterr().err == f"{tokens} is damaged: building it again\n"
    load_corpus(str(text_file), None, 1)
    assert capsys.readouterr().err == ""


def test_name_says_what_the_cache_was_made_from(text_file, cache):
    before = load_corpus(str(text_file), None, 1)
    assert [path.suffix for path in sorted(cache.glob("*some.txt-bytes-*"))] == [".json", ".lock", ".npy"]
    stat = text_file.stat()
    text_file.write_text(text_file.read_text().replace("return 1", "return 2"))  # of the same size
    os.utime(text_file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load_corpus(str(text_file), None, 1).sha256 != before.sha256
    (text_file.parent / "file").write_text("")
    os.environ["ULTRASCALE_CACHE"] = str(text_file.parent / "file")  # undone by the fixture's monkeypatch
    with pytest.raises(UsageError, match="cannot keep tokens in .*; ULTRASCALE_CACHE names another folder"):
        load_corpus(str(text_file), None, 1)


# ---- several processes -----------------------------------------------------------------------------------------------


def load_slowly(data: str, seconds: float, made, results) -> None:
    """Load the corpus with a tokenizer that first takes some time. `made` counts the processes that came so far."""
    real = token_cache.load_tokenizer

    def slow(name):
        made.release()
        time.sleep(seconds)
        return real(name)

    token_cache.load_tokenizer = slow
    results.put(load_corpus(data, None, 1).sha256)


def test_one_process_makes_the_tokens_and_others_wait(text_file):
    made, results = CONTEXT.Semaphore(0), CONTEXT.Queue()
    processes = [CONTEXT.Process(target=load_slowly, args=(str(text_file), 0.5, made, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert len({results.get(timeout=60) for _ in processes}) == 1
    assert made.acquire(timeout=1) and not made.acquire(timeout=0.1), "a second process tokenised as well"
    for process in processes:
        process.join()


def test_next_process_takes_over_from_a_killed_one(text_file, cache):
    made, results = CONTEXT.Semaphore(0), CONTEXT.Queue()
    writer = CONTEXT.Process(target=load_slowly, args=(str(text_file), 600, made, results))
    writer.start()
    assert made.acquire(timeout=60)
    waiting = CONTEXT.Process(target=load_slowly, args=(str(text_file), 0, made, results))
    waiting.start()
    time.sleep(0.3)
    [name] = (str(path).removesuffix(".lock") for path in cache.glob("*.lock"))
    Path(f"{name}.tmp.npy").write_bytes(b"half a file")
    assert results.empty()
    writer.kill()
    assert results.get(timeout=60) == load_corpus(str(text_file), None, 1).sha256
    for process in (writer, waiting):
        process.join()
    assert not Path(f"{name}.tmp.npy").exists() and np.load(f"{name}.npy").size == 2401


def test_bad_data_ends_all_ranks_with_one_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    flags = ["--device", "cpu", "--steps", "1", "--data", tmp_path / "bad.jsonl"]
    done = torchrun(2, ROOT / "step02_data_parallel/train.py", *flags)
    assert done.stderr.count("error: --data ") == 1 and 'there is no "text" in row 2' in done.stderr, done.stderr
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr
