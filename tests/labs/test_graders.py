"""What grades a lab, as functions of what somebody might hand in: made-up values and records, no ranks."""

import math
from dataclasses import replace

import pytest
import torch

from common.errors import UsageError
from common.labs import hunt
from common.labs.answers import number
from common.labs.copies import Edit
from common.labs.design import Design, Judged
from common.labs.find import ROOT, all_labs
from common.labs.hunt import TOLERANCE, Bug, Hunt
from common.labs.notes import Notes
from common.labs.predict import Question
from common.labs.predict import grade as grade_prediction
from common.labs.ranks import Case, Outcome
from common.labs.training import Launch, first_difference
from common.labs.write import Expected, WriteLab
from step07_expert_parallel.labs import routing
from tests.labs.test_notes import call

# ---- write -----------------------------------------------------------------------------------------------------------

CASES = [Case(ranks=1, width=2), Case(ranks=3, width=4)]


def lab_for(judge=lambda case, rank, notes: (), **more) -> WriteLab:
    """Rank r must return r + 1 as x and the same negative as y; twice as much comes from a mistake."""

    def expect(case):
        right = [torch.full((2,), rank + 1.0, dtype=torch.float64) for rank in range(case.ranks)]
        return [Expected.of({"x": each, "y": -each}, {"it was added twice.": {"x": 2 * each}}) for each in right]

    texts = {
        "id": "write-02-z",
        "title": "",
        "minutes": 1,
        "task": "",
        "hints": ("", "", ""),
        "moral": "",
        "source": "",
    }
    return WriteLab(**texts, bodies=(), cases=tuple(CASES), run=None, expect=expect, judge=judge, **more)


def results(case: Case, change=lambda rank, values: None, notes=lambda rank: Notes()) -> list[tuple[dict, Notes]]:
    found = []
    for rank in range(case.ranks):
        x = torch.full((2,), rank + 1.0, dtype=torch.float64)
        change(rank, values := {"x": x, "y": -x})
        found.append((values, notes(rank)))
    return found


def grade(lab: WriteLab, *of_last, failure: str = ""):
    """The verdict on a first case that is right, and a second one as described."""
    return lab.grade(
        CASES, Outcome([results(CASES[0]), *([results(CASES[1], *of_last)] if not failure else [])], failure)
    )


def test_what_is_right_passes():
    verdict = grade(lab_for())
    assert verdict.passed and verdict.feedback == ("Numbers and mechanism are right.",)


@pytest.mark.parametrize("rank", range(3))
def test_the_mechanism_of_every_rank_is_judged(rank):
    """Once for each fault: the numbers are right, so three quarters."""
    lab = lab_for(lambda case, each, notes: ["it waits."] if notes.products else ())
    verdict = grade(lab, lambda *_: None, lambda each: Notes(products=int(each >= rank)))
    told = f"With 3 ranks, width 4, rank {rank}: it waits."
    assert verdict.score == 0.75 and verdict.feedback == ("The numbers are right, but not the way to them.", told)
    verdict = grade(lab_for(), lambda *_: None, lambda each: Notes(unwaited=[call("send")] * (each == rank)))
    assert verdict.score == 0.75 and f"rank {rank}: the send of 1,000 bytes" in verdict.feedback[1]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    "name, value, said",
    [
        ("x", [math.nan, math.nan], "differs first at [0]: nan instead of"),
        ("y", [-1.0, math.nan], "differs first at"),
        ("x", [math.inf, 1.0], "differs first at [0]: inf instead of"),
        ("x", [0.0, 0.0], "it was never filled."),
        ("x", [1.0], "should have the shape (2,), and has (1,)."),
        ("x", None, "should be a tensor, and is None."),
    ],
)
def test_a_wrong_value_of_any_rank(rank, name, value, said):
    def change(each, values):
        if each == rank:
            values[name] = value and torch.tensor(value, dtype=torch.float64)

    verdict = grade(lab_for(), change)
    assert verdict.score == 0.75 / 2, "one case of two"
    where = f"With 3 ranks, width 4: `{name}` on rank {rank}" if value != [-1.0, math.nan] else f"`{name}` on rank"
    assert where in verdict.feedback[0] and any(said in line for line in verdict.feedback)


def test_how_near_a_value_must_be():
    for error, right in ((1e-12, True), (1e-10, True), (1e-8, False), (-1e-8, False)):
        verdict = grade(lab_for(), lambda rank, values, error=error: values["x"].mul_(1 + error))
        assert verdict.passed == right, error


def test_a_mistake_that_is_known_is_told():
    verdict = grade(lab_for(), lambda rank, values: values["x"].mul_(2))
    assert verdict.feedback[1] == "What this usually is: it was added twice."
    verdict = grade(lab_for(), lambda rank, values: values["y"].mul_(3))
    assert "`y` on rank 0" in verdict.feedback[0] and "all of it is 3 times" in verdict.feedback[1]


def test_what_ends_before_the_last_case():
    """What an error comes from may depend on the case that it ends."""
    lab = lab_for(errors=lambda case: {"no such": f"not of width {case.width}."})
    verdict = grade(lab, failure="rank 1 raised: no such tensor")
    assert verdict.score == 0.75 / 2 and not verdict.passed
    assert verdict.feedback == ("rank 1 raised: no such tensor", "What this usually is: not of width 4.")
    verdict = lab.grade(CASES, Outcome([], "rank 0 raised: no such tensor"))
    assert verdict.score == 0 and verdict.feedback[1] == "What this usually is: not of width 2."
    assert not verdict.unsure and lab.grade(CASES, Outcome([], "this machine is too busy", too_busy=True)).unsure


def chosen(case: Case) -> list[int]:
    """Of each rank of write-07: how many tokens come to its experts."""
    x, router, *_ = routing.drawn(case)
    arrived, of_rank = [0] * case.ranks, case.experts // case.ranks
    for scores in (x @ router).tolist():
        for expert in sorted(range(case.experts), key=lambda each: -scores[each])[: case.choices]:
            arrived[expert // of_rank] += 1
    return arrived


SEED = Case(**vars(routing.CASES[-1]), seed=1002)
ROWS, MOST = 8 * 10 * 2 * 16, 8 * 16 * max(chosen(SEED))  # bytes of a rank's choices, and of what comes to the fullest
ENOUGH = {  # bytes that a rank sends in the last case of a lab, of 8-byte numbers on 4 ranks (08-b: 8)
    "write-02-a": 2 * 3 / 4 * 8 * 8 * 12**2,  # an all-reduce of 8 layers of 12 x 12
    "write-02-b": 2 * 3 / 4 * 8 * 160 * 3,  # of 160 rows of 3
    "write-03-a": 3 * 3 / 4 * 8 * 10 * 64**2,  # two gathers and a reduce-scatter of 10 matrices of 64 x 64
    "write-03-b": 2 * 2 * 3 / 4 * 8 * 2000,  # in each of two steps, a reduce-scatter and a gather of 2,000
    "write-04-a": 3 / 4 * 8 * (5 * 12 * 5 + 2 * 5),  # five times 12 tokens of width 5, and a sum of the norm's 5
    "write-04-b": 3 * 2 * 3 / 4 * 8 * 2 * 6,  # three all-reduces of a number per token, of 2 x 6
    "write-06-a": 3 * 2 * 8 * 8 * 512,  # keys and values of 8 tokens of width 512, to all others of 4 ranks
    "write-06-b": 4 * 4 * 8 * 8 * 512,  # and their gradients, once around
    "write-07-a": 3 / 4 * (ROWS + MOST + 8 * 8),  # there and back, and the counts of 8 experts
    "write-07-b": 2 * 3 / 4 * (ROWS + MOST) + 8 * 8,
    "write-08-c": 4 * 2 * 8 * 8 * (20 + 8),  # latent and rotated key of 8 tokens, and their gradients, once around
    # 384 + 128 + 128 numbers over dp_cp 2, 128 of the router over tp 2, 2 x 1,024 over edp 2, and the loss over all 8
    "write-08-b": 2 * 8 * ((384 + 128 + 128) / 2 + 128 / 2 + 2 * 1024 / 2 + 7 / 8),
}


@pytest.mark.parametrize("id", ENOUGH)
def test_each_lab_knows_how_many_bytes_are_enough(id):
    lab = all_labs()[id]
    last = [each for each in lab.cases if type(each) is type(lab.cases[0])][-1]
    case = type(last)(**vars(last), seed=1002)
    for share, said in ((1, False), (1.1, True)):
        notes = Notes([call("send", math.ceil(share * ENOUGH[id]) + 65 * said)])
        assert any("it sends" in line for line in lab.judge(case, 0, notes)) == said, share


# ---- hunt ------------------------------------------------------------------------------------------------------------

SEEN = Launch("seen.py", "right"), Launch("seen.py", "wrong")
UNSEEN = Launch("unseen.py", "wrong")
EDIT = Edit("common/labs/rules.py", "SLACK = 1.02", "SLACK = 1.2")


@pytest.fixture
def hunted(tmp_path, monkeypatch):
    """Hand in an answer near this line with a fix after which the unseen training has this loss."""
    monkeypatch.setattr(hunt, "copy_project", lambda *_: None)
    monkeypatch.setattr(hunt, "files", lambda *_: [])
    lab = Hunt("hunt-01-z", "", 1, "", ("", "", ""), bugs=(Bug((EDIT,), SEEN, UNSEEN, "ask?", "why", "nobody"),))
    (line,) = lab.places(lab.bug(0))["common/labs/rules.py"]
    (tmp_path / "common/labs").mkdir(parents=True)
    (tmp_path / "common/labs/rules.py").touch()

    def hand_in(loss: float, away: int = 0, fixed: bool = True):
        trained, folders = [], []

        def train(trainings, folder, base, theirs=False):
            assert not any(each.exists() for each in folders), "the right record is beside the student's run"
            assert base.split().count("--seed") == 2, "other weights and data than those of run.sh"
            trained.extend(trainings)
            folders.append(folder)
            return [record(loss if root == tmp_path else 1.0) for _, root in trainings]

        monkeypatch.setattr(hunt, "train", train)
        monkeypatch.setattr(Hunt, "_changed", lambda *_: fixed)
        answer = f'file = "common/labs/rules.py"\nline = {line[0] + away}\nwhy = "it lets too much pass"\n'
        (tmp_path / "answer.toml").write_text(answer)
        return lab.check(tmp_path, 0), trained

    hand_in.folder = tmp_path
    return hand_in


def record(*losses: float, norms=None):
    """What `train` returns of a training: as much of it as `compare` reads."""
    from common.compare import Record

    lines = [{"step": step, "loss": loss, "grad_norm": (norms or losses)[step]} for step, loss in enumerate(losses)]
    return Record(path=ROOT, config={}, records=dict(enumerate(lines)))


def test_a_fix_is_graded_on_the_training_that_nobody_has_seen(hunted):
    """Ours, as it is, on one side; the student's folder on the other."""
    verdict, trained = hunted(1.0)
    assert verdict.passed and trained == [(UNSEEN, ROOT), (UNSEEN, hunted.folder)]
    for loss in (1 + 3e-9, 1 - 3e-9, 2.0, math.nan, math.inf):
        verdict, _ = hunted(loss)
        assert verdict.score == 0.5 and "fix: not yet. On a training that you have not seen" in verdict.feedback[1]
    assert hunted(1 + 3e-10)[0].passed
    verdict, trained = hunted(1.0, fixed=False)
    assert verdict.score == 0.5 and not trained
    assert [hunted(1.0, away)[0].score for away in (-2, 2, -3, 3)] == [1.0, 1.0, 0.75, 0.75]


def test_hunts_have_trainings_that_are_not_shown():
    for lab in all_labs().values():
        for bug in getattr(lab, "bugs", ()):
            assert bug.unseen not in bug.seen and bug.unseen.flags != bug.seen[1].flags, lab.id


def test_the_first_difference():
    right = record(2.0, 1.0, norms=[3.0, 4.0])
    assert first_difference(right, record(2.0, 1.0, norms=[3.0, 4.0]), TOLERANCE) is None
    for losses, norms, said in (
        ([2.0, 1.1], [3.0, 4.0], "loss of step 1 is 1.1 instead of 1 (1.1 times as large)"),
        ([2.0, 1.0], [3.0, 8.0], "grad_norm of step 1 is 8 instead of 4 (2 times as large)"),
        ([2.0, 1.0], [3.0, math.nan], "grad_norm of step 1 is nan instead of 4"),
        ([math.nan, 1.0], [3.0, 4.0], "loss of step 0 is nan instead of 2"),
        ([2.0 + 1e-8, 1.0], [3.0, 4.0], "loss of step 0 is 2.00000001 instead of 2 (off by 5.0e-09)"),
        ([2.0], [3.0], "only 1 of 2 steps were recorded"),
    ):
        assert first_difference(right, record(*losses, norms=norms), TOLERANCE).startswith(said), said
    healthy, broken = record(1.0), record(math.nan)
    assert first_difference(broken, broken, TOLERANCE) and first_difference(broken, healthy, TOLERANCE)
    assert first_difference(record(0.0), record(1.0), TOLERANCE).startswith("loss of step 0 is 1 instead of 0")


# ---- predict ---------------------------------------------------------------------------------------------------------


def test_a_prediction():
    question = Question("bytes", "How many?", 0.05, 100.0, "how", {"forgets the backward": 50.0})
    for value in (100.0, 104.9, 95.1):
        assert grade_prediction(question, value, 100.0)[0], value
    for value in (105.2, 106.0, 94.9, 94.0, -100.0):  # the tolerance is a share of what is measured, not of the answer
        assert not grade_prediction(question, value, 100.0)[0], value
    for value, said in (
        (50.02, "forgets the backward"),
        (106.0, "too large, by a factor below 2"),
        (201.0, "too large, by a factor below 10"),
        (50.4, "forgets the backward"),
        (3.0, "too small, by more than 10 times"),
        (None, "no answer yet"),
    ):
        right, line = grade_prediction(question, value, 100.0)
        assert not right and said in line, line
    assert not grade_prediction(question, 100.0, math.nan)[0] and not grade_prediction(question, math.nan, 100.0)[0]
    assert number({"bytes": "1_000"}, "bytes") == 1000 and number({"bytes": ""}, "bytes") is None
    for text in ("nan", "inf", "many"):
        with pytest.raises(UsageError, match=f"bytes = {text} is not a number"):
            number({"bytes": text}, "bytes")


# ---- design ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed, score", [(101, 1), (100, 1), (98.1, 1), (97.9, 0.9 * 0.979), (50, 0.45), (1, 0.009)])
def test_a_design(speed, score, tmp_path):
    """Passed with 98 % of the best; the score board has the fastest first, each once."""
    texts = {"id": "design-01-z", "title": "", "minutes": 1, "task": "", "hints": ("", "", "")}
    asked = {"given": lambda student: "", "fields": {"dp": "1"}, "reveal": lambda student: "", "variants": 2}
    asked["best"] = lambda student: 210.0
    lab = Design(**texts, **asked, judge=lambda answers, student: Judged(f"dp {answers['dp']}", speed, 100.0, ("why",)))
    folder = tmp_path / lab.id
    folder.mkdir()
    lab.start(folder, 0)
    lab._enter(tmp_path / "scores.jsonl", Judged("dp 7", 60.0, 100.0, ()), 2)
    lab._enter(tmp_path / "scores.jsonl", Judged("dp 9", 90.0, 100.0, ()), 1)  # other hardware
    replace(lab, id="design-01-y")._enter(tmp_path / "scores.jsonl", Judged("dp 8", 80.0, 100.0, ()), 0)
    lab.check(folder, 0)
    verdict = lab.check(folder, 0)
    assert verdict.score == pytest.approx(score) and verdict.passed == (score == 1)
    board = [line for line in verdict.feedback if "student" in line]
    assert [line.split(": ")[1] for line in board] == (["dp 1", "dp 7"] if speed > 60 else ["dp 7", "dp 1"])
    for better in range(4):  # of one student, and five rows are shown
        board = lab._enter(tmp_path / "scores.jsonl", Judged(f"dp {20 + better}", 200.0 + better, 100.0, ()), 0)
    assert [line.split(": ")[1] for line in board[1:]] == [
        "dp 23",
        "dp 22",
        "dp 21",
        "dp 20",
        "dp 1" if speed > 60 else "dp 7",
    ]
