"""A run from its command line to its exit status: what `python train.py` does around `train`."""

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import CommunicationError, UsageError
from common.launching.agreement import agree, facts_of
from common.launching.command_line import escape_what_cannot_be_printed, parse
from common.launching.run_mesh import mesh_of
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed, meet

LINGER = 2.0  # seconds that a rank outlives its error, so that the launcher sees the rank that failed first
SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # processes that srun or mpirun has started
START_GRACE = 15.0  # seconds by which the ranks of one run may differ in reading their flags


def run(step: int, main, check) -> None:
    """Parse the command line of a train.py, start torch.distributed, call `main(config, mesh)`, and end cleanly.

    Before the start `check(config)`, of the step's config.py, raises UsageError for flags that do not fit together. All
    ranks raise it when their flags, files or versions differ.
    """

    def train() -> None:
        config, world_size = parse(step), environment().world_size
        config.resolve_and_check(world_size)
        check(config)
        device = init_distributed(config.device, config.timeout)
        everyone = build_mesh(Degrees(dp=world_size), device)  # makes no groups yet: degrees may differ between ranks
        agree(everyone, lambda: config.check_device(device.type) or facts_of(config))
        main(config, mesh_of(config, device))

    end_cleanly(train)


def end_cleanly(job) -> None:
    """Call `job()`, which starts torch.distributed if it needs it, and end this process with a status that tells why.

    2 and a line: bad input. 1 and a line: a lost rank. 1: another error. By the signal: Ctrl-C, or the launcher's end.
    """
    rank, world_size, status = 0, 1, 1  # unless the launcher says otherwise
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C; Python's handler would wait for a rank that is blocked
    try:
        escape_what_cannot_be_printed()
        rank, world_size, _ = environment()
        check_launcher()
        job()
        sys.stdout.flush()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # or the exit could meet a kernel of NCCL that still waits for another rank
        if dist.is_initialized():
            meet()  # no rank tears down connections that a slower rank still uses
        status = 0
    except UsageError as error:
        status = 2
        _report(f"error: {error}\n", rank, world_size)
    except BrokenPipeError:
        os._exit(status)  # nobody reads what is printed any more, as in `train.py | head`
    except CommunicationError as error:
        line = f"rank {rank}: lost contact with another rank: {error}\n"
        sys.stderr.write(line)  # in one piece
        time.sleep(LINGER)
        _tell_launcher(line)  # not before: the rank that died has no such file, and counts as the first without it
    except Exception:
        report = f"rank {rank} failed:\n{traceback.format_exc()}"
        print(report, file=sys.stderr)
        _tell_launcher(report)
    if status or world_size > 1:
        # Not the regular exit. After an error it would wait for collectives that can no longer complete; after success
        # gloo's threads may still be releasing tensors, which aborts the process once the interpreter is gone.
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)


def check_launcher() -> None:
    """Raises UsageError for one of several processes that has not been told its rank: each would train alone.

    Slurm's batch script is one process, whatever the job's SLURM_NTASKS.
    """
    known = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(known) == 1:
        raise UsageError(f"only {known[0]} of RANK and WORLD_SIZE is set; torchrun sets both")
    for name in SIZES:
        size = os.environ.get(name, "")
        if not known and size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"{size} processes ({name}), of which none knows its rank: let srun or mpirun start one "
                "torchrun on each node, as step08_5d/train.slurm does (for runs of their own, set RANK=0 WORLD_SIZE=1)"
            )


def _report(line: str, rank: int, world_size: int) -> None:
    """Print bad input on rank 0. When rank 0 has ended, the launcher ends the others; they exit with status 2 as well.

    What rank 0 does not notice (that another node lacks a file, say) is printed by the rank that does.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
    if rank:
        time.sleep(START_GRACE)  # rank 0 may have started late, and must not be ended before it prints
        line = f"rank {rank}: {line}"
    sys.stderr.write(line)
    _tell_launcher(line)
    time.sleep(LINGER if world_size > 1 else 0)  # the others may still be reading their flags


def _tell_launcher(message: str) -> None:
    """Make torchrun's report, which comes last, end with this message: it quotes the file of the first that failed."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": message.strip(), "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):  # the message has been printed already
            Path(f"{file}.unfinished").write_text(json.dumps({"message": content}), encoding="utf-8")
            os.replace(f"{file}.unfinished", file)  # torchrun may end this rank now, and fails itself on half a file
