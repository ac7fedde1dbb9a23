"""The notes that labs take of what a rank does, on made-up ranks; what labs ask of notes; and when a check ends."""

import importlib.util
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.labs import ranks as lab_ranks
from common.labs.closed import is_refusal
from common.labs.notes import Notes, SeenCall
from common.labs.ranks import BUSY, IDLE, LIMIT
from common.labs.rules import hides, holds_at_most, multiplies_at_most, sends_at_most, waits_for_messages
from common.labs.seen import PATIENCE, Watching, lend, line_of, patiently

FOUR = (0, 1, 2, 3)


def call(op: str = "all_reduce", bytes: int = 1000, line: int = 1, products: int = 0) -> SeenCall:
    return SeenCall(op, bytes, FOUR, line, products, 1 if op in ("send", "receive") else None)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_bytes_that_are_sent():
    """Of four ranks: an all-reduce 2 x 3/4 of the tensor, a message and a broadcast all of it, the others 3/4."""
    ops = {"all_reduce": 1500, "reduce_scatter": 750, "all_gather": 750, "all_to_all": 750, "broadcast": 1000}
    ops |= {"send": 1000, "receive": 0, "barrier": 0}
    assert {op: call(op).sent for op in ops} == ops
    assert Notes([call(op) for op in ops]).sent == sum(ops.values())


@pytest.mark.parametrize("share, said", [(0.5, False), (1, False), (1.01, False), (1.05, True), (1.2, True), (2, True)])
def test_more_than_enough(share, said):
    notes = Notes([call("send", round(10**6 * share), line=7)], peak=round(10**6 * share))
    sent, held = list(sends_at_most(notes, 10**6, {"send": "too often."})), list(holds_at_most(notes, 10**6, "Free."))
    assert len(sent) == len(held) == said
    if said:
        bytes = f"{round(10**6 * share):,}"
        assert sent == [
            f"it sends {bytes} bytes, and 1,000,000 are enough. Look at the send of {bytes} bytes in line 7: too often."
        ]
        assert held == [f"up to {bytes} bytes of tensors live at once, and 1,000,000 are enough. Free."]


def test_the_collective_that_sends_most_is_named():
    notes = Notes([call("all_gather", 900, 3), call("all_gather", 4000, 4), call("all_reduce", 1000, 5)])
    (line,) = sends_at_most(notes, 100, {"all_reduce": "a sum.", "all_gather": "gathered.", "broadcast": "never."})
    assert line.endswith("Look at each all_gather, in lines 3 and 4: gathered."), "any of them may be too many"


# The products that each of three calls comes after, where it is waited for, and the line that is told of
HIDDEN = {
    "all but the last": ([0, 1, 2], [1, 2, 2], None),
    "all": ([0, 1, 2], [1, 2, 3], None),
    "all, waited for at the end": ([0, 1, 2], [3, 3, 3], None),
    "the first is not": ([0, 1, 2], [0, 2, 3], 10),
    "the middle is not": ([0, 1, 2], [1, 1, 3], 20),
    "none": ([0, 1, 2], [0, 1, 2], 10),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_only_the_last_call_need_not_be_hidden(name):
    started, waited, line = HIDDEN[name]
    calls = [call(line=number + 1, products=products) for number, products in enumerate(started)]
    waits = [(10 * (number + 1), products) for number, products in enumerate(waited)]
    said = list(hides(Notes(calls, waits, products=3), "all_reduce"))
    assert len(said) == (line is not None)
    assert not said or said[0].startswith(f"line {line} waits for the all_reduce of line {line // 10} at once")
    assert bool(list(hides(Notes(calls, waits, products=3), "all_reduce", but=3))) is False


def test_products_that_only_seem_to_hide_something():
    assert list(multiplies_at_most(Notes(products=18), 18)) == []
    (line,) = multiplies_at_most(Notes(products=19), 18)
    assert line.startswith("it computes 19 matrix products, and 18 are enough")


def test_messages_that_nothing_waits_for():
    assert list(waits_for_messages(Notes([call("send")]))) == []
    (line,) = waits_for_messages(Notes(unwaited=[call("send", line=4), call("receive", line=5)]))
    assert line.startswith("the send of 1,000 bytes to rank 1 in line 4 is never waited for (nor are 1 others)")


# ---- notes -----------------------------------------------------------------------------------------------------------

STUDENT = """import torch
import torch.distributed as dist

def given(x):
    return x @ x.T

def run():
    x = torch.ones(8, 2, dtype=torch.float64)
    dist.all_reduce(x)
    first = dist.all_reduce(x, async_op=True)
    given(x)
    first.wait()
    dist.reduce_scatter_tensor(x[:2], x)
    dist.all_gather_into_tensor(torch.empty(32, 2, dtype=torch.float64), x)
    dist.all_to_all_single(torch.empty(3, 2, dtype=torch.float64), x, [0, 1, 0, 2], [2, 3, 3, 0])
    dist.broadcast(x, 0)
    torch.ones(3, 2, 2) @ torch.ones(3, 2, 2)
    works = [dist.isend(x, 2), dist.irecv(x, 3), dist.isend(x[:1], 0)]
    works[1].wait()
"""


@pytest.fixture
def fake_ranks(monkeypatch):
    """Makes this process rank 1 of 4, whose messages need no others, and whose waits can be noted as gloo's are."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    kind = type(dist.all_reduce(torch.ones(1), async_op=True))
    if kind is not dist.Work:
        monkeypatch.setattr(kind, "wait", lambda work, *args: dist.Work.wait(work, *args))
    yield
    dist.destroy_process_group()


def student_of(path: Path, code: str):
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("student", path)
    spec.loader.exec_module(student := importlib.util.module_from_spec(spec))
    return student


def notes_of(folder: Path, code: str, helpers: Collection[str] = ()) -> Notes:
    """The notes of the function `run` of a student's file."""
    student = student_of(folder / "student.py", code)
    with Watching(student.__file__, helpers) as notes:
        student.run()
    return notes


@pytest.mark.filterwarnings("ignore:.*is deprecated")  # the names of torch 2.11
def test_notes_of_what_a_rank_does(tmp_path, fake_ranks):
    """x has 128 bytes, also in an uneven all-to-all, whatever arrives. A wait is that of one message: the two others
    are in flight to the end.
    """
    notes = notes_of(tmp_path, STUDENT, ["given"])
    found = [(each.op, each.bytes, each.line, each.products, each.peer) for each in notes.calls]
    assert found == [
        ("all_reduce", 128, 9, 0, None),
        ("all_reduce", 128, 10, 0, None),
        ("reduce_scatter", 128, 13, 1, None),
        ("all_gather", 512, 14, 1, None),
        ("all_to_all", 128, 15, 1, None),
        ("broadcast", 128, 16, 1, None),
        ("send", 128, 18, 4, 2),
        ("receive", 128, 18, 4, 3),
        ("send", 16, 18, 4, 0),
    ]
    assert {each.members for each in notes.calls} == {FOUR} and notes.products == 1 + 3
    blocking = [(9, 0), (13, 1), (14, 1), (15, 1), (16, 1)]
    assert notes.waits == [blocking[0], (12, 1), *blocking[1:], (19, 4)]
    assert [(each.op, each.peer) for each in notes.unwaited] == [("send", 2), ("send", 0)]
    assert 512 <= notes.peak <= 2 * 512


IN_OTHER_WORDS = """import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

def run():
    x, world = torch.ones(8, 2, dtype=torch.float64), dist.group.WORLD
    dist.reduce_scatter(torch.empty_like(x[:2]), list(x.chunk(4)))
    dist.all_gather([torch.empty_like(x) for _ in range(4)], x)
    dist.all_to_all([torch.empty_like(x[:2]) for _ in range(4)], list(x.chunk(4)))
    for y in (
        functional.all_reduce(x, "sum", world),
        functional.reduce_scatter_tensor(x, "sum", 0, world),
        functional.all_gather_tensor(x, 0, world),
        functional.all_to_all_single(x, [0, 1, 0, 2], [2, 3, 3, 0], world),
        functional.broadcast(x, 0, world),
    ):
        functional.wait_tensor(y)
"""


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_collective_counts_alike_by_whichever_function(tmp_path, fake_ranks):
    """With lists of tensors, and as functions that return their result."""
    found = [(each.op, each.bytes, each.members) for each in notes_of(tmp_path, IN_OTHER_WORDS).calls]
    ops = ("reduce_scatter", 128), ("all_gather", 512), ("all_to_all", 128)
    assert found == [(*each, FOUR) for each in (*ops, ("all_reduce", 128), *ops, ("broadcast", 128))]


FROM_ELSEWHERE = """import torch

def run():
    before.add_(1)
    torch.tensor([1.0] * 100).sum()
    x = torch.zeros(10)
    x.untyped_storage().resize_(4000)
    x.add_(1)

before = torch.ones(1000)
"""


def test_memory_counts_once_it_is_used_wherever_it_comes_from(tmp_path):
    """From before the notes, from a list, and by a storage that grows."""
    notes = notes_of(tmp_path, FROM_ELSEWHERE)
    assert 4000 + 4000 <= notes.peak <= 4000 + 4000 + 100


def called_by_nobody(function):
    """What it returns in a thread of its own: what runs tests side by side is made from text, as a file may be."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def test_what_a_student_is_given_is_not_theirs(tmp_path):
    student = student_of(tmp_path / "student.py", "def run(x):\n    return x.add_(1)\n")

    def peaks() -> tuple[int, int]:
        with Watching(student.__file__) as notes:
            x = torch.ones(1000)
            student.run(x)
            before = notes.peak
            lend([x])
            student.run(x)
        return before, notes.peak

    assert called_by_nobody(peaks) == (0, 4000)


def test_what_is_given_may_grow(tmp_path):
    """Then what it has grown by is the student's, also if the lab touches it before."""
    grow = "def run(x):\n    x.untyped_storage().resize_(7000)\ndef use(x):\n    x.add_(1)\n"
    student = student_of(tmp_path / "student.py", grow)

    def peaks() -> list[int]:
        with Watching(student.__file__) as notes:
            x = torch.ones(1000)
            student.use(x)
            found = [notes.peak]
            student.run(x)
            x.add_(1)
            student.use(x)
            found.append(notes.peak)
            lend([x])
            student.use(x)
        return [*found, notes.peak]

    assert called_by_nobody(peaks) == [0, 3000, 7000]


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_what_computes_in_another_thread_is_refused(tmp_path):
    code = """import torch
@torch.jit.script
def elsewhere(x: torch.Tensor):
    return torch.jit.wait(torch.jit.fork(torch.relu, x))
def run():
    elsewhere(torch.ones(3))
"""
    student, said = student_of(tmp_path / "student.py", code), []
    with Watching(student.__file__, refuse=said.append):
        student.run()
    assert said and is_refusal(said[0])


def test_patience_is_time_of_the_processor():
    """Who sleeps does not lose it."""
    begun, asked = time.thread_time(), []
    assert not patiently(lambda: asked.append(time.sleep(0.001)))
    assert PATIENCE <= time.thread_time() - begun < 3 * PATIENCE and len(asked) > 20
    assert patiently(lambda: len(asked) > 0)


def test_a_line_is_the_students_own():
    """The innermost in the file, and if possible in no helper that was given."""

    def frame(name, line, back, file="mine.py"):
        return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name=name), f_lineno=line, f_back=back)

    outer = frame("run", 5, frame("main", 1, None, "other.py"))
    inner = frame("torch", 9, frame("given", 3, outer), "torch.py")
    assert line_of("mine.py", inner) == 3 and line_of("mine.py", inner, ["given"]) == 5
    assert line_of("mine.py", inner, ["given", "run"]) == 3 and line_of("theirs.py", inner) == 0


# ---- the end of a check ----------------------------------------------------------------------------------------------

SECONDS = {  # after which a check ends: the main threads' states at each tenth of a second, CPU seconds, finished cases
    "all wait": ("SS", lambda t: 0, lambda t: 0, IDLE),
    "all wait, and look around from time to time": ("SS RS SR", lambda t: 0, lambda t: 0, IDLE),
    "all wait for a processor": ("RR", lambda t: 0, lambda t: 0, LIMIT),
    "all wait for a disk": ("DD", lambda t: 0, lambda t: 0, LIMIT),
    "all compute": ("RR", lambda t: t, lambda t: 0, BUSY),
    "one computes half of the time, and others wait": ("SR", lambda t: t / 2, lambda t: 0, 2 * BUSY),
    "all compute, in cases of 8 s": ("RR", lambda t: t, lambda t: t // 8, None),
    "the second case lasts": ("RR", lambda t: t, lambda t: t >= 8, 8 + BUSY),
    "all compute for 8 s, and then wait": (80 * "RR " + 920 * "SS ", lambda t: min(t, 8), lambda t: 0, 8 + IDLE / 2),
    "all wait, in cases of 4 s": ("SS", lambda t: 0, lambda t: t // 4, None),
}


@pytest.mark.parametrize("name", SECONDS)
def test_ranks_that_wait_or_compute_for_too_long(name, monkeypatch):
    states, used, done, expected = SECONDS[name]
    clock, now, states = lab_ranks._Clock(), 0.0, states.split()
    monkeypatch.setattr(lab_ranks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(lab_ranks, "state", lambda rank: (states[tick % len(states)][rank], used(now)))
    for tick in range(1000):
        now = tick / 10
        if clock.over([0, 1], done(now)):
            break
    assert now == pytest.approx(expected or 99.9, abs=0.11)
