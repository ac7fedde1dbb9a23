"""A run from its command line to its exit status: what `python train.py` does around `train`."""

import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from common.errors import CommunicationError, UsageError, first_line
from common.process_groups import Degrees, build_mesh, environment, init_distributed

LINGER = 2.0  # seconds that survivors wait, so that the launcher sees the rank that really failed first
START_GRACE = 15.0  # seconds by which the ranks of one run may differ in reading their flags
INTERRUPT_GRACE = 1.0  # seconds that a rank has to leave a collective after Ctrl-C


def run(step: int, main, check=None) -> None:
    """Entry point of every train.py: parse the command line, start, call `main(config, mesh)`, end cleanly.

    `check(config)` raises UsageError for what the step alone can judge, before the process group starts.
    """
    from common.command_line import parse

    def train() -> None:
        config = parse(step)
        config.resolve_and_check(environment().world_size)
        if check is not None:
            check(config)
        device = init_distributed(config.device, config.timeout)
        if config.memory_snapshot and device.type != "cuda":
            raise UsageError("--memory-snapshot records the CUDA allocator, and this run is on the CPU")
        main(config, build_mesh(Degrees.of(config), device, config.model_config.kv_heads, timeout=config.timeout))

    end_cleanly(train)


def end_cleanly(job) -> None:
    """Call `job()`, which starts torch.distributed if it needs it, and end this process the way its end deserves.

    Status 2 and one line for bad input, 130 after Ctrl-C, 1 for any other error. When another rank died the line says
    so, and this rank lingers a moment so that the launcher blames the right one.
    """
    rank, world_size, _ = environment()
    _interrupts_reach_blocked_ranks()
    status = 0
    try:
        job()
        if dist.is_initialized():
            dist.barrier()  # nobody tears down connections that a slower rank still uses
    except UsageError as error:
        status = 2
        _report_once(f"error: {error}", rank, world_size)
    except CommunicationError as error:
        status = 1
        sys.stderr.write(f"rank {rank}: lost contact with another rank: {first_line(error)}\n")  # in one piece
        sys.stderr.flush()
        time.sleep(LINGER)
    except KeyboardInterrupt:
        status = 130
        if rank == 0:
            print("interrupted", file=sys.stderr)
    except Exception:
        status = 1
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
    if status or world_size > 1:
        # Not the regular exit. After an error it would wait for collectives that can no longer complete; after success
        # gloo's threads may still be releasing tensors, which aborts the process once the interpreter is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _report_once(line: str, rank: int, world_size: int) -> None:
    """Print `line` on the first rank that comes here, and return when all have come, so that all end with status 2.

    The launcher ends the other ranks as soon as one has ended, which may be before they have started to read their
    flags: so this rank ignores its signal, and waits a while for them. They count each other in the launcher's store.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world_size == 1:
        print(line, file=sys.stderr, flush=True)
        return
    patience = LINGER if dist.is_initialized() else START_GRACE
    counter = "usage_errors/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, world_size, rank == 0 and not hosted, timedelta(seconds=patience))
        if store.add(counter, 1) == 1:
            print(line, file=sys.stderr, flush=True)
        end = time.monotonic() + patience
        while store.add(counter, 0) < world_size and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)  # rank 0 may hold the store that the others are still reading
    except (RuntimeError, KeyError, ValueError):  # no launcher to be reached: one rank speaks
        if rank == 0:
            print(line, file=sys.stderr, flush=True)


def _interrupts_reach_blocked_ranks() -> None:
    """Python runs signal handlers between bytecodes, so a rank blocked in a collective would not notice Ctrl-C.

    The C-level handler writes the signal's number into a pipe at once; a thread reads it there, leaves the main thread
    a moment to end by KeyboardInterrupt, and then ends the process.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read_end, 1)[0] != signal.SIGINT:
            pass
        time.sleep(INTERRUPT_GRACE)
        os._exit(130)

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
