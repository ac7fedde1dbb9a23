"""The errors that end a run with one clear line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# What gloo and NCCL say of a lost rank
LOST_PEER = "Connection (closed|reset|refused)|Timed out|timeout|Broken pipe|Socket closed|NCCL error"
LOST_PEER += "|Read error|Write error|recvBytes|sendBytes"


class UsageError(Exception):
    """Bad input of the user: one clear line. `launch.run` prints it once and ends all ranks with status 2."""


class Diverged(UsageError):
    """The training has reached numbers that are not finite. All ranks raise it after the same step."""


class CommunicationError(RuntimeError):
    """A collective failed because another rank is gone or did not answer in time."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a C++ stack; if it ends in a colon, with the line after it."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


@contextmanager
def communication_errors() -> Iterator[None]:
    """Raise CommunicationError, with one plain line, in place of torch's RuntimeError about a lost or silent rank."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(LOST_PEER, str(error)):  # a wrong size, say
            raise
        line = re.sub(r"^\[\S+:\d+\] ", "", first_line(error))  # without [.../gloo/transport/tcp/pair.cc:547]
        raise CommunicationError(line.split(". ")[0]) from error  # and without gloo's advice
