"""What a submission may do while it is checked: no network, and limits on memory, files and processor time.

On Linux, a process gets a network of its own, in which there is only itself: nothing that it starts can leave it. Where
that is not allowed, as in some containers, and on macOS, Python's sockets refuse other machines, in every process that
a check starts except those of `alone.py`. That stops an honest program, and not somebody who writes one in C.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from pathlib import Path

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of <sched.h>
SET_FLAGS, UP_AND_RUNNING = 0x8914, 0x41  # SIOCSIFFLAGS; IFF_UP | IFF_RUNNING
NAMESPACE = "Each submission had a network of its own."
GUARD = "Only Python's sockets kept submissions from the network."
FILE = 256 << 20  # bytes that a file may have

# Runs at the start of every Python process that finds it on its path.
SITE = """\
import sys


def closed(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "127.0.0.1"
        if not str(host).startswith("127.") and host not in ("::1", "localhost", "::ffff:127.0.0.1"):
            raise PermissionError("a submission has no network")
    elif event == "socket.getaddrinfo" and arguments[0] not in (None, "", "localhost", "127.0.0.1", "::1"):
        import socket

        if arguments[0] not in (socket.gethostname(), socket.getfqdn()):
            raise PermissionError("a submission has no network")


sys.addaudithook(closed)
"""


def confine(folder: Path, seconds: float, memory: float) -> str:
    """Confine this process, and all that it starts. It must have one thread.

    Args:
        folder: for a file that guards sockets. seconds: of processor time, of each process. memory: in GB, of each.

    Returns what holds for the network: NAMESPACE or GUARD.
    """
    import resource  # in here, as Windows has none

    for which, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CORE, 0),
        # Linux counts what can be written; address space would also count what PyTorch maps and never touches
        (resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS, int(memory * 1e9)),
    ):
        with contextlib.suppress(OSError, ValueError):  # macOS knows no limit on address space
            resource.setrlimit(which, (most, most))
    if own_network():
        return NAMESPACE
    guard = folder / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.environ["LABS_GUARD"] = str(guard)
    exec(SITE, {"__name__": "guard"})
    return GUARD


def own_network() -> bool:
    """Move this process into a network namespace that has a loopback and nothing else. Returns whether that worked."""
    if sys.platform != "linux":
        return False
    import fcntl

    user, group = os.getuid(), os.getgid()
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(NEW_NETWORK):  # only root may; others become the root of a namespace of users first
        if unshare(NEW_USER | NEW_NETWORK):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with contextlib.suppress(OSError):
                Path(f"/proc/self/{name}").write_text(text, encoding="utf-8")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
    return True
