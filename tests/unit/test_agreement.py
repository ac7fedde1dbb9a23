"""Nodes with other flags, texts, weights, checkpoints or versions do not train together: one line says what differs."""

import os
import sys
import threading
from concurrent import futures
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint  # noqa: F401, so that the fork server imports it once for all ranks
from safetensors.torch import save_file

from common.checkpoints import checkpoint
from common.checkpoints.boxes import SavedBox
from common.config import ROLES, flag_names, spelled
from common.errors import UsageError
from common.launching import all_ranks, launch
from common.launching.agreement import OWN, PATHS, PIECE, PIECES, _by_rank, agree, facts_of, versions, weights_digest
from common.process_groups import Degrees, Mesh, build_mesh
from common.rope_scaling import RopeScaling
from common.start import environment
from step01_single_gpu.data.batches import load_batches
from tests.harness.observing import configure
from tests.harness.ranks import run_ranks, run_script

SMALL = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 384 --seq-len 16 --data synthetic --device cpu --steps 1"
SCHEDULES = "F0,F1,B0,B1\nF0,B0,F1,B1\n", "F0,F1,B1,B0\nF0,F1,B1,B0\n"
PP = "--pp 2 --micro-batch 4 --schedule-file"


def everyone() -> Mesh:
    return build_mesh(Degrees(dp=environment().world_size), torch.device("cpu"))


def held() -> list[SavedBox]:
    return [SavedBox("w", (2,), ((0, 2),), torch.zeros(2))]


def make_nodes(folder: Path) -> None:
    """Two nodes, folder/0 and folder/1, on which the same paths lead to other files; only copy*.csv are equal."""
    for node in range(2):
        here = folder / str(node)
        (here / "weights").mkdir(parents=True)
        (here / "text.txt").write_text("ab"[node] * 5000)
        (here / "own.csv").write_text(SCHEDULES[node])
        (here / f"copy{node}.csv").write_text(SCHEDULES[0])
        save_file({"w": torch.full((1_000_000,), float(node))}, here / "weights/model.safetensors")
        checkpoint.save(here / "run", 1, held(), {"node": node}, everyone())


def refusal(call, *arguments) -> str:
    """The line with which this rank refuses, or nothing."""
    try:
        call(*arguments)
    except UsageError as refused:
        return str(refused)
    return ""


def test_a_rank_that_takes_longer_than_a_timeout_keeps_in_touch():
    """Ranks that are done ask again and again until the slow one is, which a thread of it computes."""
    world, rounds, slow = SimpleNamespace(size=2), [], threading.Event()

    def gather(mine: tuple, group) -> list:  # rank 0 is done at once, this is rank 1
        rounds.append(mine)
        if len(rounds) == 3:
            slow.set()
            threads[0].join(10)
        return [("fast", None), mine]

    def work() -> str:
        threads.append(threading.current_thread())
        slow.wait(10)
        return "slow"

    threads = []
    with mock.patch.object(all_ranks.collectives, "all_gather_objects", gather):
        with mock.patch.object(all_ranks, "wait", lambda work, seconds: futures.wait(work, 0.01 * seconds)):
            assert all_ranks.on_all_ranks(SimpleNamespace(world=world), work) == ["fast", "slow"]
            assert rounds == [None] * 3 + [("slow", None)]
            rounds.clear()

            def fail():
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):  # no error that all ranks can share: this one's traceback says more
                all_ranks.on_all_ranks(SimpleNamespace(world=world), fail)
            assert rounds == []


def on_two_nodes(folder: Path) -> dict[str, str]:
    """The refusals of this rank, by the kind of difference."""
    mesh, rank = everyone(), environment().rank
    os.chdir(folder / str(rank))

    def start(*flags: str) -> str:
        config = configure(8, f"{SMALL} {flags[rank % len(flags)]}")
        return refusal(agree, mesh, lambda: facts_of(config))

    found = {"nothing": start("")}
    found["lr"] = start("", "--lr 0.002")
    found["hidden"] = start("", "--hidden 64")
    found["degrees"] = start("--tp 2", "--pp 2")
    found["saving"] = start("", "--run-dir x --save-every 1")
    found["schedule"] = start(f"{PP} own.csv")
    found["weights"] = start("--init-from weights")
    found["no weights"] = start("--init-from weights", "--init-from a/b/c")
    found["its own"] = start(f"{PP} copy0.csv --run-dir x", f"{PP} copy1.csv --run-dir y --timeout 9 --layer-delay 3")
    with mock.patch.object(torch, "__version__", f"2.{rank}"):
        found["torch"] = start("")
    with mock.patch.dict(sys.modules, {"common.another": SimpleNamespace(__file__="text.txt")}):
        found["source"] = start("")
    found["text"] = refusal(load_batches, configure(8, f"{SMALL} --data text.txt"), mesh)
    found["checkpoint"] = refusal(checkpoint.load, Path("run/checkpoints/step-00000001"), held(), mesh)
    return found


def test_every_kind_of_difference_is_one_line_on_all_ranks(tmp_path):
    make_nodes(tmp_path)
    ranks = run_ranks(2, on_two_nodes, tmp_path)
    assert ranks[0] == ranks[1]
    found = {kind: line.removeprefix("all ranks must agree, but ") for kind, line in ranks[0].items()}
    assert found["nothing"] == found["its own"] == ""
    assert found["lr"] == "--lr is 0.001 on rank 0, 0.002 on rank 1"
    assert found["hidden"].startswith("--hidden is 32 on rank 0, 64 on rank 1")
    assert found["degrees"] == "--tp is 2 on rank 0, 1 on rank 1; --pp is 1 on rank 0, 2 on rank 1"
    assert "--save-every is 0 on rank 0, 1 on rank 1" in found["saving"]
    assert "--run-dir is none on rank 0, given on rank 1" in found["saving"]
    assert found["torch"] == "torch is 2.0 on rank 0, 2.1 on rank 1"
    for kind, flag in ("schedule", "--schedule-file"), ("weights", "--init-from"):
        assert found[kind].startswith(f"the content of {flag} is ") and ";" not in found[kind], found[kind]
    assert found["no weights"].startswith("--init-from a/b/c cannot be read (")
    assert found["source"].startswith("this project's source is ")
    assert found["text"].startswith("sha256 of the corpus is "), found["text"]
    assert "all ranks must agree, but the SHA-256 of its manifest.json is " in found["checkpoint"]
    assert all("\n" not in line for line in found.values())


@pytest.mark.parametrize("module", ["__main__", "common.another", "step01_single_gpu.another", "step08_5d.another"])
def test_the_source_is_that_of_the_script_too(module, tmp_path):
    """A train.py that was started is `__main__`, and in no package. What others have written does not count."""

    def source(name: str, content: str) -> str:
        (tmp_path / "code.py").write_text(content)
        with mock.patch.dict(sys.modules, {name: SimpleNamespace(__file__=str(tmp_path / "code.py"))}):
            return versions()["this project's source"]

    assert source(module, "a") == source(module, "a") != source(module, "b")
    assert source("commonplace", "a") == source("commonplace", "b")


OTHER_FLAGS_ON_RANK_1 = """
import os, runpy, sys
_, *sys.argv = sys.argv
sys.argv += "--pp 2 --hidden 64".split() if os.environ["RANK"] == "1" else ["--tp", "2"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_whose_groups_would_differ_do_not_wait_for_each_other(tmp_path):
    script = tmp_path / "other_flags.py"
    script.write_text(OTHER_FLAGS_ON_RANK_1)
    done = run_script(script, "step05_pipeline/train.py", *SMALL.split(), ranks=2, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: all ranks must agree, but --"), done.stderr
    assert "--hidden is 32 on rank 0, 64 on rank 1" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_any_rank_may_be_the_one_that_differs():
    """Also one in the middle, whose neighbours are equal; what is equal is not named."""
    for odd in range(3):
        facts = [{"torch": "2.13", "--lr": 0.2 if rank == odd else 0.1} for rank in range(3)]
        with mock.patch("common.launching.agreement.on_all_ranks", lambda mesh, function, facts=facts: facts):
            line = refusal(agree, None, None)
        assert line.startswith("all ranks must agree, but --lr is ") and f"0.2 on rank {odd}" in line, line
        assert "torch" not in line


def test_every_part_of_the_models_shape_is_compared():
    """Also what no flag sets, and two nodes' folders of one name may say differently."""
    config = configure(8, SMALL, 1)
    shape = config.model_config
    others = {"norm_eps": 1e-6, "rope_theta": 5e5, "rope_scaling": RopeScaling(8, 1, 4, 8192), "gate": "sigmoid"}
    others |= {each.name: (getattr(shape, each.name) or 0) + 1 for each in fields(shape) if each.name not in others}
    mine = facts_of(config)
    for name, value in others.items():
        config.model_config = replace(shape, **{name: value})
        theirs = facts_of(config)
        assert mine.keys() == theirs.keys()
        different = [each for each in mine if mine[each] != theirs[each]]
        assert different in ([spelled(name)], [f"the model's {name}"]), (name, different)


def test_weights_are_looked_at_from_their_beginning_to_their_end(tmp_path):
    """Two models that have a part in common are two models, wherever it is: in PIECES places a file is looked at."""
    length, found = 3 * PIECE, set()
    file = tmp_path / "model.safetensors"
    for place in (None, *range(PIECES)):
        content = bytearray(PIECES * length)
        if place is not None:
            content[place * length + PIECE - 1] = 1
        file.write_bytes(content)
        found.add(weights_digest(str(tmp_path)))
    file.rename(tmp_path / "model-1-of-2.safetensors")
    (tmp_path / "model-2-of-2.safetensors").write_bytes(b"more")
    found.add(weights_digest(str(tmp_path)))
    assert len(found) == 1 + PIECES + 1


def test_ranks_are_listed_briefly():
    assert _by_rank([1, 1, 1, None]) == "1 on ranks 0 to 2, none on rank 3"
    assert _by_rank([1, 2] * 2) == "1 on ranks 0, 2, 2 on ranks 1, 3"
    assert _by_rank([1, 2] * 50) == "1 on ranks 0, 2, 4, 6 ..., 2 on ranks 1, 3, 5, 7 ..."
    assert _by_rank(range(9)) == "0 on rank 0, 1 on rank 1, 2 on rank 2, and so on"


def test_every_flag_is_compared_unless_a_rank_may_have_its_own():
    compared, flags = facts_of(configure(8, SMALL, 1)), flag_names(*ROLES)
    assert {name for name in flags if spelled(name) not in compared} == {*OWN, *PATHS} - {"run_dir"}
    assert set(OWN) <= set(flag_names("logging")), "no number depends on these"


def test_what_no_launcher_can_have_set_is_bad_input(monkeypatch, capfd):
    refused, statuses = "^the environment variable {} is '{}', which is no number$", []
    monkeypatch.setattr(launch.os, "_exit", statuses.append)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    for rank, size, local, words in [
        ("", "2", "0", refused.format("RANK", "")),
        ("0", "two", "0", refused.format("WORLD_SIZE", "two")),
        ("0", "2", "0.5", refused.format("LOCAL_RANK", "0.5")),
        ("2", "2", "0", "^RANK 2 is none of a world of WORLD_SIZE 2"),
        ("-1", "2", "0", "^RANK -1 is none of"),
        ("0", "0", "0", "^RANK 0 is none of a world of WORLD_SIZE 0"),
    ]:
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local)):
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=words):
            launch.environment()
        launch.end_cleanly(pytest.fail)
        assert capfd.readouterr().err.startswith(f"error: {words[1:12]}") and statuses.pop() == 2 and not statuses


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_do_not_know_their_rank_do_not_train_side_by_side(name, monkeypatch):
    for each in ("RANK", "WORLD_SIZE", *launch.SIZES):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # also in a batch script, which is one process
    for alone in ("1", ""):
        monkeypatch.setenv(name, alone)
        launch.check_launcher()
    monkeypatch.setenv(name, "8")
    with pytest.raises(UsageError, match=f"^8 processes .{name}., .* one torchrun on each node.*$"):
        launch.check_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="^only WORLD_SIZE of RANK and WORLD_SIZE is set"):
        launch.check_launcher()
    monkeypatch.setenv("RANK", "1")
    launch.check_launcher()
