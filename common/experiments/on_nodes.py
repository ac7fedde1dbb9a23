"""A function on ranks of several nodes: `on_nodes` is to `on_ranks` as `python -m common.nodes` is to torchrun."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError
from common.experiments.runner import ROOT
from common.launch import end_cleanly
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed


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


def answer() -> None:
    """On a rank: call the function, leave its result in the folder that the command line names."""
    folder = Path(sys.argv[1])
    function, args = pickle.loads((folder / "call").read_bytes())
    device = init_distributed("cpu")
    result = function(build_mesh(Degrees(dp=environment().world_size), device), *args)
    (folder / f"{environment().rank}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    end_cleanly(answer)
