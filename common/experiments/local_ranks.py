"""Ranks on this machine for the experiments: start some, call a function on each, collect what it returns.

`torchrun` would do the same with one start a run; here one start serves many runs, which saves minutes.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from common.collectives import barrier
from common.config import TrainConfig
from common.launching.run_mesh import mesh_of
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed


def on_ranks(world: int, function: Callable, *args, title: str = "", jobs: int = 1) -> list:
    """`function(mesh, done, *args)` on `world` new ranks (gloo, CPU, one thread each); the results by rank.

    Args:
        function: stands at the top level of a module. It calls `done()` after each of its `jobs`, for the
            progress bar (of rank 0; shown on a terminal only).

    Raises what a rank raised, as torch.multiprocessing reports it.
    """
    import torch.multiprocessing as processes
    from tqdm import tqdm

    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # On Linux, forked from a process that has imported torch once and has no threads
        method = "forkserver" if sys.platform == "linux" else "spawn"
        multiprocessing.set_forkserver_preload(["__main__", "common.collectives"])
        ranks = {"nprocs": world, "join": False, "start_method": method}
        context = processes.start_processes(_rank, (world, folder, function, args), **ranks)
        label = f"{title} ({world} rank{'s' if world > 1 else ''})"
        with tqdm(total=jobs, desc=label, unit="run", leave=False, disable=not sys.stderr.isatty()) as bar:
            while not context.join(timeout=0.2):
                progress = Path(folder, "progress")
                bar.update(progress.stat().st_size - bar.n if progress.exists() else 0)
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    """One rank, in a process of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()

    def done() -> None:
        if rank == 0:
            with open(Path(folder, "progress"), "ab") as file:
                file.write(b".")

    device = init_distributed("cpu", init_method=f"file://{folder}/rendezvous")
    mesh = build_mesh(Degrees(dp=world), device)
    result = function(mesh, done, *args)
    Path(folder, f"{rank}.result").write_bytes(pickle.dumps(result))
    barrier(mesh.world)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not the regular exit: gloo's threads may still be releasing tensors, which aborts the process then


def _end_with(parent) -> None:
    """End this process when the one that started the ranks has ended, even if it was killed."""
    parent.join()
    os._exit(1)


def train_quietly(train: Callable, **flags) -> None:
    """What `torchrun stepNN/train.py --flags` does after its start, on these ranks, without the progress line."""
    config = TrainConfig(device="cpu", **flags)
    config.resolve_and_check(environment().world_size)
    mesh = mesh_of(config, torch.device("cpu"))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            train(config, mesh)
