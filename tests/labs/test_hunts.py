"""Labs of the kind hunt: each bug is visible in what its lab lets the student run, and its repair passes."""

import ast
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.labs import __main__ as command
from common.labs import forks, training
from common.labs.copies import read
from common.labs.find import ROOT
from common.labs.hunt import TOLERANCE, Bug, Hunt
from common.labs.training import SMALL, Launch, first_difference, sends_less, train
from common.launching.process_tree import marked, new_mark
from step01_single_gpu.labs import hunt_means
from step02_data_parallel.labs import hunt_samples
from step03_zero.labs import hunt_shards
from step04_tensor_parallel.labs import hunt_parts
from step05_pipeline.labs import hunt_stages
from step06_context_parallel.labs import hunt_ring
from step07_expert_parallel.labs import hunt_experts
from step08_5d.labs import hunt_latent, hunt_together
from tests.harness.ranks import in_background, run_command, run_ranks, wait_for

MODULES = hunt_means, hunt_samples, hunt_shards, hunt_parts, hunt_stages, hunt_ring, hunt_experts, hunt_together
MODULES += (hunt_latent,)
LABS = [lab for module in MODULES for lab in module.LABS]
VARIANTS = [(lab, student) for lab in LABS for student in range(len(lab.bugs))]
ALWAYS = ("hunt-06-a-0",)  # the others with TEST_ALL
names = [f"{lab.id}-{student}" for lab, student in VARIANTS]


@pytest.fixture(autouse=True)
def forked_from_the_harness(monkeypatch):
    """The harness has imported torch already. Without it, each call of `train` imports it once more."""
    if not os.environ.get("TEST_ALL"):
        monkeypatch.setattr(
            training, "run_jobs", lambda path, theirs=False: run_ranks(1, forks.main, str(path), timeout=300)
        )


slow = pytest.mark.skipif(not os.environ.get("TEST_ALL"), reason="TEST_ALL")
each = pytest.mark.parametrize(
    ("lab", "student"),
    [pytest.param(*pair, id=name, marks=() if name in ALWAYS else slow) for pair, name in zip(VARIANTS, names)],
)


def answer(folder: Path, file: str, line: int, why: str = "it forgets a part of the sum") -> None:
    (folder / "answer.toml").write_text(f'file = "{file}"\nline = {line}  # here\nwhy = "{why}"\n')


def place(lab: Hunt, bug: Bug) -> tuple[str, int]:
    file, ranges = next(iter(lab.places(bug).items()))
    return file, ranges[0][0]


def repair(folder: Path, bug: Bug) -> None:
    for file in bug.texts:
        shutil.copyfile(ROOT / file, folder / file)


@each
def test_a_bug_is_visible_and_its_repair_passes(lab, student, tmp_path):
    bug, folder = lab.bug(student), tmp_path / "lab"
    folder.mkdir()
    lab.start(folder, student)
    (tmp_path / "runs").mkdir()
    right, wrong = train([(run, folder) for run in bug.seen], tmp_path / "runs", SMALL)
    assert first_difference(right, wrong, TOLERANCE), "run.sh shows nothing"
    answer(folder, *place(lab, bug))
    (folder / "common" / "touched.py").touch()  # a file more is no repair
    assert lab.check(folder, student).score == 0.5
    if os.environ.get("TEST_ALL"):
        file = place(lab, bug)[0]
        (folder / file).write_text(f"# I have been here\n{read(folder / file)}")
        found = lab.check(folder, student)
        assert found.score == 0.5 and "On a training that you have not seen" in found.feedback[1]
    repair(folder, bug)
    found = lab.check(folder, student)
    assert found.passed and bug.why in found.feedback[-1]
    right, wrong = train([(run, folder) for run in bug.seen], tmp_path / "runs", SMALL)
    assert not first_difference(right, wrong, TOLERANCE), "run.sh still shows a difference"


@slow
@pytest.mark.parametrize(("lab", "student"), VARIANTS, ids=names)
def test_the_handout(lab, student, tmp_path):
    """As a student would: start, `bash run.sh`, see the bug in what it prints, repair it, check."""
    bug, folder, home = lab.bug(student), tmp_path / lab.id, ("--home", str(tmp_path))
    assert command.main(["start", lab.id, "--student", str(student), *home]) == 0
    assert "    bash run.sh\n" in read(folder / "TASK.md")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` and `torchrun` are those of the environment
    done = run_command(["bash", "run.sh"], cwd=folder, env={"PATH": path}, timeout=300)
    rows = re.findall(r'^(\w+)  "step": (\d) "loss": (\S+) "grad_norm": (\S+)$', done.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [(name, step) for step in "012" for name in ("right", "wrong")], done
    pairs = [(float(a), float(b)) for row in zip(rows[::2], rows[1::2]) for a, b in list(zip(*row))[2:]]
    assert any(abs(a - b) > TOLERANCE * abs(a) for a, b in pairs), done.stdout
    assert done.returncode == 1 and "\nFAIL " in done.stdout, done
    answer(folder, *place(lab, bug))
    repair(folder, bug)
    assert command.main(["check", *home]) == 0


@pytest.mark.parametrize(
    ("lab", "student"),
    [pytest.param(*pair, id=name, marks=slow if pair[1] else ()) for pair, name in zip(VARIANTS, names)],
)
def test_what_is_told(lab, student, tmp_path, monkeypatch):
    """Without trainings: what is planted, what the script says, what becomes of answers that are none."""
    monkeypatch.setattr("common.labs.hunt.train", lambda *_: pytest.fail("nothing was repaired"))
    bug = lab.bug(student)
    lab.start(tmp_path, student)
    script = read(tmp_path / "run.sh")
    assert all(run.script in script for run in bug.seen) and "common.compare" in script
    assert not [*tmp_path.rglob("hunt_*"), *tmp_path.rglob("sketch.py")]
    assert (tmp_path / "common" / "config.py").exists()
    assert all(read(tmp_path / file) != read(ROOT / file) for file in bug.texts)
    assert lab.check(tmp_path, student).score == 0
    file, line = place(lab, bug)
    for score, message, given in (
        (0.25, "is right, but line 1 is in another part. (Wrong place", (file, 1)),
        (0, "the bug is not in common/model.py", ("common/model.py", line)),
        (0, "names no file and line", ("", line)),
        (0, "in at least 4 words, it has 1.", (file, line, "wrong")),
        (0, "there is no step2/model.py in this folder, did you mean common/model.py?", ("step2/model.py", line)),
        (0.5, f"place: right, {file}, line {line}.", (f"./runs/labs/{lab.id}/{file}", line)),
        (0.5, "place: right", (file, line)),
    ):
        answer(tmp_path, *given)
        found = lab.check(tmp_path, student)
        assert found.score == score and message in found.feedback[0]
        assert "as you got them" in found.feedback[1]
    assert "https://" in lab.solution(student) or "no public report" in lab.solution(student)
    assert "+++" in lab.solution(student)


def test_files_that_are_gone(tmp_path):
    lab = LABS[1]
    with pytest.raises(UsageError, match=r"answer\.toml is missing"):
        lab.check(tmp_path, 0)
    lab.start(tmp_path, 0)
    (tmp_path / "step01_single_gpu/data/batches.py").unlink()
    with pytest.raises(UsageError, match=r"batches\.py is missing"):
        lab.check(tmp_path, 0)
    (tmp_path / "answer.toml").write_text("file: step02\n")
    with pytest.raises(UsageError, match="line 1: .* is not of the form"):
        lab.check(tmp_path, 0)


def test_a_repair_that_trains_alone_is_none():
    """Rank 0 by itself has the right losses, and sends nothing."""
    right, alone = ({0: {"comm_bytes": each}} for each in ({"dp": 1000, "pp": 10}, {}))
    right, alone = (SimpleNamespace(records=each) for each in (right, alone))
    assert sends_less(right, alone) == "a rank sends 0 bytes, where 1,010 are needed for every rank to take part"
    assert not sends_less(right, right) and not sends_less(alone, alone) and not sends_less(alone, right)


HANGS = """
import sys
sys.path.insert(0, '.')
from common import collectives
from common.process_groups import Degrees, build_mesh
from common.start import init_distributed
import torch
mesh = build_mesh(Degrees(dp=2), init_distributed('cpu'))
if mesh.rank == 0:
    collectives.all_reduce(torch.ones(1), mesh.world)
else:
    import time; time.sleep(60)
"""


FAILS = """
import traceback
try:
    raise ValueError('three ranks')
except ValueError:
    traceback.print_exc()
print('and a last word')
raise SystemExit(1)
"""


def test_a_hang_and_an_error_are_told(tmp_path):
    (tmp_path / "common").symlink_to(ROOT / "common")
    (tmp_path / "step00").mkdir()
    (tmp_path / "step00/hangs.py").write_text(HANGS)
    (tmp_path / "step00/fails.py").write_text(FAILS)
    with pytest.raises(UsageError, match=r"not through after 2 s: rank 0 waits in \w+, step00/hangs.py, line 10"):
        train([(Launch("step00/hangs.py", "", 2), tmp_path)], tmp_path, seconds=2)
    with pytest.raises(UsageError, match="failed: ValueError: three ranks"):
        train([(Launch("step00/fails.py", "", 2), tmp_path)], tmp_path)


def test_ranks_end_with_whoever_started_them(tmp_path, monkeypatch):
    """Also when Ctrl-C or a signal ends the process that forked them, while they wait for each other."""
    monkeypatch.setenv(*(mark := new_mark()))
    (tmp_path / "sleeps.py").write_text("import pathlib, time; pathlib.Path('began').touch(); time.sleep(60)")
    job = {"root": str(tmp_path), "command": ["sleeps.py"], "ranks": 2, "seconds": 60, "out": str(tmp_path / "out")}
    code = f"from common.labs import forks; forks.run({job})"
    process = in_background([sys.executable, "-c", code], tmp_path / "log")
    try:
        assert wait_for(lambda: (tmp_path / "began").exists() and len(marked(mark)) == 3, 60, process)
    finally:
        process.kill()
    process.wait()
    assert wait_for(lambda: not marked(mark), 10) is not None, "ranks stay behind"


def test_a_busy_machine_is_no_hang(monkeypatch):
    """Time counts while all ranks wait for each other, and while one computes; not while it waits for a processor."""
    clock, now, states = forks.Clock(), time.monotonic(), {}
    monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(forks, "state", lambda rank: states[rank])
    monkeypatch.setattr(forks, "LINUX", True)
    clock.at, passed, after = now, [], (0.1, 0.2)
    for letters, used in (
        ("SS", (0, 0)),
        ("RS", (0.1, 0)),
        ("RS", (0.1, 0)),
        ("DR", after),
        ("SS", after),
        ("DD", after),
    ):
        now += 1
        states.update(enumerate(zip(letters, used)))
        passed.append(clock.passed([0, 1]))
    assert passed == pytest.approx([1, 0.1, 0, 0.2, 1, 1])
    monkeypatch.setattr(forks, "LINUX", False)
    now += 3
    assert clock.passed([0, 1]) == pytest.approx(3)


DEAF = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); time.sleep(60)"


def test_a_rank_that_does_not_answer_is_killed(tmp_path):
    """Whoever is asked where it is, and stays there, has no second chance."""
    (tmp_path / "deaf.py").write_text(DEAF)
    job = {"root": str(tmp_path), "command": ["deaf.py"], "ranks": 2, "seconds": 2, "out": str(tmp_path / "out")}
    done = run_command([sys.executable, "-c", f"from common.labs import forks; print(forks.run({job}))"], timeout=30)
    assert done.stdout.count("'status': -9, 'ended': True") == 2, done


def test_a_rank_that_prints_without_end_is_ended_before_it_fills_the_disk(tmp_path):
    (tmp_path / "floods.py").write_text("while True:\n    print('x' * 20000)\n")
    job = {"root": str(tmp_path), "command": ["floods.py"], "ranks": 1, "seconds": 300, "out": str(tmp_path / "out")}
    code = f"import json; from common.labs import forks; print(json.dumps(forks.run({job})))"
    [rank] = json.loads(run_command([sys.executable, "-c", code], timeout=60).stdout)
    assert rank["ended"] and rank["flooded"] and len(rank["text"]) <= forks.LAST
    assert training._reason([rank], 300) == "prints without end: rank 0 is at floods.py, line 2 (<module>)"


AT_ITS_PACE = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep({} * rank); sys.exit({})"


@pytest.mark.parametrize(("status", "pause", "other"), [(0, 1, (0, False)), (1, 20, (-signal.SIGUSR1, True))])
def test_only_a_rank_that_fails_ends_the_others(tmp_path, status, pause, other):
    """They have a moment, in which they may hear of it; a rank that is through leaves them all their time."""
    (tmp_path / "pace.py").write_text(AT_ITS_PACE.format(pause, status))
    job = {"root": str(tmp_path), "command": ["pace.py"], "ranks": 2, "seconds": 30, "out": str(tmp_path / "out")}
    code = f"from common.labs import forks; forks.GRACE = 0.3; print(forks.run({job}))"
    done = run_command([sys.executable, "-c", code], timeout=30)
    found = [(rank["status"], rank["ended"]) for rank in ast.literal_eval(done.stdout)]
    assert found == [(status, False), other], done
