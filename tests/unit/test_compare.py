"""The comparison of runs: differences, exit status, refusals, labels and notes."""

import json
import math

import pytest

from common.record.compare import compare, labels, main, notes, read_run, relative_difference


def write_run(path, losses, norms=None, config=None):
    """A run directory with these curves; config None writes no config.json."""
    path.mkdir(exist_ok=True)
    curves = enumerate(zip(losses, norms or [1.0] * len(losses)))
    lines = [{"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": 100.0} for step, (loss, norm) in curves]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (path / "config.json").write_text(json.dumps({"corpus_sha256": "abc", "lr": 1e-3} | config))
    return path


@pytest.fixture
def pair(tmp_path):
    """Reference and a run that differs by 1e-3 in loss at step 1 and by 0.5 in gradient norm at step 2."""
    one = write_run(tmp_path / "one", [4.0, 2.0, 1.0], [1.0, 1.0, 2.0], {})
    return one, write_run(tmp_path / "two", [4.0, 2.002, 1.0], [1.0, 1.0, 1.0], {})


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The command without its picture, whose drawing takes most of the time: status, stdout and stderr."""
    monkeypatch.setattr("common.record.compare.plot", lambda *arguments: None)
    return lambda *arguments: (main([*map(str, arguments), "--out", str(tmp_path / "x.png")]), *capsys.readouterr())


def test_relative_difference():
    assert relative_difference(2.0, 2.5) == 0.25 and relative_difference(-2.0, 2.0) == 2.0
    assert relative_difference(0.0, 0.0) == 0.0 and relative_difference(0.0, 1e-300) > 1e7
    assert relative_difference(math.nan, math.nan) == relative_difference(math.inf, math.inf) == 0.0
    for a, b in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)):
        assert relative_difference(a, b) == math.inf


def test_exit_status(pair, command):
    assert command(*pair)[0] == 0, "without a tolerance only what cannot be compared fails"
    status, out, err = command(*pair, "--tolerance", "0.4")
    assert status == 1 and "FAIL two: grad_norm differs by 5.00e-01 at step 2" in out and err == ""
    for options in ("--tolerance 0.5", "--tolerance 0.4 --key loss", "--tolerance 0.4 --steps 2"):
        assert command(*pair, *options.split())[0] == 0, options
    assert command(pair[0], pair[0], "--tolerance", "0")[0] == 0


def test_what_cannot_be_compared_exits_with_2_and_one_line(pair, tmp_path, command):
    for name, text, message in [
        ("metrics.jsonl", "", "holds no step"),
        ("metrics.jsonl", '{"step": 0}\n{broken\n', "line 2 is not the record"),
        ("metrics.jsonl", '{"step": 0, "loss": "x"}\n', "not a number"),
        ("metrics.jsonl", '{"step": 9}\n', "no step to compare in common"),
        ("config.json", "[1]", "cannot be read"),
        ("config.json", '{"corpus_sha256": "other"}', "different corpora"),
    ]:
        other = write_run(tmp_path / "other", [4.0], config={})
        (other / name).write_text(text)
        status, _, err = command(pair[0], other, "--tolerance", "1e9")
        assert status == 2 and message in err and str(other) in err and err.count("\n") == 1
    for argument in ("--key=", "--steps=0", "--key=nothing", "--tolerance=nan", "--tolerance=-1"):
        status, _, err = command(pair[0], argument)
        assert status == 2 and err.count("\n") == 1, argument


def test_labels_name_the_layout(tmp_path):
    step02 = {"step_name": "step02_data_parallel", "dp": 2, "dp_mode": "naive", "lr": 0.5, "micro_batch": 2}
    step05 = {"step_name": "step05_pipeline", "dp": 1, "sequence_parallel": False, "bucket_mb": 1.0, "schedule": "zbv"}
    configs = {"a": {"step_name": "step01_single_gpu", "dp": 1}, "b": step02, "c": step02, "d": {"dp": 2}, "e": step05}
    runs = [read_run(write_run(tmp_path / name, [1.0], config=config)) for name, config in configs.items()]
    second, last = "step02 dp 2 dp-mode naive", "step05 bucket-mb 1 no-sequence-parallel schedule zbv"
    assert labels(runs) == ["step01", f"{second} (b)", f"{second} (c)", "d", last]


def test_notes_name_other_settings_and_what_was_left_out(tmp_path):
    settings = {"seed": 0, "dp": 1, "model_config": {"layers": 2}}
    other = {"seed": 1, "dp": 2, "layers": 3, "model_config": {"layers": 3}}
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    write_run(one, [1.0], config=settings), write_run(two, [1.0, 1.0], config=other), write_run(three, [])
    (three / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0, "grad_norm": 1.0}\n{"step": 3, "loss"')
    found = " ".join(notes(compare([read_run(each) for each in (one, two, three)])))
    for words in ("two: has 2 steps", "two: has layers 3 instead of 2, seed 1 instead of 0", "three: no corpus_sha256"):
        assert words in found
