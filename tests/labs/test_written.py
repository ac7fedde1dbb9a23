"""What ranks write is read without running it: tensors come back, and whatever is none of it is refused."""

import json
import os
import pickle
import time
from collections import Counter

import pytest
import torch

from common.labs.failures import describe
from common.labs.notes import Held, Notes, SeenCall
from common.labs.ranks import Case, _collect
from common.labs.written import Failure, plain, read_failure, read_result, write_failure, write_result

NOTES = Notes(
    [SeenCall("all_reduce", 8, (0, 1), 3, 1), SeenCall("send", 8, (0, 1), 4, 1, 1)],
    [(3, 1)], 2, 64, [Held(64, (2, 4), 7)], [SeenCall("send", 8, (0, 1), 4, 1, 1)], [("x", 5)], 96,
    Counter(forwards=3),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_tensors_and_notes_come_back(dtype, shape):
    value = torch.arange(6.0)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    turned = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    values, notes = read_result(write_result(plain({"x": value, "t": turned, "no": None, "text": "a"}), NOTES))
    assert values["x"].dtype == dtype and torch.equal(values["x"], value) and values["x"].shape == shape
    assert torch.equal(values["t"], turned) and values["no"] is None and repr(values["text"]) == "'a'"
    assert notes == NOTES


def test_odd_values_are_text():
    class Odd:
        def __reduce__(self):
            return exec, ("raise SystemExit",)

    odd = {"odd": Odd(), "sparse": torch.eye(2).to_sparse()}
    values, _ = read_result(write_result(plain(odd), Notes()))
    assert "Odd" in repr(values["odd"]) and "sparse" in repr(values["sparse"])


class Gift:
    """A pickle that does something when it is read."""

    def __reduce__(self):
        return os.mkdir, ("gift",)


RIGHT = json.loads(write_result(plain({"x": torch.ones(2)}), NOTES))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(({"x": Gift()}, NOTES)), b"", b"[" * 99_999, b"3", b"{}",
        json.dumps(RIGHT | {"values": [1]}).encode(),
        json.dumps(RIGHT | {"values": {"x": {"type": "float99", "shape": [2], "numbers": ""}}}).encode(),
        json.dumps(RIGHT | {"values": {"x": {"type": "float32", "shape": [-1], "numbers": "AAAA"}}}).encode(),
        json.dumps(RIGHT | {"values": {"x": {"type": "float32", "shape": [10**9], "numbers": "AAAAAA=="}}}).encode(),
        json.dumps(RIGHT | {"notes": RIGHT["notes"] | {"peak": "1"}}).encode(),
        json.dumps(RIGHT | {"notes": RIGHT["notes"] | {"calls": [["send"]]}}).encode(),
    ],
)  # fmt: skip
def test_what_no_rank_writes_is_refused(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0.0").write_bytes(content)
    outcome = _collect(tmp_path, [Case(ranks=1)])
    assert not outcome.results and "wrote what is no result" in outcome.failure
    assert not (tmp_path / "gift").exists()


def test_a_wait_belongs_to_the_case_in_which_a_rank_waits(tmp_path):
    """A rank that said so in another case, and then went on, does not hang in the next one."""
    for number, case in enumerate((2, 3)):
        for rank in range(3):
            (tmp_path / f"failure.{rank}").write_bytes(write_failure(Failure("hangs", "waits in send", 1.0)))
        for rank in range(case):
            path = tmp_path / f"{number}.{rank}"
            path.write_bytes(write_result({}, NOTES))
            os.utime(path, ns=(time.time_ns() + 10**9,) * 2)
    outcome = _collect(tmp_path, [Case(ranks=2), Case(ranks=3), Case(ranks=4)])
    assert len(outcome.results) == 2 and outcome.too_busy and "too busy" in outcome.failure
    for rank in range(3):
        os.utime(tmp_path / f"failure.{rank}", ns=(time.time_ns() + 10**10,) * 2)
    outcome = _collect(tmp_path, [Case(ranks=2), Case(ranks=3), Case(ranks=4)])
    assert "it does not end. rank 0 waits in send" in outcome.failure and not outcome.too_busy


def test_failures():
    failure = Failure("hangs", "a", 3.5, NOTES.calls)
    assert read_failure(write_failure(failure)) == failure
    for content in (pickle.dumps(failure), b"[]", b'{"kind": 3, "text": "", "when": 1.0}', b"[" * 99_999):
        with pytest.raises(ValueError):
            read_failure(content)


def gathers(*lines: int, op: str = "all_gather", bytes: int = 8) -> list[SeenCall]:
    return [SeenCall(op, bytes, (0, 1), line, 0) for line in lines]


# Lines in which rank 0 and rank 1 gather, and what is said of the first that differs
DIFFER = {
    "one goes without": ((3, 3, 5, 3), (3, 3, 5, 5), "number 4 is the first that differs. rank 0: all_gather of 8"),
    "lines of two branches": ((3, 3, 7), (3, 3, 8), ""),
    "one is behind": ((3, 3, 5), (3, 3), ""),
}


@pytest.mark.parametrize("case", DIFFER)
def test_the_first_call_in_which_ranks_that_hang_differ(case):
    *lines, said = DIFFER[case]
    found = {rank: Failure("hangs", "waits", 1.0, gathers(*each)) for rank, each in enumerate(lines)}
    text = describe(found, {}, 2)
    assert text.startswith("it does not end. rank 0 waits; rank 1 waits.") and said in text
    assert said or "differs" not in text


def test_the_first_call_that_differs_by_what_it_is():
    found = {0: Failure("hangs", "waits", 1.0, gathers(3) + gathers(4, op="reduce_scatter"))}
    text = describe(found | {1: Failure("hangs", "waits", 1.0, gathers(3, 5))}, {}, 2)
    assert text.endswith(
        "differs. rank 0: reduce_scatter of 8 bytes in line 4; rank 1: all_gather of 8 bytes in line 5."
    )
    text = describe(found, {1: Notes(gathers(3))}, 2)
    assert text.endswith(
        "rank 1 has come to its end. Of what ranks 0 and 1 begin together, number 2 is the first that differs. "
        "rank 0: reduce_scatter of 8 bytes in line 4; rank 1: none."
    )
    found = {rank: Failure("hangs", "waits", 1.0, gathers(3, op="all_to_all", bytes=rank)) for rank in range(2)}
    assert "differs" not in describe(found, {}, 2), "each rank sends as much as it likes"
