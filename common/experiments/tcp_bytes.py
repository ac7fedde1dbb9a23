"""Bytes that TCP (so gloo, but not NCCL) has sent, counted by Linux 4.19 and later: a check on our own log."""

import contextlib
import os
import socket
import struct
import sys
from pathlib import Path

# Bytes on a cable for each that TCP carries in packets of 1448: headers, and an answer to every other packet
PACKET = (1514 + 66 / 2) / 1448


def sent_by_me() -> int | None:
    """Return the payload bytes that this process's open TCP sockets have sent; None if this is not Linux."""
    if sys.platform != "linux":
        return None
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        information = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        sent, repeated = struct.unpack_from("=QQ", information, 200)  # in `tcp_info` of linux/tcp.h
                        total += sent - repeated
    return total


def sent_through(interface: str) -> int | None:
    """Return the bytes that have left through a network interface of this node, headers included; None elsewhere."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return None
