"""The fork-server harness: results, and above all how failures look and that nothing stays behind."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import ROOT, CommandTimeout, RankFailure, run_command, run_ranks, torchrun


def ranks_gather(offset, scale=1.0):
    """What each rank holds, as seen by all."""
    mine = torch.tensor([scale * (dist.get_rank() + offset)], dtype=torch.float64)
    seen = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, mine)
    return os.getpid(), torch.cat(seen), mine.requires_grad_()


def test_results_come_in_rank_order_as_tensors():
    results = run_ranks(4, ranks_gather, 10, scale=2.0)
    assert len({process for process, _, _ in results}) == 4
    for rank, (_, seen, mine) in enumerate(results):
        assert seen.tolist() == [20, 22, 24, 26]
        assert mine.item() == 20 + 2 * rank
        assert mine.device.type == "cpu" and mine.requires_grad and not mine.is_shared()


def ranks_describe():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "FROM_TEST")
    return (
        [os.environ.get(name) for name in names],
        os.getcwd(),
        torch.get_num_threads(),
        dist.is_initialized(),
    )


def test_rank_sees_the_callers_environment_and_one_thread(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    (one,) = run_ranks(1, ranks_describe)
    assert one == (
        ["0", "0", "1", "1", "1", "yes"],
        str(tmp_path),
        1,
        False,
    )  # a world of one needs no process group
    assert run_ranks(2, ranks_describe)[1] == (["1", "1", "2", "2", "1", "yes"], str(tmp_path), 1, True)


def test_sixteen_ranks_start_soon(record_property):
    run_ranks(1, ranks_describe)  # the fork server is there
    start = time.perf_counter()
    assert len(run_ranks(16, ranks_gather, 0)) == 16
    took = time.perf_counter() - start
    record_property("seconds_for_16_ranks", took)
    print(f"16 ranks from start to results: {took:.2f} s")
    assert took < 20, "about 1 s on 2 idle cores; this bound only tells a fork from a fresh import of torch"


def ranks_one_raises():
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 2:
        raise ValueError("the third rank does not like this")
    dist.barrier()


def test_exception_shows_every_rank_and_the_culprit_first():
    start = time.perf_counter()
    with pytest.raises(RankFailure) as caught:
        run_ranks(4, ranks_one_raises)
    message = str(caught.value)
    assert list(caught.value.failures)[0] == 2 and set(caught.value.failures) == {0, 1, 2, 3}
    assert message.startswith("4 of 4 ranks failed in tests.harness.test_harness.ranks_one_raises")
    assert "ValueError: the third rank does not like this" in caught.value.failures[2]
    assert "dist.barrier()" in caught.value.failures[0]
    assert "rank 2 was here" in caught.value.failures[2]
    assert time.perf_counter() - start < 60, "far less than the timeout"


def ranks_hang():
    if dist.get_rank() == 0:
        stuck_in_python()
    dist.barrier()  # waits for rank 0


def stuck_in_python():
    while True:
        pass


def test_hang_shows_stacks():
    start = time.perf_counter()
    with pytest.raises(RankFailure, match="timeout after 3 s") as caught:
        run_ranks(3, ranks_hang, timeout=3)
    assert 3 <= time.perf_counter() - start < 30
    assert list(caught.value.failures) == [0, 1, 2]
    assert "in stuck_in_python" in caught.value.failures[0]
    for rank in (1, 2):
        assert "in barrier" in caught.value.failures[rank] and "in ranks_hang" in caught.value.failures[rank]


def ranks_signal_one(number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def test_killed_rank_is_named():
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, ranks_signal_one, signal.SIGKILL)
    assert list(caught.value.failures)[0] == 1
    assert "rank 1 was killed by SIGKILL" in caught.value.failures[1]


def test_stopped_rank_is_killed():
    with pytest.raises(RankFailure, match="timeout after 1 s") as caught:
        run_ranks(2, ranks_signal_one, signal.SIGSTOP, timeout=1)
    assert set(caught.value.failures) == {0, 1}


def ranks_return_a_lambda():
    return lambda: None


def test_what_cannot_be_sent_is_refused_clearly():
    def inner():
        pass

    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(2, lambda: None)
    with pytest.raises(TypeError, match=r"inner.*top level of a module"):
        run_ranks(2, inner)
    with pytest.raises(TypeError, match="argument of ranks_gather"):
        run_ranks(2, ranks_gather, lambda: None)
    with pytest.raises(RankFailure, match="ranks_return_a_lambda"):
        run_ranks(1, ranks_return_a_lambda)


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")


def processes_with(mark: str) -> list[int]:
    """Processes with `mark` in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


def assert_they_end(processes: list[int]) -> None:
    for process in processes:
        try:
            handle = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], 20)  # readable once the process has ended
        os.close(handle)
        assert ended, f"process {process} is still there"


def ranks_report_and_hang(fifo):
    with open(fifo, "w") as file:
        file.write(f"rank {dist.get_rank()}\n")
    stuck_in_python()


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind_when_the_test_process_ends(number, tmp_path):
    """A process that waits for hanging ranks is interrupted, terminated or killed: all it started ends."""
    os.mkfifo(tmp_path / "fifo")
    code = "import sys; from tests.harness.ranks import *; from tests.harness.test_harness import *;"
    code += "run_ranks(2, ranks_report_and_hang, sys.argv[1])"
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "fifo")],
        env=os.environ | {"ORPHANS_OF": str(tmp_path)},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)  # with a writer of its own, reading never finds the end
    said = b""
    while said.count(b"\n") < 2:
        assert select.select([fifo], [], [], 60)[0], "the ranks did not start"
        said += os.read(fifo, 100)
    os.close(fifo)
    processes = processes_with(f"ORPHANS_OF={tmp_path}")
    assert len(processes) == 4, "the owner, its fork server, two ranks"
    owner.send_signal(number)
    owner.wait(timeout=20)
    assert_they_end(processes)


def test_command_returns_its_output():
    done = run_command([sys.executable, "-c", "import os; print(os.environ['ONE']); exit(3)"], env={"ONE": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "")


@needs_proc
def test_command_is_killed_with_what_it_started():
    """Also a child that has left for a session of its own, as the ranks of torchrun do."""
    code = "import subprocess, sys;"
    code += "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True);"
    code += "print('child', child.pid, flush=True); child.wait()"
    with pytest.raises(CommandTimeout, match="after 3 s: .*\nchild ") as caught:
        run_command([sys.executable, "-c", code], timeout=3)
    assert_they_end([int(re.search(r"^child (\d+)$", str(caught.value), re.MULTILINE)[1])])


def test_torchrun_starts_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])")
    done = torchrun(2, script, "--flag", 3)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d \['--flag', '3'\]", done.stdout)  # two ranks may share a line
    assert sorted(said) == ["rank 0 ['--flag', '3']", "rank 1 ['--flag', '3']"]
