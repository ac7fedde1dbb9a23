"""The start of torch.distributed: who the ranks are, what connects them, and on which device each computes."""

import json
import math
import os
import platform
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.errors import CommunicationError, UsageError, communication_errors, first_line

NCCL_SETTINGS = {  # environment variables; the user's own values win
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # communicators run in the order of issue, which is the same on all ranks
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # without it, queued matmuls delay a gather that should overlap them
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # or the watchdog sleeps a minute before it ends a rank
}


class Environment(NamedTuple):
    """This process among those that torchrun started. Plain `python train.py` is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int


def environment() -> Environment:
    """Return what torchrun has set in the environment variables. Raises UsageError for what it cannot have set."""
    numbers = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        try:
            numbers.append(int(value := os.environ.get(name, default)))
        except ValueError:
            raise UsageError(f"the environment variable {name} is {value!r}, which is no number") from None
    found = Environment(*numbers)
    if not 0 <= found.rank < found.world_size:
        raise UsageError(f"RANK {found.rank} is none of a world of WORLD_SIZE {found.world_size}, which begins with 0")
    return found


def choose_backend(places: list[tuple[str, str | None]], gpu: str = "GPU", nccl: bool = True) -> tuple[str, str]:
    """Return the backend of a run, and a line that says how many ranks run on which devices.

    NCCL needs a GPU for each rank. Ranks that share a GPU use gloo, as do ranks on the CPU, or without `nccl`, which
    PyTorch's builds for Windows lack. `places` are of each rank its node and the uuid of its GPU, or None; `gpu` is the
    GPUs' name. Raises UsageError if only some have a GPU.
    """
    gpus, nodes = {place for place in places if place[1]}, len({node for node, _ in places})
    blind = [rank for rank, (_, uuid) in enumerate(places) if not uuid]
    if gpus and blind:
        raise UsageError(f"rank {blind[0]} sees no GPU, but others do; with --device cpu all ranks use the CPU")
    backend = "NCCL" if nccl and len(gpus) == len(places) else "gloo"
    where = f"one {gpu} each" if len(gpus) == len(places) else f"sharing {len(gpus)} {gpu}" if gpus else "on the CPU"
    return backend.lower(), f"{len(places)} ranks on {nodes} node{'s' * (nodes > 1)}, {where}, {backend}"


def init_distributed(device: str = "auto", timeout: float = 600.0, init_method: str = "env://") -> torch.device:
    """Choose this rank's device and start torch.distributed, which a world of one rank does without.

    If a launcher such as torchrun has started the ranks, rank 0 prints on which devices. Raises UsageError for
    `--device cuda` without CUDA and as `choose_backend` does, CommunicationError if ranks do not meet in `timeout` s.
    """
    rank, world_size, local_rank = environment()
    use_cuda = device != "cpu" and torch.cuda.is_available()
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(chosen)
    elif device == "cuda":
        raise UsageError("--device cuda: PyTorch sees no CUDA device here")
    if world_size == 1:
        return chosen
    if not use_cuda:
        _run_as_batch()
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    gpu = torch.cuda.get_device_properties(chosen) if use_cuda else None
    place = os.environ.get("NCCL_HOSTID", platform.node()), str(gpu.uuid) if gpu else None  # NCCL's idea of a node
    limit, keys = timedelta(seconds=timeout), [f"place of rank {each}" for each in range(world_size)]
    try:
        store, *_ = next(dist.rendezvous(init_method, rank, world_size, timeout=limit))
        if dist.is_torchelastic_launched():
            store = _store_of_this_start(store, rank, timeout)
        store.set_timeout(limit)
        store.set(keys[rank], json.dumps(place))
        places = [tuple(json.loads(each)) for each in store.multi_get(keys)]  # waits for all ranks
        backend, line = choose_backend(places, gpu.name if gpu else "", dist.is_nccl_available())
        if len({node for node, _ in places}) > 1:
            keys = [f"address of rank {each}" for each in range(world_size)]
            store.set(keys[rank], address_towards(os.environ.get("MASTER_ADDR", "")))
            let_others_reach_gloo([each.decode() for each in store.multi_get(keys)], rank)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": chosen} if backend == "nccl" else {"backend": "gloo"}
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=limit, **options)
        dist.group.WORLD.bound_device_id = None  # or every new group would split NCCL's world, which takes all ranks
        meet()
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(f"rendezvous of {world_size} ranks failed: {first_line(error)}") from error
    if rank == 0 and init_method == "env://":
        print(line, flush=True)
    return chosen


def let_others_reach_gloo(addresses: list[str], rank: int) -> None:
    """Choose the interface that gloo uses, where by itself it would tell other nodes an address of no use to them.

    It tells them what the name of this machine stands for. On many that is the loopback (Debian's 127.0.1.1), nothing,
    or not an address of this machine, for which gloo takes the loopback, too. `addresses` are those of all ranks
    towards rank 0. They are the loopback on rank 0's node, which takes its own address towards another rank then.
    """
    away = [each for each in addresses if each and not _is_loopback(each)]
    if "GLOO_SOCKET_IFNAME" in os.environ or not away:
        return
    with suppress(OSError), socket.socket() as trial:
        named = socket.gethostbyname(platform.node())
        trial.bind((named, 0))
        if not _is_loopback(named):
            return
    mine = addresses[rank] if addresses[rank] in away else address_towards(away[0])
    for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
        if address_of(name) == mine:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def address_towards(host: str) -> str:
    """The address of this machine from which packets to `host` would leave; none are sent. Empty if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.connect((host, 9))
        return unused.getsockname()[0]
    return ""


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of Linux; empty if it has none."""
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        found = fcntl.ioctl(unused, 0x8915, struct.pack("256s", interface.encode()))  # SIOCGIFADDR
        return socket.inet_ntoa(found[20:24])
    return ""


def _run_as_batch() -> None:
    """Ask Linux not to let threads that wake up interrupt this process's threads; threads started later inherit it.

    gloo's thread that reads a connection tries its lock again and again, and where ranks share cores it does so on the
    core that the lock's owner needs: without this an all-reduce of 16 bytes takes 7.5 ms instead of 1.5 ms on 8 ranks
    with 2 cores (measured: a loop of 1,000 of them).
    """
    with suppress(AttributeError, OSError):  # not on Linux, or not allowed to
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _store_of_this_start(launcher: dist.Store, rank: int, timeout: float) -> dist.Store:
    """Return a store that rank 0 serves, after it has posted its port in the store of torchrun.

    torchrun's own store survives a restart, and so do the addresses of dead ranks in it, and NCCL's note that a rank
    timed out, which would end the new ranks too. Its restart count could not tell old from new: after a failure on one
    of two nodes, the nodes count differently. But a dead rank's port refuses the connection.
    """
    libuv = {"use_libuv": os.environ.get("USE_LIBUV", "1") == "1"}  # PyTorch's builds for Windows have lacked it
    if rank == 0:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, **libuv)
        launcher.set("port of rank 0", str(store.port))
        return store
    for _ in range(math.ceil(timeout)):  # each attempt may take a second
        with suppress(dist.DistNetworkError):
            port = int(launcher.get("port of rank 0"))
            return dist.TCPStore(os.environ["MASTER_ADDR"], port, timeout=timedelta(seconds=1), **libuv)
    raise RuntimeError("rank 0 does not answer")


def meet() -> None:
    """Return when all ranks have called this. gloo's `new_group` returns when this rank's own connections are made: if
    the rank ended right then, it would look like a crash to others, which are still making theirs.
    """
    with communication_errors():
        dist.all_reduce(torch.zeros(1))  # on the CPU, where gloo connects the ranks
