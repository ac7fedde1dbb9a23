"""The design of a plan for a cluster: what is printed can be calculated again, and its hints are true."""

import os
import re

import pytest

from common.errors import UsageError
from common.labs.design import GOOD
from step08_5d.labs import design_plan
from step08_5d.labs.plan_accounts import accounts
from step08_5d.planning.time.speed import times

ANSWERS = {
    "in a node": {"tp": "8", "zero": "1"},
    "a pipeline": {"tp": "4", "pp": "8", "zero": "1", "recompute": "selective"},
    "parts of sequences": {"tp": "2", "cp": "4", "zero": "3", "recompute": "full"},
    "copies": {"zero": "3"},
}


def layout_of(task, answers: dict[str, str]):
    degrees = {"tp": "1", "pp": "1", "cp": "1", "zero": "0", "recompute": "none", "micro_batch": "1"} | answers
    rest = int(degrees["tp"]) * int(degrees["pp"]) * int(degrees["cp"])
    return design_plan.layout_of(degrees | {"dp": str(task.gpus // rest)}, task)


def calculated(line: str) -> tuple[float, float]:
    """What the left of the last equals sign gives, and what is printed on its right."""
    left, _, right = line.partition(": ")[2].partition(": while ")[0].replace(",", "").rpartition(" = ")
    left = re.sub(r"(\d+) GB/s", r"(\1 * 1000000000)", left.replace(" x ", " * "))
    left = re.sub(r"[A-Za-z]+", "", left.replace("micro-batches", "").replace("TFLOP/s", "/ 1000"))  # of a layer, in ms
    return eval(" ".join(left.split())) / (1000 if line.startswith("compute") else 1), float(right.split()[0])


@pytest.mark.parametrize("student", range(4))
@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_the_seconds_can_be_calculated_again(student, answers):
    """Each line's formula gives its number, and all of them together the step."""
    task = design_plan.task_of(student)
    layout = layout_of(task, answers)
    found = times(task.model, layout, task.machine, design_plan.PROFILE)
    total = 0.0
    for line in accounts(task, layout, design_plan.PROFILE):
        value, printed = calculated(line)
        assert value == pytest.approx(printed, abs=0.0052), line
        total += 0 if line.startswith("a layer") else value
    assert total == pytest.approx(found.step, abs=0.02)


def test_the_profile_is_named_with_its_numbers():
    for student in range(4):
        text = design_plan.given(student)
        assert f"profile {design_plan.PROFILE.name}, in step08_5d/planning/time/profiles.py" in text
        assert "78% of" in text and "60% of" in text and "75% hide" in text


# Plans that the last hint speaks of, without recomputation: the smaller model with ZeRO alone or with tp or cp of 2,
# the larger one with tp and cp in a node and a short pipeline
SMALL = [{"tp": tp, "cp": cp, "zero": zero} for tp in "12" for cp in "12" for zero in "123"]
LARGE = [{"tp": tp, "cp": cp, "pp": pp, "zero": "1"} for tp in "248" for cp in "124" for pp in "24"]


def shares(task, best: float, plans: list[dict[str, str]]) -> dict[str, float]:
    """By stage of ZeRO, the best share of the best speed among these plans, with the micro-batches that fit."""
    found = {}
    for plan in plans:
        for size in ("1", "2", "4"):
            try:
                layout = layout_of(task, plan | {"micro_batch": size})
            except UsageError:
                continue
            if sum(design_plan.memory(task.model, layout).values()) <= design_plan.MOST_FULL * task.machine.memory:
                step = times(task.model, layout, task.machine, design_plan.PROFILE).step
                found[plan["zero"]] = max(found.get(plan["zero"], 0), design_plan.speed(task, step) / best)
    return found


@pytest.mark.parametrize("student", range(4) if os.environ.get("TEST_ALL") else [2])
def test_the_last_hint_is_true(student):
    """Each way that it names passes, and what it says is slower does not."""
    task, best = design_plan.task_of(student), design_plan.best_speed(student)
    named = shares(task, best, SMALL if "8b" in task.name else LARGE)
    assert all(share >= GOOD for share in named.values()), named
    assert named.keys() == ({"1", "2", "3"} if "8b" in task.name else {"1"})
    everything = [plan | {"recompute": "full", "zero": zero} for plan in SMALL + LARGE for zero in "0123"]
    assert max(shares(task, best, everything).values()) < GOOD, "all of it recomputed"
