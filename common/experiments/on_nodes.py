"""A function on ranks of several nodes: `on_nodes` is to `on_ranks` as `python -m common.nodes` is to torchrun.

Below it, what experiments on two nodes of two ranks share: the bytes that cross the cable, and the time they take.
"""

import itertools
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common import collectives
from common.drawing.tables import compared
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.nodes import limit, value_of
from common.experiments.runner import ROOT
from common.launch import end_cleanly
from common.process_groups import Degrees, Mesh, build_mesh
from common.start import environment, init_distributed

NODES = RANKS = 2  # nodes, and ranks on each
# What crosses the cable in each direction for every byte of the tensor, when 2 of 4 ranks are on either side: of a ring
# (all-reduce), and of messages straight from every rank to every other one (on gloo, all the others)
CROSSES = {"all_reduce": 1.5, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_gather": 1.0}
HIDES = 0.8  # messages hide from where this share of them does
HEADER = ("", "predicted, MB", "measured", "ratio", "s without limit", "s on the cable")
HEADER += ("predicted, s", "measured", "ratio")


def on_nodes(nodes: int, ranks: int, function: Callable, *args, bandwidth: str = "", latency: str = "") -> list:
    """Call `function(mesh, *args)` on `ranks` new ranks of each node (gloo, CPU); the results by rank.

    Args:
        function: stands at the top level of a module that is no script.
        bandwidth, latency: of the cables, as `python -m common.nodes` takes them.

    Raises UsageError with its line if this system lacks nodes, RuntimeError if a rank failed.
    """
    cable = [f"--bandwidth={bandwidth}"] * bool(bandwidth) + [f"--latency={latency}"] * bool(latency)
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        command = ["common.nodes", f"--nodes={nodes}", f"--ranks={ranks}", *cable, "--", "-m", __name__, folder]
        options = {
            "cwd": ROOT,
            "env": os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            "capture_output": True,
            "text": True,
        }
        done = subprocess.run([sys.executable, "-m", *command], **options)
        if done.returncode == 2:
            raise UsageError(done.stderr.strip().removeprefix("error: "))
        if done.returncode:
            raise RuntimeError(f"{function.__name__} failed on {nodes} nodes:\n{done.stdout}\n{done.stderr}")
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(nodes * ranks)]


@contextmanager
def limited(mesh: Mesh, bandwidth: str) -> Iterator[None]:
    """On every rank: the cable of two nodes, which was built without a limit, has one in this block.

    So one start of all ranks is enough to measure with and without.
    """
    lines = limit("tc", "cable", bandwidth, None) if environment().local_rank == 0 else []  # one rank of each node
    for line in lines:
        subprocess.run(line.split(), check=True)
    collectives.barrier(mesh.world)
    yield
    collectives.barrier(mesh.world)
    if lines:
        subprocess.run("tc qdisc del dev cable root".split(), check=True)


def timed(mesh: Mesh, functions: list[Callable], repeats: int, of: Callable = min) -> list[dict]:
    """On a rank: for each function its seconds, `of` all repeats, and the bytes that this node sent for it.

    Without a cable these are 0. All of them are called in their order, `repeats` times. Call them once before: a
    first time is slower. By default the least, since ranks share the cores with whatever else the machine does, which
    can only add time.
    """
    seconds, sent = ([[] for _ in functions] for _ in range(2))
    for _ in range(repeats):
        for index, function in enumerate(functions):
            before = tcp_bytes.sent_through("cable") or 0
            collectives.barrier(mesh.world)  # all have read their counters
            start = time.perf_counter()
            function()
            collectives.barrier(mesh.world)
            seconds[index].append(time.perf_counter() - start)
            sent[index].append((tcp_bytes.sent_through("cable") or 0) - before)
            collectives.barrier(mesh.world)
    return [{"seconds": of(s), "sent": statistics.mean(b)} for s, b in zip(seconds, sent)]


def crosses(call: collectives.Call, mesh: Mesh) -> float:
    """Bytes that a rank's part of a collective, or its message, sends over the cable."""
    ranks = getattr(mesh, call.group).ranks
    if call.peer is not None:
        ranks = mesh.rank, call.peer
    if len({rank // RANKS for rank in ranks}) == 1:
        return 0.0
    if len(ranks) == 2:
        return call.bytes
    whole = call.elements * getattr(torch, call.dtype).itemsize
    whole *= len(ranks) if call.op == "all_gather" else 1  # its call names the part
    return CROSSES[call.op] * whole / RANKS


def crossing(shares: dict[float, float]) -> float:
    """Where the hidden share, by tokens or width, first reaches `HIDES`: straight lines over their logarithms."""
    for (x, low), (y, high) in itertools.pairwise(sorted(shares.items())):
        if low < HIDES <= high:
            return x * (y / x) ** ((HIDES - low) / (high - low))
    return math.nan


def seconds_on(cable: str, sent: float) -> float:
    """Seconds that the cable needs for these bytes of a node, headers not yet included."""
    return tcp_bytes.PACKET * sent / (value_of(cable) / 8)


def compared_cells(sent: float, predicted: float, cable: str, free: dict, slow: dict) -> tuple[str, ...]:
    """The cells of a row under HEADER, but for its name.

    Args:
        sent: predicted bytes that a node sends, without headers. predicted: seconds with the cable's limit.
        free, slow: what `timed` has found on rank 0, without that limit and with it.
    """
    seconds = f"{free['seconds']:.2f}", f"{seconds_on(cable, sent):.2f}"
    sizes = compared(tcp_bytes.PACKET * sent, slow["sent"], ".2f", 1e6)
    return *sizes, *seconds, *compared(predicted, slow["seconds"], ".2f")


def answer() -> None:
    """On a rank: call the function, leave its result in the folder that the command line names."""
    folder = Path(sys.argv[1])
    function, args = pickle.loads((folder / "call").read_bytes())
    device = init_distributed("cpu")
    result = function(build_mesh(Degrees(dp=environment().world_size), device), *args)
    (folder / f"{environment().rank}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    end_cleanly(answer)
