"""What the other tests rely on: a failing rank is reported, a hang is ended, and nothing stays behind."""

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from common.launching.process_tree import marked, new_mark
from tests.harness.ranks import ROOT, CommandTimeout, RankFailure, run_command, run_ranks, wait_for


def ranks_do(what: str, offset: int = 0):
    print(f"rank {(rank := dist.get_rank())} was here", flush=True)
    if what == "return":
        return os.environ["RANK"], rank + offset
    if rank == 1:
        assert what != "raise", "rank 1 does not like this"
        while what == "hang":
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("what, said", [("raise", "does not like"), ("die", "by SIGKILL"), ("hang", "in ranks_do")])
def test_failed_ranks_are_reported_and_ended(what, said):
    assert run_ranks(2, ranks_do, "return", offset=10) == [("0", 10), ("1", 11)]
    with pytest.raises(RankFailure, match="timeout after 5 s" if what == "hang" else "first failure first") as caught:
        run_ranks(3, ranks_do, what, timeout=5 if what == "hang" else 60)
    failures = caught.value.failures
    assert said in failures[1] and "rank 1 was here" in failures[1] and "in barrier" in failures[0], failures
    assert what == "hang" or next(iter(failures)) == 1, "the rank that failed first is shown first"


def test_nothing_stays_behind():
    """Neither of a command that takes too long, and runs one in a session of its own, nor of a killed test process."""
    mark = new_mark()
    loop = "from tests.harness.ranks import *; run_command([sys.executable, '-c', 'while True: pass'])"
    with pytest.raises(CommandTimeout, match="after 2 s"):
        run_command([sys.executable, "-c", loop], timeout=2, env=dict([mark]))
    code = "from tests.harness.test_harness import *; run_ranks(2, ranks_do, 'hang')"
    owner = subprocess.Popen([sys.executable, "-c", code], env=os.environ | dict([mark]), cwd=ROOT)
    assert wait_for(lambda: len(marked(mark)) == 4, 60), "the owner, its fork server, two ranks"
    owner.kill()
    owner.wait()
    assert wait_for(lambda: not marked(mark), 60) is not None, f"{marked(mark)} are still there"
