"""`--log-to`: both dashboards get what `metrics.jsonl` gets, on rank 0, and go on with a run."""

import importlib
import math
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from common import collectives
from common.errors import UsageError
from common.metrics import read_metrics
from step01_single_gpu.running import run_record
from step01_single_gpu.running.dashboards import check_installed, numbers_of
from tests.harness.observing import configure
from tests.harness.ranks import run_ranks
from tests.parity.cases import ALL
from tests.unit.test_metrics import record_of, write_steps


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Stand-ins for both packages, which note what they are told: [(what, arguments)]."""
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            told.append(("tensorboard", (folder, purge_step)))

        def __getattr__(self, name):
            return lambda *arguments: told.append((name, arguments))

    run = SimpleNamespace(
        define_metric=lambda *names, **options: told.append(("define_metric", (names, options))),
        log=lambda numbers: told.append(("log", numbers)),
        finish=lambda: told.append(("finish", ())),
    )
    board, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    board.SummaryWriter = SummaryWriter
    wandb.init = lambda **options: told.append(("wandb", options)) or run
    for module in (board, wandb):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return told


def take(folder, log: str, steps: range, kept: int = 0) -> None:
    record = record_of(folder, first_step=kept, log_to=log)
    write_steps(record, steps, loss=2.5)
    record.close()


def test_tensorboard_gets_the_record_and_goes_on(packages, tmp_path):
    take(tmp_path, "tensorboard", range(3))
    scalars = [arguments for name, arguments in packages if name == "add_scalar"]
    for record in read_metrics(tmp_path / "metrics.jsonl"):
        expected = {name: value for name, value in record.items() if isinstance(value, float | int) and name != "step"}
        assert {name: value for name, value, step in scalars if step == record["step"]} == expected
        assert expected["loss"] == 2.5
    assert packages[0] == ("tensorboard", (str(tmp_path / "tensorboard"), 0)) and packages[-1] == ("close", ())
    assert [name for name, _ in packages].count("flush") == 3, "a kill would lose what was not written"
    take(tmp_path, "tensorboard", range(2, 4), kept=2)
    assert [arguments[1] for name, arguments in packages if name == "tensorboard"] == [0, 2], "2 is taken once more"


def test_wandb_gets_the_record_stays_offline_and_goes_on(packages, tmp_path, monkeypatch):
    take(tmp_path, "wandb", range(3))
    (_, first), logged = packages[0], [numbers for name, numbers in packages if name == "log"]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [each | {"comm_bytes": {}, "peak_memory_bytes": None} for each in logged] == records
    assert (first["mode"], first["resume"], first["dir"]) == ("offline", None, str(tmp_path))
    assert first["config"]["lr"] == 1e-3 and first["name"] == tmp_path.name and packages[-1][0] == "finish"
    monkeypatch.setenv("WANDB_MODE", "online")
    take(tmp_path, "wandb", range(2, 4), kept=2)
    take(tmp_path, "wandb", range(2))  # which replaces the record
    _, second, third = [options for name, options in packages if name == "wandb"]
    assert (second["mode"], second["resume"], second["id"]) == ("online", "allow", first["id"])
    assert third["resume"] is None and third["id"] != first["id"]


def test_a_package_that_fails_is_one_line(packages, tmp_path, monkeypatch):
    def fails(**options):
        raise RuntimeError("no account\n  a long explanation")

    monkeypatch.setattr(sys.modules["wandb"], "init", fails)
    with pytest.raises(UsageError, match="^--log-to wandb: no account$"):
        record_of(tmp_path, log_to="wandb")


def test_what_is_missing_is_said_before_training(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(UsageError, match=f"^--log-to {name} needs a package .* pip install {name}$"):
            configure(1, f"--log-to {name} --run-dir x", 1)
        with pytest.raises(UsageError, match="^--log-to needs --run-dir, which is missing$"):
            configure(1, f"--log-to {name}", 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_installed("wandb")


def test_numbers_of_groups_have_a_name_each():
    record = {"step": 3, "loss": math.inf, "peak_memory_bytes": None, "comm_bytes": {"dp_cp": 40, "tp": 8}}
    assert numbers_of(record) == {"loss": math.inf, "comm_bytes/dp_cp": 40, "comm_bytes/tp": 8}


def all_reduces(folder) -> bool:
    """Two steps with an all-reduce of 10 and then of 1,000 float32. Returns whether this rank writes."""
    shown = []
    with mock.patch.object(run_record, "open_dashboard", lambda *arguments: (shown.append, None)):
        record = record_of(folder, log_to="wandb")
    for step, elements in enumerate((10, 1000)):
        with record.step(step) as measured:
            collectives.all_reduce(torch.ones(elements), record.mesh.world)
            measured.update(loss=1.0, grad_norm=1.0)
    return record.file is not None and len(shown) == 2, bool(shown)


def test_comm_bytes_are_those_of_the_step(tmp_path):
    assert run_ranks(2, all_reduces, tmp_path) == [(True, True), (False, False)], "rank 0 alone writes and shows"
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [each["comm_bytes"] for each in records] == [{"world": 40}, {"world": 4000}]  # 2(N-1)/N of the tensor


@pytest.mark.skipif(not ALL, reason="the package is in the extra `logging`: with TEST_ALL=1")
def test_tensorboard_itself(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    take(tmp_path, "tensorboard", range(5))
    take(tmp_path, "tensorboard", range(3, 7), kept=3)
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [each.step for each in shown.Scalars("loss")] == list(range(7)) and {"lr", "mfu"} <= {
        *shown.Tags()["scalars"]
    }
