"""Ctrl-C while the labs' command loads its modules, which takes seconds: it is put off until they are there.

`__main__` imports this before all that takes long. Otherwise Python would print a page about where it was in somebody's
import, and PyTorch, in the middle of its own, might end the process with an error in C++.
"""

import signal
import sys
import threading

_noted: list[int] = []


def _note(number: int, _frame) -> None:
    _noted.append(number)


def loaded() -> None:
    """From now on, Ctrl-C is what it was. Raises KeyboardInterrupt if somebody has pressed it before."""
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _noted:
        _noted.clear()
        raise KeyboardInterrupt


def put_off() -> None:
    """Note Ctrl-C until `loaded`; not where it is ignored, as in a shell's background, nor in a thread."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note)


_spec = getattr(sys.modules["__main__"], "__spec__", None)
if _spec and _spec.name == "common.labs.__main__":  # the command, and not a test or a notebook
    put_off()
