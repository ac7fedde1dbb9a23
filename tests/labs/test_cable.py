"""The design of two nodes and a slow cable: all layouts, what is said of one, and what is calculated by hand."""

import itertools
import re

import pytest

from common.errors import UsageError
from common.experiments.tcp_bytes import PACKET
from step08_5d.labs import design_cable
from tests.labs.test_kinds import write


def test_all_layouts_of_four_ranks_are_compared():
    """And step 8 accepts each of them."""
    case, found = design_cable.CASES[0], list(design_cable.layouts(design_cable.CASES[0]))
    expected = []
    for dp, tp, pp, size in itertools.product(range(1, 9), repeat=4):
        if dp * tp * pp == 4 and 8 // dp % size == 0:
            expected += [(dp, tp, pp, size, 8 // dp // size, order) for order in ("tp,cp,pp,dp", "tp,cp,dp,pp")]
    ways = [(each.dp, each.tp, each.pp, each.micro_batch, each.micro_batches, order) for each, order in found]
    assert sorted(ways) == sorted(expected)
    for each in found:
        design_cable.flags_of(case, *each)
    for case in design_cable.CASES:
        fastest = min(design_cable.predict(case, *each).step for each in design_cable.layouts(case))
        assert design_cable.predict(case, *design_cable.best_of(case)).step == fastest


@pytest.mark.parametrize("student", range(4))
def test_a_slow_cable(student, tmp_path, monkeypatch):
    (lab,) = design_cable.LABS
    monkeypatch.setattr(design_cable, "measure", lambda *_: 100.0)
    folder = tmp_path / lab.id
    folder.mkdir()
    lab.start(folder, student)
    assert lab.check(folder, student).score < 0.9
    case = design_cable.CASES[student]
    layout, order = design_cable.best_of(case)
    answers = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "micro_batch")} | {"order": order}
    write(folder, **answers)
    found = lab.check(folder, student)
    assert (
        found.passed
        and "measured: 100 tokens/s" in found.feedback
        and " is " in " ".join(found.feedback).partition("of the given hardware")[2]
    )
    monkeypatch.setattr(design_cable, "measure", lambda *_: "no namespaces")
    found = lab.check(folder, student)
    assert found.passed and "not measured: no namespaces" in found.feedback
    assert not any("cores" in line for line in found.feedback)
    write(folder, **answers | {"tps": 2})
    assert "answer.toml: `tps` is none of dp, tp, pp, micro_batch and order." in lab.check(folder, student).feedback
    write(folder, **{name: value for name, value in answers.items() if name != "tp"} | {"tps": 2})
    with pytest.raises(UsageError, match="tp must be there. answer.toml: `tps` is none of"):
        lab.check(folder, student)
    for changed, message in (
        ({"order": "dp,tp"}, "is none of"),
        ({"tp": 3}, "must be 4"),
        ({"micro_batch": 16}, "cannot be divided"),
        ({"dp": 0}, "at least 1"),
    ):
        write(folder, **answers | changed)
        assert message in lab.check(folder, student).feedback[0]
    assert design_cable.command(case) in lab.solution(student)


@pytest.mark.parametrize(
    ("degrees", "order", "dimension", "size", "said"),
    [
        (
            (1, 1, 4, 1),
            0,
            "pp",
            2 * 64 * 128 * 4,
            "1 x 64 x 128 activations of 4 bytes there and as many",
        ),
        ((1, 2, 2, 2), 0, "pp", 2 * 2 * 64 * 128 * 4, "2 groups reach across, each with 1/2 of that"),
        ((2, 1, 2, 1), 1, "pp", 2 * 2 * 64 * 128 * 4, "2 groups reach across"),
        ((4, 1, 1, 2), 0, "dp", 3 / 2 * 4 * 722_048, "2(N-1)/N of about 722,048 gradients of 4 bytes, N = 4"),
        ((2, 2, 1, 1), 0, "dp", 2 * 4 * 361_024, "about 361,024 gradients of 4 bytes, N = 2; 2 groups reach across"),
        ((1, 4, 1, 2), 0, "tp", 44 * 8 * 64 * 128 * 4, "2 x 64 x 128 activations of 4 bytes, 44 times per micro-batch"),
    ],
)
def test_the_seconds_of_the_cable_can_be_calculated_again(degrees, order, dimension, size, said):
    """From degrees, sizes and the rate: what `check` says of them is all that one needs."""
    case = design_cable.CASES[0]
    layout, order = next(
        (each, name)
        for each, name in design_cable.layouts(case)
        if (each.dp, each.tp, each.pp, each.micro_batch) == degrees and name == design_cable.ORDERS[order]
    )
    (found,) = design_cable.over_cable(case, layout, order).items()
    assert found[0] == dimension and found[1].bytes == pytest.approx(size, rel=0.002)
    assert found[1].seconds == pytest.approx(found[1].bytes * 1.069 / 1.25e6, rel=0.001)
    lines = design_cable.accounts(case, layout, order)
    assert lines[0].startswith(
        f"cable, {dimension}: {found[1].bytes:,.0f} bytes x {PACKET:.4f} for packets / 1.25 MB/s = "
    )
    assert said in " ".join(map(str.strip, lines)) and all(len(line) <= 118 for line in lines)
    exposed = found[1].seconds - found[1].hidden
    assert design_cable.predict(case, layout, order).cable == pytest.approx(exposed)


@pytest.mark.parametrize("case", design_cable.CASES)
def test_a_line_of_the_cable_says_what_its_numbers_give(case):
    """In hundredths of seconds, of every layout."""
    form = r"cable, \w+: ([\d,]+) bytes x ([\d.]+) for packets / ([\d.]+) MB/s = ([\d.]+) s"
    seen = 0
    for each in design_cable.layouts(case):
        for match in filter(None, (re.match(form, line) for line in design_cable.accounts(case, *each))):
            size, packets, rate, took = (float(group.replace(",", "")) for group in match.groups())
            assert round(size * packets / rate / 1e6, 2) == took, (each, match[0])
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("case", design_cable.CASES)
def test_the_last_hint_leads_to_the_best(case):
    """Three candidates, each with the micro-batch that the hint says: small for a bubble, large to hide sums."""
    speeds = {}
    for layout, order in design_cable.layouts(case):
        degrees, seconds = (layout.dp, layout.tp, layout.pp), design_cable.predict(case, layout, order).step
        if degrees == (2, 2, 1) and layout.micro_batches == 1:
            speeds["dp across"] = seconds
        elif degrees == (1, 2, 2) and layout.micro_batch == 1:
            speeds["pp across, tp inside"] = seconds
        elif degrees == (2, 1, 2) and layout.micro_batch == 1 and order == "tp,cp,dp,pp":
            speeds["pp across, dp inside"] = seconds
    assert min(speeds.values()) == design_cable.predict(case, *design_cable.best_of(case)).step and len(speeds) == 3
