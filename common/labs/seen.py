"""What a piece of code does, noted while it runs: the communication it starts, its products, the memory it takes.

The notes are taken below torch's Python, so it does not matter by which function somebody calls a collective.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator
from threading import get_ident

import torch
from torch._C import _disabled_torch_dispatch_impl, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.distributed import ProcessGroup, Work, get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from common.labs.closed import MAIN_THREAD, UNCOUNTED, Closed, generated
from common.labs.notes import Held, Notes, SeenCall

NAMES = {  # the beginning of an operator's name in torch.ops.c10d, or in _c10d_functional -> what everybody calls it
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "send": "send",
    "recv": "receive",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
SILENT = ("wait_tensor", "wrap_tensor_autograd", "monitored_barrier", "check_for_nan")  # send nothing
SHOWN = 8  # tensors of the peak that are remembered
PATIENCE = 0.02  # seconds that a thread computes until others must have let go of what they send
ELSEWHERE = f"your file computes in another thread, {MAIN_THREAD}"
BELOW = f"your file has a mode on that sees what is behind the notes, {UNCOUNTED}"
OPERATOR = f"your file uses an operator of its own, {UNCOUNTED}"
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
NAMESPACES = ("aten", "c10d", "_c10d_functional", "_c10d_functional_autograd", "prim", "prims", "profiler")


def _raise(why: str) -> None:
    raise Closed(why)


class Watching(TorchDispatchMode):
    """Takes notes of everything that runs inside `with Watching(file) as notes:`; lines are those of this file.

    A line is one that the student wrote, and if possible none of `helpers`, functions that were given. What computes in
    another thread than this one, as TorchScript can, has no line; `refuse` is told.
    """

    def __init__(self, file: str, helpers: Collection[str] = (), refuse: Callable[[str], object] = _raise):
        super().__init__()
        self.file, self.helpers, self.notes = file, helpers, Notes()
        self._refuse, self._thread = refuse, get_ident()
        self._alive: dict[int, tuple[StorageWeakRef, Held]] = {}  # storages that count as memory
        self._ours: dict[int, tuple[StorageWeakRef, int]] = {}  # those that were given, whose bytes do not count
        self._lent = False  # whether gloo may still refer to something that it has sent
        self._in_flight: dict[Work, SeenCall] = {}  # messages; gloo may give up what nobody refers to
        self.waiting: SeenCall | None = None  # the message that is being waited for
        self._needed: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, what must stay as it is, and a copy
        self._changed: dict[str, int] = {}  # name -> line after which it was another

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # by default, the first operator imports torch._dynamo, which takes seconds

    def __enter__(self) -> Notes:
        super().__enter__()
        self._wait = Work.wait
        Work.wait = self._note_wait(Work.wait)
        return self.notes

    def __exit__(self, *error) -> None:
        Work.wait = self._wait
        self.notes.unwaited = list(self._in_flight.values())
        self._compare(0)
        still = {name for name, now, before in self._needed if not _same(now, before)}  # and was not put back
        self.notes.changed = [each for each in self._changed.items() if each[0] in still]
        super().__exit__(*error)

    def _note_wait(self, wait):
        def noting(work, *args):
            self.waiting, self._lent = self._in_flight.pop(work, None), True
            line = self._line(sys._getframe())
            if line:
                self.notes.waits.append((line, self.notes.products))
            try:
                return wait(work, *args)
            finally:
                self.waiting = None

        return noting

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if get_ident() != self._thread:
            self._refuse(ELSEWHERE)
        if torch._C._len_torch_dispatch_stack():  # of modes that go to work while this one is off
            self._refuse(BELOW)
        if function.namespace not in NAMESPACES:
            self._refuse(OPERATOR)
        if any(each.__torch_dispatch__ is not _disabled_torch_dispatch_impl for each in types):
            return NotImplemented  # a class of tensors has operators of its own: what these do comes here, too
        if _is_composite(function):  # in inference mode, these come here, and what they are made of does not
            _push_on_torch_dispatch_stack(self)
            try:
                return function.decompose(*args, **(kwargs or {}))
            finally:
                _pop_torch_dispatch_stack(None)
        line = self._line(sys._getframe())
        if not line:  # not the student's doing
            out = function(*args, **(kwargs or {}))
            self._give((args, kwargs, out))
            return out
        call, kind, name = None, function.namespace, function.__name__.partition(".")[0].strip("_")
        if kind in ("c10d", "_c10d_functional"):
            found = [NAMES[start] for start in sorted(NAMES, key=len, reverse=True) if name.startswith(start)]
            if found:
                call, self._lent = self._call(found[0], args, line), True
                self.notes.calls.append(call)
            elif name not in SILENT:
                self._refuse(f"your file calls {kind}.{name}, {UNCOUNTED}")
        elif name in PRODUCTS:
            self.notes.products += len(args[1]) if args[1].dim() == 3 else 1
            self.notes.multiplied += args[-2].numel() * (args[-1].shape[-1] if args[-1].dim() > 1 else 1)
        out = function(*args, **(kwargs or {}))
        if call and call.peer is not None:
            self._in_flight[Work.unbox(out)] = call
        self._measure((args, kwargs, out), line)
        self._compare(line)
        return out

    def hold(self, tensor: torch.Tensor, line: int = 0) -> None:
        """Count a tensor as memory as long as it lives."""
        storage = tensor.untyped_storage()
        self._ours.pop(storage._cdata, None)
        self._hold(tensor, line)

    def _hold(self, tensor: torch.Tensor, line: int) -> None:
        storage = tensor.untyped_storage()
        held = Held(self._counted(storage), tuple(tensor.shape), line)
        self._alive[storage._cdata] = StorageWeakRef(storage), held

    def _counted(self, storage: torch.UntypedStorage) -> int:
        """Its bytes without those that were given: one that was given may grow."""
        _, given = self._ours.get(storage._cdata, (None, 0))
        return max(0, storage.nbytes() - given)

    def _line(self, frame) -> int:
        return line_of(self.file, frame, self.helpers)

    def _call(self, op: str, args: tuple, line: int) -> SeenCall:
        # the group, then perhaps a reduction
        scripted = [each for each in args if isinstance(each, torch.ScriptObject)]
        if scripted:
            group = ProcessGroup.unbox(scripted[0])
        else:
            group = _resolve_process_group([each for each in args if isinstance(each, str)][-1])
        ranks = get_process_group_ranks(group)
        peer = ranks[args[2]] if op in ("send", "receive") else None
        first, second = (_bytes(argument) for argument in args[:2])
        whole = max(first, second) if op in ("all_gather", "reduce_scatter") else second or first
        if op == "all_gather" and not scripted:  # the functional ones know their input alone
            whole *= len(ranks)
        return SeenCall(op, whole, tuple(ranks), line, self.notes.products, peer)

    def _give(self, tree) -> None:
        """Do not count these as memory: what the lab makes, unless it is lent."""
        self._ours = {key: each for key, each in self._ours.items() if not each[0].expired()}
        for tensor in _tensors(tree):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in self._ours:
                self._ours[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def _measure(self, tree, line: int) -> None:
        """Count what the student's line has used or made, wherever it comes from, and what else of theirs is alive."""
        for tensor in _tensors(tree):
            storage = tensor.untyped_storage()
            _, held = self._alive.get(storage._cdata, (None, None))
            if self._counted(storage) != (held.bytes if held else 0):
                self._hold(tensor, line)
        if self._fits() or (self._lent and patiently(self._fits)):
            return
        self._lent = False
        self.notes.peak = sum(held.bytes for _, held in self._alive.values())
        self.notes.largest = sorted((held for _, held in self._alive.values()), reverse=True)[:SHOWN]

    def _fits(self) -> bool:
        """Whether what is alive is no more than has been."""
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(held.bytes for _, held in self._alive.values()) <= self.notes.peak

    def need(self, name: str, tensor: torch.Tensor) -> None:
        """Note if this is another when all is done."""
        self._needed.append((name, tensor, tensor.detach().clone()))

    def _compare(self, line: int) -> None:
        """Remember the line if what the caller needs has just been changed."""
        for name, now, before in self._needed:
            if name not in self._changed and not _same(now, before):
                self._changed[name] = line


@functools.cache
def _is_composite(function) -> bool:
    """Whether an operator is made of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


def patiently(done: Callable[[], bool]) -> bool:
    """Whether something becomes true while this thread computes for a moment, in which others may run.

    A moment of the processor is longer on a busy machine, so other threads get theirs as well. A pause would not be.
    """
    end = time.thread_time() + PATIENCE
    while not (found := done()) and time.thread_time() < end:
        time.sleep(0)  # lets go of Python's lock
    return found


def count(what: str) -> None:
    """Count something in the notes that are being taken, if any are."""
    for mode in _watching():
        mode.notes.counts[what] += 1


def lend(tensors: list[torch.Tensor]) -> None:
    """Count these as memory, too: what a student is given, and may put another tensor in the place of."""
    for mode in _watching():
        for tensor in tensors:
            mode.hold(tensor)


def keep(**tensors: torch.Tensor) -> None:
    """Say of these, by the names that a student knows, that the caller still needs them as they are."""
    for mode in _watching():
        for name, tensor in tensors.items():
            mode.need(name, tensor)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What runs inside is not in the notes that are being taken: the lab does it, and not the student."""
    with _disable_current_modes():
        yield


def _watching() -> list[Watching]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Watching)]


def line_of(file: str, frame, helpers: Collection[str] = ()) -> int:
    """The innermost line of `file` on the stack of `frame`, if possible in no helper; 0 if there is none.

    Code that was made from text while the file ran is the file's, too, with the line of that text.
    """
    innermost = made = 0
    while frame is not None:
        if frame.f_code.co_filename == file:
            if frame.f_code.co_name not in helpers:
                return frame.f_lineno
            innermost = innermost or frame.f_lineno
        elif generated(frame.f_code.co_filename) and frame.f_back:  # at the bottom is what started this process
            made = made or frame.f_lineno
        frame = frame.f_back
    return innermost or made


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    with _disable_current_modes():
        return now.shape == before.shape and now.dtype == before.dtype and torch.equal(now.detach(), before)


def _bytes(tree) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tree))
