"""Two nodes that a slow cable joins: `two_nodes` measures, on such nodes, any work that a rank can do.

    def step(mesh, flags):                      # at the top level of a module
        run = Run(mesh, **flags)
        return Workload(run.gradients, run.mesh)

    def predict(flags, found):                  # seconds
        return found.free + found.on_cable.total()

    two_nodes("a step", step, {"tp inside": {"tp": 2, "pp": 2}, "tp across": {"tp": 4}}, predict, cable="20mbit")

Nodes are those of `python -m common.nodes`: the cable is real, a network that the kernel limits. `on_nodes`, below it,
is to `on_ranks` as that command is to torchrun.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import common.entry  # noqa: F401
from common import collectives
from common.drawing.tables import compared, print_table
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.runner import ROOT
from common.launching.launch import end_cleanly
from common.link import Link
from common.nodes import limit, value_of
from common.process_groups import Degrees, Mesh, build_mesh
from common.start import environment, init_distributed

NODES = RANKS = 2  # nodes, and by default ranks on each
HIDES = 0.8  # messages hide from where this share of them does
HEADER = ("", "predicted, MB", "measured", "ratio", "s without limit", "s on the cable")
HEADER += ("predicted, s", "measured", "ratio")


class Workload(NamedTuple):
    """What every rank does to be measured."""

    function: Callable[[], object]
    mesh: Mesh  # that of its groups
    before: Callable[[], object] | None = None  # called each time before the clock starts, such as a forward


@dataclass
class Found:
    """One case of `two_nodes`. Bytes are those that node 0 sends over the cable, headers not included."""

    crossing: Counter  # bytes by operation, as theory says: each rank's log of calls, and where its groups' ranks are
    on_cable: Counter  # seconds by operation that the cable needs for them, headers included
    free: float  # seconds without a limit
    slow: float  # seconds on the cable
    sent: float  # bytes that the network counted, headers included
    value: object  # what the function returned on rank 0, the first time
    predicted: float = 0.0  # seconds on the cable

    @property
    def bytes(self) -> float:
        """Of all operations."""
        return sum(self.crossing.values())

    def cells(self) -> tuple[str, ...]:
        """The cells of a row under HEADER, but for its name."""
        sizes = compared(tcp_bytes.PACKET * self.bytes, self.sent, ".2f", 1e6)
        seconds = f"{self.free:.2f}", f"{sum(self.on_cable.values()):.2f}"
        return *sizes, *seconds, *compared(self.predicted, self.slow, ".2f")


def two_nodes(
    title: str,
    work: Callable[..., Workload],
    cases: dict[str, object],
    predict: Callable[[object, Found], float],
    cable: str,
    ranks: int = RANKS,
    repeats: int = 3,
    of: Callable = min,
) -> dict[str, Found]:
    """Measure each case on two nodes, with and without the cable's limit, and print a table under HEADER.

    Args:
        work: called as `work(mesh, case)` on every rank, for each case; stands at the top level of a module.
        cases: what `work` gets, by name. They are pickled.
        predict: the seconds on the cable, of a case and what was found of it without a limit.
        cable: its bandwidth, as `python -m common.nodes` takes it. ranks: on each node.
        repeats: of each measurement, of which `of` one counts. The least by default: ranks share the cores with
            whatever else the machine does, which can only add time.

    Returns nothing, and says why, if this system has no such nodes.
    """
    try:
        of_ranks = on_nodes(NODES, ranks, _measure, work, list(cases.values()), cable, repeats, of)
    except UsageError as error:
        print(f"  left out: {error}")
        return {}
    result = {}
    for index, (name, case) in enumerate(cases.items()):
        each, crossing = of_ranks[0][index], sum((rank[index]["crossing"] for rank in of_ranks[:ranks]), Counter())
        on_cable = Counter({op: seconds_on(cable, size) for op, size in crossing.items()})
        found = Found(crossing, on_cable, each["free"], each["slow"], each["sent"], each["value"])
        found.predicted = predict(case, found)
        result[name] = found
    nodes = f"{NODES} nodes of {ranks} rank{'s' * (ranks > 1)}, a cable of {cable}"
    print_table(f"{title}: {nodes}; sent by a node, and the time", HEADER, [(n, *f.cells()) for n, f in result.items()])
    return result


def _measure(mesh: Mesh, work: Callable, cases: list, cable: str, repeats: int, of: Callable) -> list[dict]:
    """On a rank: what there is to know of each case, in the words of `Found`."""
    results = []
    for case in cases:
        each, crossing = work(mesh, case), Counter()
        if each.before:
            each.before()
        with collectives.record() as calls:
            value = each.function()
        for call in calls:
            crossing[call.op] += crosses(call, each.mesh)
        (free,) = timed(mesh, [each], repeats, of)
        with limited(mesh, cable):
            (slow,) = timed(mesh, [each], repeats, of)
        found = {"crossing": +crossing, "free": free["seconds"], "slow": slow["seconds"], "sent": slow["sent"]}
        results.append(found | {"value": value if mesh.rank == 0 else None})
    return results


def timed(mesh: Mesh, works: list[Workload | Callable], repeats: int, of: Callable = min) -> list[dict]:
    """On a rank: for each work its seconds, `of` all repeats, and the bytes that this node sent for it.

    Without a cable these are 0. All of them are called in their order, `repeats` times. Call them once before: a
    first time is slower.
    """
    seconds, sent = ([[] for _ in works] for _ in range(2))
    for _ in range(repeats):
        for index, work in enumerate(works):
            function, before = (work.function, work.before) if isinstance(work, Workload) else (work, None)
            if before:
                before()
                collectives.barrier(mesh.world)
            start_bytes = tcp_bytes.sent_through("cable") or 0
            collectives.barrier(mesh.world)  # all have read their counters
            start = time.perf_counter()
            function()
            collectives.barrier(mesh.world)
            seconds[index].append(time.perf_counter() - start)
            sent[index].append((tcp_bytes.sent_through("cable") or 0) - start_bytes)
            collectives.barrier(mesh.world)
    return [{"seconds": of(s), "sent": statistics.mean(b)} for s, b in zip(seconds, sent)]


@contextmanager
def limited(mesh: Mesh, bandwidth: str) -> Iterator[None]:
    """On every rank: the cable of two nodes, which was built without a limit, has one in this block."""
    lines = limit("tc", "cable", bandwidth, None) if environment().local_rank == 0 else []  # one rank of each node
    for line in lines:
        subprocess.run(line.split(), check=True)
    collectives.barrier(mesh.world)
    yield
    collectives.barrier(mesh.world)
    if lines:
        subprocess.run("tc qdisc del dev cable root".split(), check=True)


# ---- theory ----------------------------------------------------------------------------------------------------------


def crosses(call: collectives.Call, mesh: Mesh) -> float:
    """Bytes that a rank's part of a collective, or its message, sends over the cable. Ranks of a node are neighbors.

    An all-reduce is a ring, of which some edges leave the node; on gloo all other collectives are messages straight
    from every rank to every other one.
    """
    here = int(os.environ["LOCAL_WORLD_SIZE"])  # ranks on this node
    ranks = getattr(mesh, call.group).ranks if call.peer is None else (mesh.rank, call.peer)
    nodes = [rank // here for rank in ranks]
    mine = nodes.count(mesh.rank // here)
    if call.op in ("send", "receive"):
        return call.bytes if mine == 1 else 0.0
    if call.op != "all_reduce":
        return call.bytes * (len(ranks) - mine) / (len(ranks) - 1)
    edges = sum(a == mesh.rank // here != b for a, b in zip(nodes, nodes[1:] + nodes[:1]))
    return call.bytes * edges / mine


def cable_link(cable: str) -> Link:
    """The cable for the alpha-beta model: what it carries of the ranks' own bytes, beside headers."""
    return Link(0.0, value_of(cable) / 8 / tcp_bytes.PACKET)


def seconds_on(cable: str, sent: float) -> float:
    """Seconds that the cable needs for these bytes of a node, headers not yet included."""
    return sent / cable_link(cable).bandwidth


def crossing(shares: dict[float, float]) -> float:
    """Where the hidden share, by tokens or width, first reaches `HIDES`: straight lines over their logarithms."""
    for (x, low), (y, high) in itertools.pairwise(sorted(shares.items())):
        if low < HIDES <= high:
            return x * (y / x) ** ((HIDES - low) / (high - low))
    return math.nan


# ---- ranks on several nodes ------------------------------------------------------------------------------------------


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
            raise UsageError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if done.returncode:
            raise RuntimeError(f"{function.__name__} failed on {nodes} nodes:\n{done.stdout}\n{done.stderr}")
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(nodes * ranks)]


def answer() -> None:
    """On a rank: call the function, leave its result in the folder that the command line names."""
    folder = Path(sys.argv[1])
    function, args = pickle.loads((folder / "call").read_bytes())
    device = init_distributed("cpu")
    result = function(build_mesh(Degrees(dp=environment().world_size), device), *args)
    (folder / f"{environment().rank}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    end_cleanly(answer)
