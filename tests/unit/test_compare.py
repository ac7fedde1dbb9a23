"""The comparison of runs: differences, exit status, refusals and the picture."""

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from common.errors import UsageError
from common.record.compare import compare, labels, main, notes, plot, read_run, relative_difference, table

ROOT = Path(__file__).parents[2]


def write_run(path, losses, norms=None, config=None):
    """A run directory with these curves; config None writes no config.json."""
    path.mkdir()
    lines = [
        json.dumps({"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": 100.0})
        for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses)))
    ]
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if config is not None:
        (path / "config.json").write_text(json.dumps({"corpus_sha256": "abc", "lr": 1e-3} | config))
    return path


@pytest.fixture
def pair(tmp_path):
    """Reference and a run that differs by 1e-3 in loss at step 1 and by 0.5 in gradient norm at step 2."""
    one = write_run(tmp_path / "one", [4.0, 2.0, 1.0], [1.0, 1.0, 2.0], {})
    two = write_run(tmp_path / "two", [4.0, 2.002, 1.0], [1.0, 1.0, 1.0], {})
    return one, two


@pytest.fixture
def no_picture(monkeypatch):
    """Drawing takes most of the time of a command that is about its exit status."""
    monkeypatch.setattr("common.record.compare.plot", lambda *arguments: None)


def run_main(*arguments, out):
    return main([*map(str, arguments), "--out", str(out)])


def test_relative_difference():
    assert relative_difference(2.0, 2.5) == 0.25 and relative_difference(-2.0, 2.0) == 2.0
    assert relative_difference(0.0, 0.0) == 0.0 and relative_difference(0.0, 1e-300) > 1e7
    assert relative_difference(math.nan, math.nan) == relative_difference(math.inf, math.inf) == 0.0
    for a, b in (
        (math.nan, 1.0),
        (1.0, math.nan),
        (1.0, math.inf),
        (math.inf, 1.0),
        (None, 1.0),
        (1.0, None),
    ):
        assert relative_difference(a, b) == math.inf


def test_rows_hold_the_largest_differences_and_their_steps(pair):
    reference, other = compare([read_run(path) for path in pair])
    assert reference.worst == {"loss": (0.0, 0), "grad_norm": (0.0, 0)}
    assert other.worst == {"loss": (pytest.approx(1e-3), 1), "grad_norm": (0.5, 2)}
    assert other.steps == [0, 1, 2] and other.differences["loss"][2] == 0.0
    cells = table([reference, other]).splitlines()[-1].split()
    assert cells == ["two", "3", "1.000000", "100", "1.00e-03", "1", "5.00e-01", "2"]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ([], 0),  # without a tolerance only what cannot be compared fails
        (["--tolerance", "0.5"], 0),  # exactly the tolerance is not above it
        (["--tolerance", "0.4"], 1),
        (["--tolerance", "0.4", "--key", "loss"], 0),
        (["--tolerance", "0.4", "--steps", "2"], 0),
        (["--tolerance", "1e-4", "--key", "loss,grad_norm"], 1),
    ],
)
def test_exit_status(pair, tmp_path, options, status, capsys, no_picture):
    assert run_main(*pair, *options, out=tmp_path / "x.png") == status
    text = capsys.readouterr()
    assert text.err == "" and ("FAIL two: grad_norm" in text.out) == (status == 1)


def test_a_run_agrees_with_itself_at_tolerance_zero(pair, tmp_path, no_picture):
    assert run_main(pair[0], pair[0], "--tolerance", "0", out=tmp_path / "x.png") == 0


def test_nan_in_one_run_only_is_a_difference(tmp_path, capsys, no_picture):
    one = write_run(tmp_path / "one", [1.0, "nan", "nan"], config={})
    two = write_run(tmp_path / "two", [1.0, "nan", 1.0], config={})
    assert run_main(one, two, "--tolerance", "1e9", out=tmp_path / "x.png") == 1
    assert "loss differs by inf at step 2" in capsys.readouterr().out
    assert run_main(one, one, "--tolerance", "0", out=tmp_path / "x.png") == 0


def test_runs_of_different_length_compare_their_common_steps(tmp_path, capsys, no_picture):
    long = write_run(tmp_path / "long", [3.0, 2.0, 1.0], config={})
    short = write_run(tmp_path / "short", [3.0, 2.0], config={})
    assert run_main(long, short, "--tolerance", "0", out=tmp_path / "x.png") == 0
    assert "short: has 2 steps, 3 in the reference; compared the 2 that both have" in capsys.readouterr().out


def test_other_settings_are_noted_but_not_refused(tmp_path):
    one = write_run(tmp_path / "one", [1.0], config={"seed": 0, "dp": 1, "run_dir": "a", "torch_version": "2.11"})
    two = write_run(tmp_path / "two", [1.0], config={"seed": 1, "dp": 2, "run_dir": "b", "torch_version": "2.13"})
    three = write_run(tmp_path / "three", [1.0])
    assert notes(compare([read_run(one), read_run(two), read_run(three)])) == [
        "two: has seed 1 instead of 0",
        "three: no corpus_sha256 in config.json, the corpus was not checked",
    ]


def test_a_half_written_last_line_is_left_out(pair, tmp_path, capsys, no_picture):
    with (pair[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss"')
    assert run_main(*pair, out=tmp_path / "x.png") == 0
    assert "half written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "No such file"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "holds no step"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{broken\n'),
            "line 2 is not the record",
        ),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n'),
            "no 'grad_norm' at step 0",
        ),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "loss": "x"}\n'), "is not a number"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 9}\n'), "no step in common"),
        (lambda run: (run / "config.json").write_text("{broken"), "config.json, line 1"),
        (lambda run: (run / "config.json").write_text("[]"), "does not hold an object"),
        (lambda run: (run / "config.json").write_text('{"corpus_sha256": "other"}'), "different corpora"),
    ],
)
def test_what_cannot_be_compared_exits_with_2_and_one_line(pair, tmp_path, spoil, message, capsys):
    spoil(pair[1])
    assert run_main(*pair, "--tolerance", "1e9", out=tmp_path / "x.png") == 2
    error = capsys.readouterr().err
    assert message in error and str(pair[1]) in error and error.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "arguments", [["missing"], ["one", "--key", ""], ["one", "--steps", "0"], ["one", "--key", "nothing"]]
)
def test_unusable_arguments_exit_with_2_and_one_line(pair, tmp_path, arguments, capsys):
    assert run_main(tmp_path / arguments[0], *arguments[1:], out=tmp_path / "x.png") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("tolerance", ["nan", "-1", "x"])
def test_a_tolerance_that_nothing_could_fail_is_refused(pair, tolerance, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(pair[0]), f"--tolerance={tolerance}"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_picture_that_cannot_be_written(pair, tmp_path, capsys):
    assert run_main(*pair, out=tmp_path / "x.unknown") == 2
    assert run_main(*pair, out=pair[0] / "metrics.jsonl" / "x.png") == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_labels(tmp_path):
    configs = {
        "a": {"step_name": "step01_single_gpu", "dp": 1, "dp_mode": "bucket"},
        "b": {"step_name": "step02_data_parallel", "dp": 2, "dp_mode": "naive"},
        "c": {"step_name": "step02_data_parallel", "dp": 2, "dp_mode": "naive"},
        "d": {"dp": 2},
    }
    runs = [read_run(write_run(tmp_path / name, [1.0], config=config)) for name, config in configs.items()]
    second = "step02_data_parallel dp 2 naive"
    assert labels(runs) == ["step01_single_gpu", f"{second} (b)", f"{second} (c)", "d"]


def test_reading_the_file_or_its_folder_is_the_same(pair):
    assert read_run(pair[0] / "metrics.jsonl") == read_run(str(pair[0]))


def test_the_picture(tmp_path):
    norms = [1.0, "inf", 3.0]
    runs = [read_run(write_run(tmp_path / "reference", [3.0, 2.0, 1.0], norms, {}))]
    for index in range(5):
        losses = [3.0, 2.0 + 1e-6 * index, "nan" if index == 4 else 1.0]
        runs.append(read_run(write_run(tmp_path / f"run{index}", losses, norms, {})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of glyphs, layouts and empty legends
        plot(compare(runs), tmp_path / "pictures" / "all.png", tolerance=1e-5)
        plot(compare(runs[:1], ("loss",)), tmp_path / "one.png")
    for name in ("pictures/all.png", "one.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_command(pair, tmp_path):
    command = [sys.executable, "-m", "common.compare", *map(str, pair), "--tolerance", "1e-5"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL two" in done.stdout, done.stderr
    assert (tmp_path / "compare.png").exists()


def test_usage_errors_can_be_caught(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_run(tmp_path / "nowhere")
