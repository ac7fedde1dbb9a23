"""Two nodes on this machine train as one process, over a cable whose bytes are counted; nothing stays behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.launching.process_tree import kill, marked, new_mark
from common.nodes import SEPARATE
from step05_pipeline import cost
from tests.harness.ranks import in_background, run_command, run_script, steps_of, wait_for

TRY = "ip link add cable0 type veth peer name cable1; tc qdisc add dev cable0 root tbf rate 1mbit burst 2kb latency 1s"
TRIED = sys.platform == "linux" and subprocess.run(
    [*SEPARATE.split(), "sh", "-ec", TRY], capture_output=True, text=True
)
pytestmark = pytest.mark.skipif(not TRIED or TRIED.returncode, reason=f"no network namespaces with tbf here: {TRIED}")

MODEL = "--layers 4 --hidden 64 --heads 4 --kv-heads 4 --ffn 96 --vocab 256 --data synthetic --device cpu".split()
MODEL += "--seq-len 512 --global-batch 8 --micro-batch 1 --dtype float64 --warmup 1".split()
STEP = ("step05_pipeline/train.py", *MODEL)


def nodes_command(*command, ranks: int = 1) -> list[str]:
    words = [sys.executable, "-m", "common.nodes", "--ranks", ranks, "--bandwidth", "100mbit", "--", *command]
    return [str(word) for word in words]


def assert_nothing_left(mark: tuple[str, str]) -> None:
    """Namespaces and mounts live as long as a process in them; those on the machine's own list live for ever."""
    assert wait_for(lambda: not marked(mark), 20) is not None  # the kernel may still be at work
    assert not Path("/run/netns/node0").exists() and "cable" not in Path("/proc/net/dev").read_text()


RANKS = 2 if os.environ.get("TEST_ALL") else 1  # of a node


def test_two_nodes_train_as_one_process(tmp_path):
    one, two, mark = tmp_path / "one", tmp_path / "two", new_mark()
    assert run_script("step01_single_gpu/train.py", *MODEL, "--steps", 4, "--run-dir", one).returncode == 0
    command = nodes_command(*STEP, "--steps", 4, "--pp", 2, "--tp", RANKS, "--run-dir", two, ranks=RANKS)
    done = run_command(command, env=dict([mark]))
    assert done.returncode == 0 and f"{2 * RANKS} ranks on 2 nodes" in done.stdout, done.stdout + done.stderr
    curves = [[(step["loss"], step["grad_norm"]) for step in steps_of(folder)] for folder in (one, two)]
    np.testing.assert_allclose(*curves, rtol=1e-10)

    message = cost.message_bytes(b=1, s=512, h=64, beta=8, tp=RANKS)
    expected = 4 * RANKS * 8 * message  # steps, tensor ranks, micro-batches: forward from node 0, backward from node 1
    sent = [int(each.replace(",", "")) for each in re.findall(r"([\d,]+) bytes sent", done.stdout)]
    # besides, 66 bytes of headers for each 1448, acknowledgements, the start, and a few small collectives
    assert len(sent) == 2 and all(1.04 < each / expected < 1.1 for each in sent), f"{sent} instead of {expected}"
    assert_nothing_left(mark)


def test_a_lost_node_ends_the_other_and_the_run_resumes(tmp_path):
    mark, steps = new_mark(), "--seq-len 64 --global-batch 2 --steps 20 --pp 2 --save-every 4"
    step, slow = [*STEP, *steps.split()], ["--layer-delay", 20]  # it sleeps: the node is lost long before the last step
    command = nodes_command(*step, *slow, "--timeout", "12", "--run-dir", tmp_path / "run")
    process = in_background(command, tmp_path / "log", dict([mark]))
    try:
        assert wait_for(lambda: len(steps_of(tmp_path / "run")) >= 6, 90)
        inside = f"nsenter -U -m -n --preserve-credentials -t {process.pid}".split()
        subprocess.run([*inside, *"ip -n node1 link set cable down".split()], check=True)
        assert process.wait(timeout=60) not in (0, 2)
    finally:
        kill(process, mark)
    log = (tmp_path / "log").read_text()
    assert "rank 0: lost contact with another rank" in log, log
    assert_nothing_left(mark)

    for folder, more in (("run", ["--resume", "auto"]), ("whole", [])):
        again = run_script(*step, *more, "--run-dir", tmp_path / folder, ranks=2)
        assert again.returncode == 0, again.stderr
    curves = [[(each["step"], each["loss"]) for each in steps_of(tmp_path / name)] for name in ("run", "whole")]
    assert curves[0] == curves[1] and len(curves[0]) == 20, "bit for bit, each step once"


SLEEPS = "import sys, time; open(sys.argv[1], 'a').write('.'); time.sleep(100)"


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_stays_behind(sent, status, tmp_path):
    mark, script, note = new_mark(), tmp_path / "sleeps.py", tmp_path / "note"
    script.write_text(SLEEPS)
    process = in_background(nodes_command(script, note), tmp_path / "log", dict([mark]))
    try:
        assert wait_for(lambda: note.exists() and note.read_text() == "..", 90)
        process.send_signal(sent)
        assert process.wait(timeout=60) == status, (tmp_path / "log").read_text()
        assert_nothing_left(mark)
    finally:
        kill(process, mark)


@pytest.mark.parametrize("flags", ["--bandwidth fast -- x.py", "--latency 3 -- x.py", "--nodes 1 -- x.py", "--nodes 2"])
def test_bad_arguments_are_one_line(flags):
    done = run_script("-m", "common.nodes", *flags.split())
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert flags.partition(" --")[0] in done.stderr.replace(":", "") or flags == "--nodes 2", done.stderr


def test_print_shows_the_commands():
    flags = "-m common.nodes --nodes 3 --bandwidth 1gbit --latency 1ms --print -- x.py"
    done = run_script(*flags.split())
    assert done.returncode == 0 and done.stdout.startswith("unshare --user")
    lines = done.stdout.splitlines()
    assert "ip link add switch type bridge" in lines and "--node_rank 2" in done.stdout
    slow = "root handle 1: tbf rate 1gbit burst 25000b latency 1s"  # at both ends of each cable; late is one of them
    for node in range(3):
        assert f"tc qdisc add dev port{node} {slow}" in lines, done.stdout
        assert f"tc -n node{node} qdisc add dev cable {slow}" in lines, done.stdout
        assert f"tc -n node{node} qdisc add dev cable parent 1:1 netem delay 1ms limit 100000" in lines, done.stdout
    assert done.stdout.count(" qdisc ") == 9
