"""Commands of one process: what they return, and what becomes of what they print."""

import io
import json
import os
import pwd
import re
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from common.config import spelled
from common.errors import UsageError
from common.launching.command_line import FLAGS, OneLineParser, at_home, one_line_errors, parse, parser
from step01_single_gpu.data.token_cache import load_corpus
from tests.harness.ranks import ROOT


def fails():
    raise UsageError("what was wrong")


def test_status_and_line(capsys):
    assert [one_line_errors(main)() for main in (lambda: None, lambda: 1, fails)] == [0, 1, 2]
    assert capsys.readouterr().err == "error: what was wrong\n"


@pytest.mark.parametrize("buffered", [True, False])
def test_nobody_reads(monkeypatch, buffered):
    """Without a buffer, as under `python -u`, it is `print` that fails."""

    def help():
        OneLineParser(prog="command").parse_args(["--help"])

    for main in (lambda: print("three lines are enough"), help):
        reader, writer = os.pipe()
        os.close(reader)
        with (
            os.fdopen(writer, "w") if buffered else io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as pipe
        ):
            monkeypatch.setattr(sys, "stdout", pipe)
            if main is help and not buffered:  # argparse does not mind
                with pytest.raises(SystemExit, match="0"):
                    one_line_errors(main)()
            else:
                assert one_line_errors(main)() == 141


def test_another_pipe_is_an_error():
    @one_line_errors
    def main():
        reader, writer = os.pipe()
        os.close(reader)
        os.write(writer, b"to a rank, say")

    with pytest.raises(BrokenPipeError):
        main()


def test_what_the_terminal_cannot_show(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii"))
    assert one_line_errors(lambda: print("2 \N{GREEK CAPITAL LETTER PSI}"))() == 0
    assert printed.getvalue() == b"2 \\u03a8\n"


def test_a_command_in_any_python(tmp_path):
    """Without docstrings and assertions, in an ASCII locale, with names that it lacks, and into a closed pipe."""
    for name in ("\u00fcbung", "zweite"):
        (folder := tmp_path / name).mkdir()
        record = {"step": 0, "loss": 1.0, "grad_norm": 2.0, "tokens_per_s": 3.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "config.json").write_text(f'{{"data": "{name}.txt"}}', encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONOPTIMIZE": "2"}
    runs = [tmp_path / name for name in ("zweite", "\u00fcbung")]
    command = [sys.executable, "-m", "common.compare", *runs, "--out", tmp_path / "picture.png"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"bung.txt instead of zweite.txt" in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_home_that_nothing_names(monkeypatch, tmp_path):
    """In a container whose user has no name. Python leaves the ~ as it is: a folder of that name would appear here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert [at_home(path) for path in ("~/x", "~", "x/~", "~x", "")] == ["/home/me/x", "/home/me", "x/~", "~x", ""]
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("ULTRASCALE_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError
    with pytest.raises(UsageError, match="^~/x is in a home folder, but HOME is not set and this user is not known$"):
        parse(1, ["--run-dir", "~/x"])
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UsageError, match="^cannot keep tokens: ~/.cache/.*; ULTRASCALE_CACHE names another folder$"):
        load_corpus("text.txt", None, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("step", range(1, 9))
def test_the_help_is_in_groups_by_role_and_step(step):
    text = parser(step).format_help()
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "][1:]
    assert titles[0] == "model" and [title for title in titles if "," not in title][1:] == [
        *("data", "optimisation", "layout", "run")
    ]
    assert all(int(title.split(", step ")[1][0]) <= step for title in titles if "," in title)
    for title, start in (("model", "--model"), ("run", "--steps"), ("layout, step 5 (pipeline)", "--pp")):
        if title in titles:
            assert re.search(rf"^{re.escape(title)}:\n  {start} ", text, re.MULTILINE), title
    known = {spelled(item.name) for item in FLAGS if item.metadata["step"] <= step}
    assert known == set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)), "each once, and none besides"


def test_torchrun_hands_every_flag_on():
    """`--log`, say, could be two of its own flags: for that, argparse of Python 3.11 refuses it after a script, too."""
    flags = [flag for action in parser(8)._actions for flag in action.option_strings]
    assert "--log-to" in flags
    for flag in flags:
        arguments = get_args_parser().parse_args(["--nproc_per_node", "2", "train.py", flag])
        assert (arguments.training_script, arguments.training_script_args) == ("train.py", [flag])
