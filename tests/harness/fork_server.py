"""The process that the ranks of a test are forked from; `tests.harness` starts it and talks to it.

It has imported torch and started no thread, so a fork costs milliseconds and is safe. For each request it forks the
ranks, waits for them, and answers with what became of each. It leads a session of its own: killing its process group
leaves nothing behind, and it does so itself as soon as the test process is gone.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

GRACE = 3.0  # seconds that ranks have to end by themselves once another has failed, and then to show their stack
MARGIN = 4 * GRACE  # seconds after the timeout by which every rank has been ended

# Loaded before the first fork. torch.optim's optimizers, which tests compare ours with, load torch._dynamo when first
# used: a second of CPU for each rank. (Ours do not.)
PRELOAD = "numpy", "torch", "torch.distributed", "torch._dynamo", "common.process_groups", "common.collectives"


def main(requests: int, replies: int) -> None:
    """Serve the requests from one pipe and answer on the other, until the test process closes its ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then ends this one
    control = Connection(requests, writable=False), Connection(replies, readable=False)
    _load(*PRELOAD)
    import torch

    from step01_single_gpu.data.token_cache import synthetic
    from step01_single_gpu.running import utilisation

    torch.set_num_threads(1)
    gc.disable()  # what a test makes is soon gone with its process
    synthetic(1)  # what most tests train on: all ranks inherit it
    for kind in ("float64", "float32", "bfloat16", "float16"):  # or every rank would measure it for 0.2 s
        utilisation._measured["cpu", kind, 1] = 1e12
    while True:
        try:
            request = control[0].recv()
        except EOFError:
            return
        if "module" in request:
            _load(request["module"])
            _load(*getattr(sys.modules.get(request["module"]), "PRELOAD", ()))
        gc.freeze()  # a collection in a rank would write to, and so copy, the pages that all ranks share
        control[1].send(serve(request, control))


def _load(*modules: str) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # the ranks meet the same error, and report it
            importlib.import_module(module)


def serve(request: dict, control: tuple[Connection, Connection]) -> dict[int, tuple[int, float, bool]]:
    """Run one world to its end.

    Returns for each rank its exit code (negative: the signal that ended it), when it ended (time.monotonic),
    and whether this server had to end it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    running = {}  # read end of a pipe whose other end closes with the rank -> (rank, process id)
    for rank in range(request["world"]):
        alive, held_by_rank = os.pipe()
        process = os.fork()
        if process == 0:
            for connection in control:
                connection.close()
            for other in (alive, *running):
                os.close(other)
            run_rank(rank, request)  # does not return
        os.close(held_by_rank)
        running[alive] = rank, process

    outcome = {}
    deadline = time.monotonic() + request["timeout"]
    ended = 0  # 0: the ranks may run; 1: they were told to show their stack and end; 2: they were killed
    while running:
        ready = wait([control[0], *running], max(0.0, deadline - time.monotonic()))
        if control[0] in ready:  # nobody sends while a world runs: the test process is gone
            os.killpg(0, signal.SIGKILL)
        for alive in ready:
            rank, process = running.pop(alive)
            os.close(alive)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            outcome[rank] = code, time.monotonic(), ended > 0
            if code and not ended:
                deadline = min(deadline, time.monotonic() + GRACE)
        if running and time.monotonic() >= deadline:
            for _, process in running.values():
                os.kill(process, signal.SIGKILL if ended else signal.SIGUSR1)
            ended += 1
            deadline = time.monotonic() + GRACE
    return outcome


def run_rank(rank: int, request: dict) -> None:
    """Be one rank: call the function or run the command, leave its result or its traceback in a file, end."""
    folder, world = Path(request["folder"]), request["world"]
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, name in enumerate(("output", "errors" if "command" in request else "output"), start=1):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        stacks = open(folder / f"{rank}.stacks", "w")  # open for as long as the process lives
        faulthandler.enable(stacks)
        # After the stack comes what SIGUSR1 does by default: it ends the process.
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)
        # Should this server and the test process be killed both, the rank ends itself.
        faulthandler.dump_traceback_later(request["timeout"] + MARGIN, file=stacks, exit=True)
        os.environ.clear()
        os.environ.update(request["environment"], RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
        os.chdir(request["directory"])
        if "command" in request:
            status = _run(request["command"])
            return
        try:
            report = {"result": _call(request)}
            status = 0
        except BaseException as error:  # SystemExit and pytest's Skipped too
            report = {"failed_at": time.monotonic()}
            frames = error.__traceback__ and error.__traceback__.tb_next
            report["traceback"] = "".join(traceback.format_exception(type(error), error, frames))
        (folder / f"{rank}.report").write_bytes(pickle.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # what the server would do at its exit is not a rank's to do


def _run(command: list[str]) -> int:
    """Do what `python *command` does, and return the exit status."""
    module = command[0] == "-m"
    sys.argv = command[module:]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(command[0])))
    try:
        if module:
            sys.modules.pop(command[1], None)  # an earlier test may have imported it: runpy would warn
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _call(request: dict) -> bytes:
    import torch.distributed as dist

    from common.start import init_distributed

    function, args, kwargs = pickle.loads(request["call"])
    # A hang is to show as the stacks of all ranks, not as gloo's timeout on some.
    init_distributed("cpu", timeout=request["timeout"] + MARGIN, init_method=f"file://{request['folder']}/rendezvous")
    result = pickle.dumps(function(*args, **kwargs))
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
