"""The planner's page holds what Python says, and its code has no formula."""

import os
import random
import re
from pathlib import Path

import pytest

from step08_5d.planning.__main__ import main
from step08_5d.planning.page import grid, runs, write
from step08_5d.planning.published.runs import read_runs
from step08_5d.planning.search import layouts
from step08_5d.planning.time.profiles import ENDS, PROFILES
from tests.mechanisms.step08.planning.page_words import SETTINGS, TASKS, expected, layout_of, page_of, regrets_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


# ---- what it holds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS if os.environ.get("TEST_ALL") else ["llama3-70b"])
def test_the_page_holds_what_python_says(name, folder):
    """All layouts that the planner considers are there; of 100 of them all words are those of the formulas."""
    task, (_, data) = TASKS[name], page_of(name, folder)
    regrets, seen = regrets_of(task), set()
    assert data["considered"] == len(data["lines"]) == len({*layouts(task), *regrets})
    for place in random.Random(0).sample(range(len(data["lines"])), SETTINGS):
        words = iter(data["lines"][place].split(" "))
        found = dict(zip(data["of_layout"], words))
        codes = zip(data["stops"].items(), found["stops"], strict=True)
        layout = layout_of(task, {name: some[ord(code) - data["first"]] for (name, some), code in codes})
        right = expected(task, layout, regrets)
        assert [found[key] for key in ("fits", "held", "regret")] == [right[key] for key in ("fits", "held", "regret")]
        assert int(found["micro_batches"]) == layout.micro_batches
        for end in range(2):
            part = dict(zip(data["of_end"], words))
            assert data["binds"][int(part.pop("binds"))] == right["binds"][end]
            assert part == {key: right[key][end] for key in ("step", "mfu", "speed")} | right["causes"][end], layout
        for stage in right["stages"]:
            assert dict(zip(data["of_stage"], words)) == stage, layout
        assert next(words, None) is None
        seen.add(found["fits"])
    assert {"good", "bad"} <= seen
    assert data["picks"]["least regret"] == 0 and len(data["picks"]) == 1 + len(PROFILES)


def test_a_page_of_too_many_layouts_keeps_the_best(monkeypatch):
    task = TASKS["llama3-70b"]
    monkeypatch.setattr(grid, "MOST", 150)
    found = grid.make_grid(task, ENDS)
    assert found.considered == len({*layouts(task), *regrets_of(task)}) and 140 <= len(found.lines) <= 150
    assert found.considered > 10 * len(found.lines)
    assert found.best == next(iter(regrets_of(task)))
    assert f"{len(found.lines):,} of the {found.considered:,} layouts" in write.evidence(ENDS, found)
    degrees = {(each.dp, each.tp, each.pp, each.cp) for each in layouts(task)}
    assert all(
        set(found.stops[name]) == {each[side] for each in degrees} for side, name in enumerate(("dp", "tp", "pp", "cp"))
    )


def test_it_says_whose_measurements_it_stands_on(folder):
    text = re.sub("<[^>]*>", "", page_of("llama3-70b", folder)[0].split("<main>")[0])
    assert (
        "nanotron, mostly the slow end: the habits of 1,532 runs of the playbook's authors, with 4 models on 1 to 64"
        in text
    )
    assert re.search(r"tuned, mostly the fast end: faster than \d\d% of \d\d runs that others have published", text)
    assert re.search(r"103 runs of other systems are known. \d\d% of them are in the range", text)
    alone = write.evidence((PROFILES["fsdp"],), grid.Grid({}, [], 0, [], {}, {}, None))
    assert (
        "that of one profile" in alone
        and "fewer than 8 GPUs, interleaving, latent attention, tp across nodes, GPUs other than A100, H100." in alone
        and "in the range" not in alone
    )


def test_no_formula_is_left_in_its_code():
    """Arithmetic is about the stops of sliders, and nothing else is made a number."""
    code = re.sub(r"//.*", "", (write.FOLDER / "page.js").read_text())
    code = re.sub(r"`([^`]*)`", lambda text: " ".join(re.findall(r"\$\{([^}]*)\}", text[1])), code)
    code = re.sub(r'"[^"]*"', "", code)
    assert re.findall(r"[*/%]|\bparse\w+\(|[<>]=? \d{2,}|\d\.\d|\de\d", code) == []
    assert re.findall(r"(?:Number|Math\.\w+)\([\w.]*", code) == ["Math.abs(stop_at", "Number(slider.value"]
    for line in code.splitlines():
        assert not re.search(r"[\w)] ?[-+]=? ?[\w(]|\+\+|--", line) or re.search("stop|place|length", line), line


def test_it_needs_nothing_else(folder):
    text, _ = page_of("llama3-70b", folder)
    assert not re.findall(r"(?:src|href)=|https?://", text) and "/* " not in text and len(text) < 2e6


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_dots_of_runs():
    """A dot's area is its speed and its colour its MFU, both of the best."""
    one = next(run for run in read_runs() if run.pair == ("1B", 4))
    degrees = ((16, 2, 100.0, 0.2), (2, 2, 400.0, 0.1), (2, 10, 1.0, 0.4), (16, 10, 0.0, None))
    layouts = [one.layout._replace(dp=dp, tp=1, pp=1, zero=0, micro_batch=size) for dp, size, *_ in degrees]
    made = [
        one._replace(layout=layout, tokens_per_second=speed, mfu=mfu, memory=3e9)
        for layout, (*_, speed, mfu) in zip(layouts, degrees)
    ]
    found = runs.tables(made)
    assert "1B on 4 nodes: 3 of 4 runs ended" in found and "<p>The best: dp 2, tp 1, pp 1, ZeRO-0, micro-b" in found
    heads = ["", "ZeRO-0, micro-batch 2", "ZeRO-0, micro-batch 10", "dp 2, tp 1, pp 1", "dp 16, tp 1, pp 1"]
    assert re.findall("<th>([^<]*)</th>", found) == heads
    assert re.findall('--size:(.*?);--heat:(.*?)"', found) == [("1.00", "0.25"), ("0.05", "1.00"), ("0.50", "0.50")]
    assert "· 100 tokens/s per GPU · 3.0 GB" in found and "· MFU 20.0% (predicted " in found
    assert "×<span>dp 16, tp 1, pp 1, ZeRO-0, micro-batch 10: published without numbers</span>" in found
    assert "The best" not in runs.tables(made[3:])
    assert len(re.findall("<details>", runs.tables())) == 13


def test_bad_input_is_one_line(tmp_path, capsys):
    for words, line in (
        ("--gpus 2.7", "argument --gpus: 2.7 is no whole number, such as 64"),
        (
            "--gpus 8 --tokens-per-batch 0",
            "argument --tokens-per-batch: 0 is no whole number of tokens, such as 4096, 8k or 1M",
        ),
        (
            f"--gpus 1 --tokens-per-batch 4096 --out {tmp_path}",
            f"cannot write {tmp_path}: [Errno 21] Is a directory: '{tmp_path}'",
        ),
    ):
        assert main(["page", "--model", "llama3-1b", "--out", f"{tmp_path}/plan.html", *words.split()]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith(line)
