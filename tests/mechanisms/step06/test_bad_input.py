"""Sequences and heads that cannot be divided among the ranks are refused by one line that names the flags."""

from unittest import mock

import pytest
import torch

from common.errors import UsageError
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.data import batches
from step01_single_gpu.data.token_cache import synthetic
from tests.harness.observing import configure

BASE = "--layers 1 --hidden 48 --heads 8 --ffn 48 --vocab 384 --data synthetic --device cpu --steps 1"
ULYSSES = "--seq-len 48 --cp-mode ulysses"
BAD = [  # flags, for as many ranks as --cp times --tp; what the line says
    ("--cp 2 --seq-len 30", "--cp 2 --cp-split zigzag makes 4 parts, which does not divide --seq-len 30"),
    ("--cp 4 --seq-len 36", "--cp 4 --cp-split zigzag makes 8 parts, which does not divide --seq-len 36"),
    ("--cp 2 --seq-len 31 --cp-split contiguous", "--cp 2 does not divide --seq-len 31"),
    ("--cp 3 --seq-len 32 --cp-split striped", "--cp 3 does not divide --seq-len 32"),
    (f"--cp 3 {ULYSSES}", "--cp 3 --cp-mode ulysses does not divide --heads 8"),
    (f"--cp 16 {ULYSSES} --cp-split striped", "--cp 16 --cp-mode ulysses does not divide --heads 8"),
    (f"--cp 4 {ULYSSES} --heads 12 --kv-heads 6", "ulysses and --kv-heads 6: one must divide the other"),
    (f"--cp 4 --tp 4 {ULYSSES}", "--cp 4 --cp-mode ulysses does not divide --heads 8 / --tp 4"),
]
GOOD = [
    "--cp 2 --seq-len 28",
    "--cp 2 --seq-len 30 --cp-split contiguous",
    "--cp 3 --seq-len 33 --cp-split striped",
    "--cp 1 --seq-len 31",
    f"--cp 8 {ULYSSES} --cp-split striped --kv-heads 1",
    f"--cp 2 --tp 4 {ULYSSES} --kv-heads 2",
]


def check(flags: str) -> None:
    words = flags.split()
    ranks = [int(words[words.index(name) + 1]) for name in ("--cp", "--tp") if name in words]
    configure(6, f"{BASE} {flags}", ranks[0] * (ranks[1] if len(ranks) > 1 else 1))


@pytest.mark.parametrize(("flags", "expected"), BAD)
def test_what_cannot_be_divided(flags, expected):
    with pytest.raises(UsageError) as refused:
        check(flags)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("flags", GOOD)
def test_what_can_be_divided(flags):
    check(flags)


def test_documents_without_ends():
    config = configure(6, "--data some.txt --tokenizer some/name --mask-documents", 1)
    mesh, corpus = build_mesh(Degrees(), torch.device("cpu")), synthetic(1)._replace(end=None)
    with mock.patch.object(batches, "load_corpus", lambda *_: corpus), pytest.raises(UsageError) as refused:
        batches.load_batches(config, mesh)
    assert str(refused.value) == "--mask-documents: --tokenizer some/name has no token that ends a document"
