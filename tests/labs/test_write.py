"""Labs of the kind write: starters fail, solutions pass in whatever words, and what only looks like one does not.

`answers` has a file for each lab with what students hand in, as edits of the reference: where < stands first is
replaced by >. Some are other solutions (=), and pass. The others (!) only look like one: the check rejects them, and
what it says names the misconception, by matching the pattern.
"""

import os
import re
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.labs import picture
from common.labs.cut import MARKED, bodies_of, starter
from common.labs.find import all_labs
from common.labs.graded import Expected, Graded
from common.labs.notes import Held, Notes, SeenCall
from common.labs.ranks import LIMIT, Case
from common.labs.rules import holds_at_most
from common.labs.write import WriteLab
from step01_single_gpu import sketch
from step01_single_gpu.labs import write_01
from step08_5d.labs import latent_ring
from tests.harness.ranks import ROOT, run_ranks, torchrun


def read_answers() -> dict[str, list[tuple[list[tuple[str, str]], str | None]]]:
    """By lab, (edits, what is said of them; None if they pass)."""
    answers = {}
    for file in sorted(Path(__file__).with_name("answers").glob("*.txt")):
        answers[id := file.stem] = []
        for said, lines in re.findall(r"^(=|! .*)\n((?:[<>].*\n)*)", file.read_text(), re.MULTILINE):
            pairs = re.findall(r"((?:^<.*\n)+)((?:^>.*\n)+)", lines, re.MULTILINE)
            edits = [tuple("\n".join(line[2:] for line in side.splitlines()) for side in pair) for pair in pairs]
            answers[id].append((edits, None if said == "=" else said[2:]))
    return answers


ALL = os.environ.get("TEST_ALL") == "1"
ANSWERS = read_answers()
LABS = {id: lab for id, lab in all_labs().items() if lab.kind == "write"}
ALONE = {id for id, lab in LABS.items() if not isinstance(lab, WriteLab)}  # which need no ranks
QUICK = {"write-02-a": (1,), "write-03-a": (1,), "write-05-a": (14,), "write-06-b": (13,)}
QUICK |= {"write-01-b": (6,), "write-05-b": range(4, 7)}
QUICK |= {id: range(len(ANSWERS[id])) for id in ALONE}  # these answers, without TEST_ALL
CASES = [(id, number) for id in ANSWERS for number in range(len(ANSWERS[id])) if ALL or number in QUICK.get(id, ())]


def hand_in(lab, folder, edits=()):
    """What the check says of the reference with these edits."""
    if hasattr(lab, "write_answers"):
        lab.start(folder, student=1)
        lab.write_answers(folder, student=1)
    text = starter((ROOT / lab.source).read_text(), (), lab.only, lab.hidden, lab.source)
    for before, after in edits:
        assert before in text, f"{lab.id}: {before!r} is not in {lab.source}"
        text = text.replace(before, after, 1)
    (folder / os.path.basename(lab.source)).write_text(text)
    return lab.check(folder, student=1)


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """They take most of the time."""
    monkeypatch.setattr(picture, "draw", lambda *_: False)


@pytest.mark.parametrize("id", LABS if ALL else ["write-01-b", *ALONE])
def test_the_starter_fails(id, tmp_path):
    lab = LABS[id]
    lab.start(tmp_path, student=1)
    verdict = lab.check(tmp_path, student=1)
    assert verdict.score == 0 and re.search(r"is not written yet \(line \d+\)", verdict.feedback[0])


@pytest.mark.parametrize("id", LABS if ALL else ["write-04-b", *ALONE])
def test_the_reference_passes(id, tmp_path):
    verdict = hand_in(LABS[id], tmp_path)
    assert verdict.passed, verdict.feedback


@pytest.mark.parametrize("id, number", CASES, ids=[f"{id} {number}" for id, number in CASES])
def test_answers_get_what_they_deserve(id, number, tmp_path):
    edits, said = ANSWERS[id][number]
    verdict = hand_in(LABS[id], tmp_path, edits)
    text = "\n".join(verdict.feedback)
    assert verdict.passed == (said is None), text
    assert said is None or re.search(said, text), text


def test_every_lab_is_tested_in_the_same_way():
    assert ANSWERS.keys() == LABS.keys() and LIMIT <= 60
    for id, lab in LABS.items():
        wrong = [said for _, said in ANSWERS[id] if said]
        assert len(wrong) >= 10 and len(ANSWERS[id]) >= len(wrong) + 3, id
        if id not in ALONE:
            assert len({(case.ranks, str(case)) for case in lab.cases}) >= 3
            assert len({case.ranks for case in lab.cases}) >= 3 or lab.step == 1 or id == "write-05-b"
        assert lab.task and all(lab.hints) and lab.solution(1).strip().endswith(lab.moral)


def test_how_many_there_are():
    """Of all labs together; and no edit of one is that of another."""
    every = [(id, str(edits), said) for id, answers in ANSWERS.items() for edits, said in answers]
    assert sum(said is not None for *_, said in every) >= 120 and sum(said is None for *_, said in every) >= 36
    assert len({(id, edits) for id, edits, _ in every}) == len(every)


def test_a_picture(tmp_path, monkeypatch):
    """Of a file that is wrong, one that is right but sends too much, and where it cannot be written."""
    monkeypatch.undo()
    lab = LABS["write-05-b"]
    edits, _ = next(each for each in ANSWERS[lab.id] if each[1] and "AFAB" in each[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of what does not fit
        verdict = hand_in(lab, tmp_path, edits)
    assert verdict.feedback[-1] == f"As a picture: {tmp_path / picture.NAME}"
    assert (tmp_path / picture.NAME).stat().st_size > 10_000
    assert any("micro-batches kept`: as it should be, and as it is" in line for line in verdict.feedback)
    notes = Notes([SeenCall("all_reduce", 80, (0, 1), 7, 0), SeenCall("all_reduce", 80, (0, 1), 7, 1)], peak=10)
    notes.largest = [Held(8, (2, 4), 7), Held(1, (), 8)]
    zero = {"x": torch.zeros(2)}
    graded = Graded(Case(ranks=2), [Expected(zero)] * 2, [zero] * 2)
    assert picture.in_words(graded, [notes, Notes()]) == [
        "What each rank sends, in this order:",
        "  rank 0  2 x all_reduce of 80 bytes (line 7)",
        "  rank 1  nothing",
    ]
    assert picture.draw(graded, [notes, Notes()], tmp_path / "a.png")
    assert not picture.draw(graded, [notes, Notes()], tmp_path / "no" / "a.png")
    assert list(holds_at_most(notes, 5, "Free."))[0].endswith(
        "8 bytes (2 x 4) of line 7; 1 bytes (a number) of line 8."
    )


@pytest.mark.parametrize("id", LABS)
def test_starters_keep_everything_but_the_bodies(id, tmp_path):
    lab = LABS[id]
    lab.start(tmp_path, student=1)
    (file,) = tmp_path.glob("*.py")
    source, text = (ROOT / lab.source).read_text(), file.read_text()
    assert text.count("raise NotImplementedError") == len(lab.bodies) == len(MARKED.findall(text))
    lines = sum(len(bodies_of(source)[number - 1].splitlines()) for number in lab.bodies)
    assert 3 <= lines <= (52 if id == "write-04-c" else 32), f"{lines} lines to write"
    assert text.startswith('"""')
    assert f" {lab.source}\n" not in text, "it says how to run the file that it was cut from"
    if not lab.only:
        whole, cut = MARKED.sub(r"\2", source.replace(lab.source, file.name)).splitlines(), text.splitlines()
        assert {line for line in cut if not re.search("# ---|NotImplemented|given", line)} <= set(whole)
    for name, other in lab.hidden.items():
        assert re.search(rf'^@given\(.*# .* {other}\ndef {name}\(.*\n    """.*"""\n\n\n', text, re.MULTILINE)
        assert LABS[other].source == lab.source and name not in LABS[other].hidden


def test_in_bfloat16_a_right_step_is_right_for_every_student():
    """Whatever is drawn: of 20 students, the first of whom is a teacher."""
    lab = LABS["write-01-a"]
    number, narrow = next((n, case) for n, case in enumerate(lab.cases) if isinstance(case, write_01.Narrow))
    for student in range(20):
        case = write_01.Narrow(**vars(narrow), seed=1000 * student + number)
        graded = Graded(case, lab.expect(case), [lab.run(sketch, case, 0)])
        assert not graded.wrong, (student, graded.wrong)


def own_differences() -> dict[str, float]:
    return latent_ring.compare(dist.get_rank(), dist.get_world_size())


def test_a_file_that_checks_itself():
    """What the file of write-08-c prints when somebody runs it: the ring is autograd on the whole sequence."""
    for differences in run_ranks(3, own_differences):
        assert differences.keys() == {"out", "dq", "dlatent", "dkey", "dweight"} and max(differences.values()) < 1e-12


@pytest.mark.skipif(not ALL, reason="TEST_ALL")
@pytest.mark.parametrize("id, ranks, said", [("write-02-b", 3, ": True"), ("write-04-b", 2, "loss 0.63, gradient")])
def test_what_a_handout_lets_one_try(id, ranks, said, tmp_path):
    """An example, with the reference."""
    source = ROOT / LABS[id].source
    (tmp_path / source.name).write_text(source.read_text())
    code = re.search(r"^    import torch\n(?:    .*\n|\n)+", LABS[id].task + "\n", re.MULTILINE)[0]
    (tmp_path / "try.py").write_text(textwrap.dedent(code))
    done = torchrun(ranks, "try.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.count(said) == ranks, done
