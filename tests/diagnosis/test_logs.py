"""Logs of any program are read, and the command says what it finds in them, or in one line what it cannot read."""

import math
from pathlib import Path

import pytest

from common.compare import main
from common.explaining.logs import Log, plain, read_log
from tests.diagnosis.test_explain import LOSSES, NORMS, scaled

# ---- logs ------------------------------------------------------------------------------------------------------------

LOGS = {
    "wandb.csv": "Step,run 7 - train/loss,run 7 - train/loss__MIN,run 7 - train/Grad Norm\n1,5.5,5,1.25\n2,5.4,5,1.5\n",
    "semicolons.csv": "iteration;lm loss;grad-norm;note\n1;5.5;1.25;\n2;5.4;1.5;x\n",
    "trainer_state.json": '{"log_history": [{"step": 1, "loss": 5.5, "grad_norm": 1.25}, {"step": 1, "eval_loss": 3},'
    ' {"step": 2, "loss": 5.4, "grad_norm": 1.5}]}',
    "lines.jsonl": '{"step": 1, "loss_metrics/global_avg_loss": 5.5, "grad_norm": 1.25}\n'
    '{"step": 2, "loss_metrics/global_avg_loss": 5.4, "grad_norm": 1.5}\n',
    "metrics.jsonl": '{"step": 1, "loss": 5.5, "grad_norm": 1.25}\n{"step": 2, "loss": 5.4, "grad_norm": 1.5}\n{"step"',
    "words.txt": "iter loss gnorm\n1 5.5 1.25\n2 5.4 1.5\n",
    "printed.log": "building\n iteration 1/ 9 | rate: 1.5E-05 | lm loss: 5.5E+00 | grad norm: 1.25 |\n"
    " iteration 2/ 9 | rate: 1.5E-05 | lm loss: 5.4E+00 | grad norm: 1.5 |\n",
    "coloured.log": "[rank0]:\x1b[31mstep: 1  \x1b[32mloss:  5.5  \x1b[38mgrad_norm: 1.25  memory: 1.2GiB\x1b[0m\n"
    "[rank0]:\x1b[31mstep: 2  \x1b[32mloss:  5.4  \x1b[38mgrad_norm: 1.5\x1b[0m\n",
    "resumed.csv": "step,loss,grad_norm\n1,5.5,1.25\n2,9,9\n2,5.4,1.5\n",
    "wandb_rows.csv": "_step,train/global_step,train/loss,train/grad_norm,eval/loss\n"
    "0,1,5.5,1.25,NaN\n1,1,NaN,NaN,6\n2,2,5.4,1.5,NaN\n",
    "fairseq.json": '{"epoch": 1, "update": 0.1, "loss": "5.5", "num_updates": "1", "gnorm": "1.25"}\n'
    '{"epoch": 1, "update": 0.2, "loss": "5.4", "num_updates": "2", "gnorm": "1.5"}\n',
    "lightning.csv": "epoch,grad_norm,step,train_loss_epoch,train_loss_step\n0,1.25,1,,5.5\n0,1.5,2,,5.4\n0,,2,5.45,\n",
    "goes_on.jsonl": '{"step": 1, "loss": 5.5, "grad_norm": 1.25}\n{"step": 2, "loss": 5.4, "grad_norm": 1.5}\n{"st',
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_of_others_are_read(name, tmp_path):
    (tmp_path / name).write_text(LOGS[name])
    read = read_log(tmp_path if name in ("metrics.jsonl", "trainer_state.json") else tmp_path / name)
    assert read.values.pop("lr", None) in (None, {1: 1.5e-5, 2: 1.5e-5})
    assert read.values == {"loss": {1: 5.5, 2: 5.4}, "grad_norm": {1: 1.25, 2: 1.5}}


def test_names_and_digits():
    assert plain("run 7 - train/Grad Norm") == plain("optim/grad_norm") == "grad_norm" != plain("val/grad_norm")
    for text, resolution in (
        (["1.2340", "1.2300"], 5e-4 / 1.2335),
        (["1.2e-05", "2.5e-05"], 0.05),
        ([repr(1 / 3)], 1e-16),
    ):
        column = {"loss": dict(enumerate(map(float, text)))}
        assert Log(Path("x"), {}, column).resolution("loss") == pytest.approx(resolution, rel=1)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """The reference, rounding, and a bug, as files of another program."""
    near = [loss * (1 + 1e-7 * math.sin(7 * step)) for step, loss in enumerate(LOSSES)]
    for name, losses, norms in (("a", LOSSES, NORMS), ("near", near, NORMS), ("bug", LOSSES, scaled(NORMS, 3.0))):
        rows = [f"{step},{loss!r},{norm!r}" for step, (loss, norm) in enumerate(zip(losses, norms))]
        (tmp_path / f"{name}.csv").write_text("\n".join(["it,L,norm", *rows]))
    return lambda name: [str(tmp_path / "a.csv"), str(tmp_path / name), "--explain", "--columns", "step=it,loss=L"]


def test_the_command(files, capsys, tmp_path):
    assert main([*files("near.csv"), "--type", "float32"]) == 0 and "verdict: rounding" in capsys.readouterr().out
    assert main([*files("bug.csv"), "--plot", str(tmp_path / "x.png")]) == 1
    assert "verdict: a bug" in capsys.readouterr().out and (tmp_path / "x.png").stat().st_size > 5000
    assert main([*files("near.csv"), "--type", "float32", "--steps", "2"]) == 3
    (tmp_path / "broken.jsonl").write_text('{"it": 1, "L": 2}\n{broken\n{"it": 2, "L": 1}\n')
    (tmp_path / "other.csv").write_text("it,L,norm\n900,1,1\n")
    (tmp_path / "known.csv").write_text((tmp_path / "near.csv").read_text().replace("it,L,norm", "step,loss,norm"))
    assert main([*files("known.csv"), "--type", "float32"]) == 0, "a name is used in the file that has it"
    capsys.readouterr()
    (tmp_path / "comma.csv").write_text("it;L\n1;5,5\n")
    (tmp_path / "epochs.csv").write_text("it,L\n0.5,5.5\n")
    (tmp_path / "printed.txt").write_text("  0%|  | 0/2 [00:00<?, ?it/s]\n{'loss': 5.5, 'epoch': 0.1}\n")
    for arguments, message in (
        ([files("near.csv")[0], "--explain"], "compares two runs, not 1"),
        ([*files("near.csv"), "--type", "int8"], "--type int8: rounding was measured in float64, float32, bfloat16"),
        ([*files("near.csv")[:3], "--columns", "step=it"], "no column that is the loss (--columns loss=NAME)"),
        ([*files("near.csv")[:3], "--columns", "step=it,loss=M"], "no column 'M'; its columns are it, L, norm"),
        ([*files("near.csv")[:3], "--columns", "speed=it"], "--columns speed: only step, loss, grad_norm, lr"),
        ([*files("near.csv"), "--tolerance", "1"], "--tolerance"),
        ([*files("near.csv")[:2], "--plot", "x.png"], "--plot x.png needs --explain"),
        (files("none.csv"), "cannot be read"),
        (files("broken.jsonl"), "line 2 is no JSON object"),
        (files("comma.csv"), "in its first row, it = '1', L = '5,5', and one is no number"),
        (files("epochs.csv"), "'it' is 0.5, which is no number of a step (--columns step=NAME)"),
        ([files("x")[0], str(tmp_path / "printed.txt"), *files("x")[2:]], "its columns are loss, epoch"),
        ([*files("near.csv"), "--columns", "step=it,loss=L,grad_norm=x"], "--columns grad_norm=x: neither"),
        (files("near.csv")[:2], "is a file: --explain reads those of any program"),
        (files("other.csv"), "no step to compare in common"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
