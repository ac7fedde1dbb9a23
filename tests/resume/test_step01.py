"""A run goes on from its checkpoints on the same curve, whichever way they were written and whatever became of them."""

import json
import math
import os
import re
import shutil
import time
from hashlib import sha256
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from common.checkpoints import files
from common.errors import UsageError
from common.launching.command_line import parse
from common.metrics import read_metrics
from common.process_groups import Degrees, build_mesh
from step01_single_gpu import train as train_module
from step01_single_gpu.data import batches, text_sources, token_cache
from step01_single_gpu.mixed_precision import LossScaler
from tests.harness.ranks import ROOT, steps_of
from tests.harness.small_tokenizer import save_tokenizer
from tests.unit.test_checkpoint import flip_a_bit

FLAGS = "--layers 1 --hidden 32 --heads 4 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu --seed 3"
FLAGS += " --global-batch 4 --micro-batch 2 --steps 12 --save-every 4"


def train(run_dir, flags: str = "") -> None:
    config = parse(1, [*FLAGS.split(), *flags.split(), "--run-dir", str(run_dir)])
    config.resolve_and_check(1)
    train_module.train(config, build_mesh(Degrees(), torch.device("cpu")))


def curve(run_dir) -> list[tuple]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(run_dir)]


def names(run_dir) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run with checkpoints of steps 4, 8 and 12."""
    run_dir = tmp_path_factory.mktemp("whole")
    train(run_dir)
    return run_dir


def test_saving_in_the_background_changes_nothing(whole, tmp_path, monkeypatch):
    """A file is not begun before three more steps are done, which must not be seen in it."""
    write_data, steps_before = dcp.FileSystemWriter.write_data, []

    def write_late(writer, *args):
        step, end = int(writer.path.name[len("step-") : len("step-00000000")]), time.monotonic() + 60
        while len(curve(tmp_path)) < min(step + 3, 12):
            assert time.monotonic() < end, "training waits for the checkpoint"
            time.sleep(0.005)
        steps_before.append(len(curve(tmp_path)) - step)
        return write_data(writer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", write_late)
        train(tmp_path, "--async-save")
    assert min(steps_before[:2]) >= 3 and len(steps_before) == 3
    assert curve(tmp_path) == curve(whole)
    assert names(tmp_path) == names(whole) == ["step-00000004", "step-00000008", "step-00000012"]
    for name in names(whole):
        for file in ("__0_0.distcp", "extra.json"):
            ours, theirs = (run / "checkpoints" / name / file for run in (tmp_path, whole))
            assert ours.read_bytes() == theirs.read_bytes()


def test_all_is_on_the_disk_before_the_name_says_so(tmp_path, monkeypatch):
    """A machine that loses power must not leave a complete name on half a checkpoint, nor lose the name again."""
    flushed, flush, rename = [], os.fsync, files.Path.rename

    def rename_flushed(path, target):
        if path.is_dir():
            missing = [each.name for each in (path, *path.iterdir()) if each.stat().st_ino not in flushed]
            assert not missing, f"{missing} may be lost"
            flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino) or flush(file))
    monkeypatch.setattr(files.Path, "rename", rename_flushed)
    train(tmp_path, "--steps 4")
    assert flushed == [(tmp_path / "checkpoints").stat().st_ino]


def test_resume_passes_over_a_damaged_checkpoint(whole, tmp_path, capsys):
    train(tmp_path, "--steps 8")
    damaged = tmp_path / "checkpoints/step-00000008"
    flip_a_bit(damaged / "__0_0.distcp")
    with pytest.raises(UsageError, match=f"cannot load {damaged}: __0_0.distcp is corrupt"):
        train(tmp_path, f"--resume {damaged}")  # a path means this one
    assert names(tmp_path) == ["step-00000004", "step-00000008"]

    capsys.readouterr()
    train(tmp_path, "--resume auto")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"cannot load {damaged}: __0_0.distcp is corrupt")
    assert line.endswith("; going on from step-00000004; renamed to step-00000008.damaged")
    assert names(tmp_path) == ["step-00000004", "step-00000008", "step-00000008.damaged", "step-00000012"]
    assert curve(tmp_path) == curve(whole), "bit for bit, each step once"

    for step in (4, 8, 12):
        flip_a_bit(tmp_path / f"checkpoints/step-{step:08d}/extra.json")
    with pytest.raises(UsageError, match="12: extra.json is .*08: extra.json is .*04: extra.json is "):
        train(tmp_path, "--resume auto")
    assert len(names(tmp_path)) == 4 and "step-00000012" in names(tmp_path), "when nothing is left, nothing is renamed"


def test_all_fields_that_differ_are_named(whole, tmp_path):
    other = "--layers 2 --vocab 384 --seq-len 8 --global-batch 8 --seed 4 --lr 1 --clip 2 --warmup 3 --optimizer sgd"
    other += f" --weight-decay 0 --tie-embeddings --data {ROOT / 'README.md'}"
    with pytest.raises(UsageError) as caught:
        train(tmp_path, f"--resume {whole}/checkpoints/step-00000008 --run-dir {tmp_path} {other}")
    fields = [part.split(" is ")[0].split()[-1] for part in str(caught.value).split("; ")]
    model = "model.layers model.tie_embeddings model.vocab"
    assert fields == f"clip data global_batch lr {model} optimizer seed seq_len warmup weight_decay".split()
    assert "data is --data synthetic (text 098a1be4), --tokenizer None (tokens cf44ee6b) in " in str(caught.value)
    assert f"in the checkpoint and --data {ROOT / 'README.md'} (text " in str(caught.value)


def test_another_tokenizer_at_the_same_path_is_another_run(tmp_path, monkeypatch):
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))
    text, tokenizer = tmp_path / "a.txt", tmp_path / "tokenizer"
    text.write_text("the cat saw the dog . " * 200)
    flags = f"--data {text} --steps 4 --tokenizer"
    train(tmp_path / "run", f"{flags} {save_tokenizer(tokenizer, 'cat', 'dog')}")
    (tmp_path / "elsewhere").mkdir()
    moved, copy = tokenizer.rename(tmp_path / "elsewhere/tokenizer"), text.rename(tmp_path / "elsewhere/b.txt")
    train(tmp_path / "run", f"--data {copy} --tokenizer {moved} --steps 8 --resume auto")  # the same tokens
    copy.rename(text)
    save_tokenizer(tokenizer, "dog", "cat")
    with pytest.raises(UsageError) as caught:
        train(tmp_path / "run", f"{flags} {tokenizer} --steps 12 --resume auto")
    said = r".*: cannot resume: data is (.*) in the checkpoint and (.*) in this run"
    was, now = re.fullmatch(said, str(caught.value)).groups()
    assert was.startswith(f"--data {copy} (text ") and f"--tokenizer {moved} (tokens " in was
    assert now.startswith(f"--data {text} (text ") and f"--tokenizer {tokenizer} (tokens " in now
    assert [each.split("(text ")[1][:8] for each in (was, now)] == 2 * [sha256(text.read_bytes()).hexdigest()[:8]]
    assert was[-9:] != now[-9:], "the same text, but other tokens"


def test_synthetic_tokens_go_on_beyond_what_the_shorter_run_needed(tmp_path, monkeypatch):
    for module in (batches, text_sources, token_cache):
        monkeypatch.setattr(module, "WINDOW", 96 * 2)  # 3 steps need two windows, 12 need eight
    train(tmp_path / "whole", "--steps 12")
    train(tmp_path / "run", "--steps 3")
    train(tmp_path / "run", "--steps 12 --resume auto")
    sizes = {json.loads((tmp_path / each / "config.json").read_text())["corpus_tokens"] for each in ("whole", "run")}
    assert sizes == {96 * 2 * 8} and curve(tmp_path / "run") == curve(tmp_path / "whole")


def scaler(run_dir, step: int) -> tuple[float | None, int]:
    extra = json.loads((run_dir / f"checkpoints/step-{step:08d}/extra.json").read_text())
    return extra["loss_scale"], extra["good_steps"]


def test_float16_goes_on_with_its_scale_and_its_good_steps(tmp_path, monkeypatch):
    """Which double the scale when there are three of them: a run that forgot two would double it later."""
    monkeypatch.setattr(LossScaler.__init__, "__defaults__", (3,))
    train(tmp_path / "whole", "--dtype float16 --steps 8 --save-every 2")
    assert scaler(tmp_path / "whole", 2) == (2.0**16, 2) and scaler(tmp_path / "whole", 4) == (2.0**17, 1)
    for step in (2, 4):
        start = tmp_path / f"whole/checkpoints/step-{step:08d}"
        train(tmp_path / str(step), f"--dtype float16 --steps 8 --save-every 8 --resume {start}")
        assert scaler(tmp_path / str(step), 8) == scaler(tmp_path / "whole", 8)


def test_only_float16_takes_up_a_loss_scale(whole, tmp_path):
    """Scale 1, which other types have, would flush most gradients of float16 to zero."""
    half, full = tmp_path / "half", tmp_path / "full"
    train(half, f"--dtype float16 --resume {whole}/checkpoints/step-00000008")
    train(full, f"--dtype float32 --resume {half}/checkpoints/step-00000012 --steps 16")
    assert [scaler(*each)[0] for each in ((whole, 12), (half, 12), (full, 16))] == [None, 2.0**16, None]


# ---- numbers that are not finite, and a folder that holds something else ---------------------------------------------


def broken_at(step: int, value: float, key: str = "grad_norm"):
    """In this context, a number of one step is not finite (and the update of that step would be useless)."""
    take = train_module.train_step

    def train_step(number, *arguments):
        numbers = take(number, *arguments)
        return numbers | ({key: torch.full_like(numbers[key], value)} if number == step else {})

    return mock.patch.object(train_module, "train_step", train_step)


@pytest.mark.parametrize(("flags", "key", "value"), [("", "loss", math.nan), ("--async-save", "grad_norm", math.inf)])
def test_a_run_ends_at_numbers_that_are_not_finite(whole, tmp_path, flags, key, value):
    """It keeps the last checkpoint before, although --keep allows only one and each step is saved."""
    words = f"^step 6: {key} is {value}; the run ends here, and saves nothing of this step$"
    with broken_at(6, value, key), pytest.raises(UsageError, match=words):
        train(tmp_path, f"--save-every 1 --keep 1 {flags}")
    assert names(tmp_path) == ["step-00000006"], "the state before that step"
    assert read_metrics(tmp_path / "metrics.jsonl")[-1][key] == pytest.approx(value, nan_ok=True), "it is recorded"
    train(tmp_path, "--resume auto")
    assert curve(tmp_path) == curve(whole), "once the reason is gone, it goes on"


def test_float16_goes_on_after_it_has_skipped_a_step(tmp_path):
    with broken_at(3, math.inf):
        train(tmp_path, "--dtype float16 --steps 6 --save-every 4")
    assert scaler(tmp_path, 4) == (2.0**15, 0) and len(curve(tmp_path)) == 6


def test_the_record_of_another_run_is_not_continued(whole, tmp_path):
    """A folder's record goes on if the checkpoint is in that folder; another one is replaced, as by a fresh start."""
    train(tmp_path, "--lr 0.1 --save-every 0")
    start = f"--resume {whole}/checkpoints/step-00000008"
    for _ in range(2):  # also when it is repeated, as a scheduler does
        train(tmp_path, f"{start} --save-every 0")
        assert curve(tmp_path) == curve(whole)[8:]
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    train(tmp_path / "link", f"--resume {tmp_path / 'copy'} --steps 13")
    assert curve(tmp_path / "copy")[:12] == curve(whole) and len(curve(tmp_path / "copy")) == 13


def test_a_trace_outlives_runs_that_resume_after_it(tmp_path, capsys):
    train(tmp_path, "--trace 1:2 --steps 4")
    trace = (tmp_path / "trace.json").read_bytes()
    train(tmp_path, "--trace 1:2 --resume auto")
    assert (tmp_path / "trace.json").read_bytes() == trace
    assert "--trace 1:2 ends before step 4, where this run goes on: nothing is traced" in capsys.readouterr().out
