"""What sends, keeps or computes past the notes that a check takes of a student's file. The file is refused all of it.

Notes are taken where the main thread asks PyTorch for an operator; see `seen.py`. What runs in another thread, moves
bytes by no operator, or takes these notes away, is not counted, and what is not counted is refused. PyTorch itself goes
on to use it on the student's behalf: stores for `new_group`, and a moment without notes while it prints a tensor.
"""

import re
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import _tensor_str
from torch._C import _distributed_c10d as c10d
from torch._dispatch import python as dispatch_of_python
from torch.utils import _mode_utils
from torch.utils import _python_dispatch as modes
from tqdm import tqdm

from common.labs.closed import IMPORTS, MAIN_THREAD, NEED_NOT, UNCOUNTED, asks_itself, only_for_others, refused
from common.labs.seen import NAMES, OPERATOR, Watching

STORE = f"your file talks by the store in which ranks find each other, {UNCOUNTED}"
BACKEND = f"your file calls what is behind a process group, {UNCOUNTED}"
SHARED = f"your file shares memory with other processes, {UNCOUNTED}"
NOTES = f"your file reaches for the notes that are taken of it, {NEED_NOT}"
CALLED = f"your file lets another thread call it, {MAIN_THREAD}"

SWITCHES = r"DispatchKeyGuard$|_DisableTorchDispatch$|_EnablePythonDispatcher$|_dispatch_tls_set_\w+$"  # in torch._C
MAKES = r"def|impl|fallback|register"  # how names of methods begin that make operators, or replace what they do
HAND_OUT = "_pop_torch_dispatch_stack", "_get_dispatch_stack_at"  # what takes notes, and other modes


def refuse_uncounted(refuse: Callable[[str], NoReturn], theirs: Callable[[str], bool]) -> None:
    """Put what refuses in the place of all that. `theirs` says whether a file of this name is the student's."""

    def kept(call: Callable, why: str) -> Callable:
        return only_for_others(call, why, refuse, theirs)

    for name in dir(torch._C):
        if re.search(SWITCHES, name):
            setattr(torch._C, name, kept(getattr(torch._C, name), NOTES))
    _mode_utils.no_dispatch = torch._C._DisableTorchDispatch
    dispatch_of_python.enable_python_dispatcher = torch._C._EnablePythonDispatcher
    for name in [name for name in vars(torch._C._DispatchModule) if re.match(MAKES, name)]:
        make = getattr(torch._C._DispatchModule, name)
        setattr(torch._C._DispatchModule, name, only_for_imports(make, refuse, theirs))
    _tensor_str._str = _prints_plain(_tensor_str._str)
    for name in HAND_OUT:
        call = _keeps_notes(getattr(torch._C, name), refuse, theirs)
        for module in (torch._C, modes):
            setattr(module, name, call)
    for kind in (torch._C.Future, torch.futures.Future):
        for name in {"then", "add_done_callback"} & vars(kind).keys():
            setattr(kind, name, kept(getattr(kind, name), CALLED))
    tqdm.monitor_interval = 0  # with another interval, a bar starts a thread
    # No Python calls these, not even PyTorch's: a process group does, in C++
    for name in dir(c10d.Backend):
        if name.strip("_").startswith(tuple(NAMES)):
            setattr(c10d.Backend, name, refused(BACKEND, refuse))
    for kind in (dist.Store, *dist.Store.__subclasses__()):
        for name, call in list(vars(kind).items()):
            if callable(call) and not name.startswith("_"):
                setattr(kind, name, only_for_groups(getattr(kind, name), refuse))
    for name in [name for name in dir(torch.UntypedStorage) if "share" in name and name != "is_shared"]:
        setattr(torch.UntypedStorage, name, refused(SHARED, refuse))
    for owner in (torch, torch.UntypedStorage, torch.ops.aten):
        owner.from_file = refused(SHARED, refuse)
    for name in ("_StoreCollectives", "_ControlCollectives"):
        if hasattr(c10d, name):
            setattr(c10d, name, refused(STORE, refuse))


def _keeps_notes(call: Callable, refuse: Callable[[str], NoReturn], theirs: Callable[[str], bool]) -> Callable:
    """The same function, which does not give the student's file what takes notes of it."""

    def asked(*args):
        found = call(*args)
        if isinstance(found, Watching) and asks_itself(sys._getframe(1), theirs):
            refuse(NOTES)
        return found

    return asked


def only_for_imports(make: Callable, refuse: Callable[[str], NoReturn], theirs: Callable[[str], bool]) -> Callable:
    """A function that makes operators, for modules of PyTorch that make theirs while they are imported."""

    def asked(*args, **kwargs):
        frame = sys._getframe(1)
        while frame is not None and id(frame.f_code) not in IMPORTS:
            if theirs(frame.f_code.co_filename):
                refuse(OPERATOR)
            frame = frame.f_back
        return make(*args, **kwargs)

    return asked


def _prints_plain(show: Callable) -> Callable:
    """What prints a tensor, and takes no notes meanwhile: it may not call the student's file in this moment."""

    def shown(tensor, **options):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return _tensor_str._str_intern(tensor, **options)
        with torch._C.DisableTorchFunction():
            return show(tensor, **options)

    return shown


def only_for_groups(call: Callable, refuse: Callable[[str], NoReturn]) -> Callable:
    """A method of a store, for PyTorch's functions that make process groups, and for nobody else."""
    makes_groups = dist.distributed_c10d.__file__

    def asked(*args, **kwargs):
        if sys._getframe(1).f_code.co_filename != makes_groups:
            refuse(STORE)
        return call(*args, **kwargs)

    return asked
