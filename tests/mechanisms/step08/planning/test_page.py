"""The planner's page: what it holds is what Python says, and clicks show it, without a browser and in one."""

import html
import json
import math
import os
import random
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning.__main__ import main
from step08_5d.planning.explain import NAMES, Range, divided
from step08_5d.planning.memory.backwards import fullest_ranks
from step08_5d.planning.memory.peak import memory, of_stage
from step08_5d.planning.page import grid, runs, write
from step08_5d.planning.search import Task, command, layouts, plans
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import ENDS, PROFILES
from step08_5d.planning.time.speed import mfu

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
H100 = MACHINES["H100"]
TASKS = {"llama3-70b": Task("llama3-70b", PRESETS["llama3-70b"], 64, 4096, 16, H100)}
TASKS |= {"mixtral-8x7b": Task("mixtral-8x7b", PRESETS["mixtral-8x7b"], 16, 2048, 8, H100)}
LINE = {"good": "Should fit", "tight": "Too tight, as CUDA and NCCL need some, too", "bad": "Does not fit"}
SETTINGS = 100  # of each task

needs_node = pytest.mark.skipif(not NODE, reason="node, which runs the page's code, is not installed")
opens_browser = pytest.mark.skipif(not CHROMIUM or not os.environ.get("TEST_ALL"), reason="needs Chromium, TEST_ALL=1")


@cache
def page_of(name: str, folder: Path) -> tuple[str, dict]:
    """The page of a task, and what it holds."""
    text = write.write_page(str(folder / f"{name}.html"), TASKS[name], ENDS).read_text(encoding="utf-8")
    return text, json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


def layout_of(task: Task, values: dict) -> Layout:
    values = {name: int(value) if name != "recompute" else value for name, value in values.items()}
    count = task.sequences // values["dp"] // values["micro_batch"]
    return Layout(task.seq, micro_batches=count, dtype="bfloat16", **values)


def three(number: float) -> str:
    """Three digits, as one would write them by hand."""
    for _ in range(2 if number else 0):  # 9.996 becomes 10.0
        places = 2 - math.floor(math.log10(number))
        number = round(number, places)
    return f"{number:.{max(0, places)}f}" if number else "0"


def expected(task: Task, layout: Layout, regrets: dict[Layout, float]) -> dict:
    """What Python says of a layout, in the words of the page."""
    span, ranks = Range.of(task.model, layout, task.machine, ENDS), fullest_ranks(task.model, layout)
    held = sum(memory(task.model, layout).values())
    fits = "good" if held <= 72e9 else "tight" if held <= 80e9 else "bad"
    tokens = task.sequences * task.seq / task.gpus
    stages = []
    for rank in ranks:
        kinds = {kind: three(size / 1e9) for kind, size in of_stage(task.model, layout, rank).items()}
        stages.append(
            {"stage": str(rank), "all": three(sum(of_stage(task.model, layout, rank).values()) / 1e9)} | kinds
        )
    return {
        "held": three(held / 1e9),
        "fits": fits,
        "regret": f"{regrets[layout]:+.0%}" if layout in regrets else "-",
        "step": [three(each.step) for each in span.times],
        "mfu": [f"{mfu(task.model, layout, each.step, task.machine):.1%}" for each in span.times],
        "speed": [f"{tokens / each.step:,.0f}" for each in span.times],
        "binds": span.binds,
        "causes": [{name: three(size) for name, size in each._asdict().items()} for each in span.times],
        "stages": stages,
    }


def joined(words: list[str]) -> str:
    return " ... ".join(dict.fromkeys(words))


def shown(task: Task, layout: Layout, right: dict) -> dict:
    """The text of each part of the page."""
    numbers = f"time of a step{joined(right['step'])} sMFU{joined(right['mfu'])}tokens/s/GPU{joined(right['speed'])}"
    numbers += f"slower than the best, at worst{right['regret']}micro-batches{layout.micro_batches}"
    numbers += "".join(f"{end.name} waits for{words}" for end, words in zip(ENDS, right["binds"]))
    names = [f"stage {each['stage']}" for each in right["stages"]] if layout.pp > 1 else ["any rank"]
    kinds = list(right["stages"][0])[2:]
    rows = ["GB", *names, *(cell for kind in kinds for cell in (kind, *(each[kind] for each in right["stages"])))]
    rows += ["all", *(each["all"] for each in right["stages"])]
    times = ["s", *(end.name for end in ENDS)]
    for name in right["causes"][0]:
        if any(each[name] != "0" for each in right["causes"]):
            times += [NAMES[name], *(each[name] for each in right["causes"])]
    return {
        "verdict": [right["fits"], f"{LINE[right['fits']]}: {right['held']} of 80.0 GB on the fullest rank"],
        "numbers": numbers,
        "memory": "".join([*names, *rows, divided(task, layout) if layout.pp > 1 else ""]),
        "time": "".join([*(end.name for end in ENDS), *times, "the step", *right["step"]]),
        "command": command(task, layout),
    }


@cache
def regrets_of(task: Task) -> dict[Layout, float]:
    return {plan.layout: plan.regret for plan in plans(task)[0]}


# ---- what it holds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_the_page_holds_what_python_says(name, folder):
    """All layouts that the planner considers are there; of 100 of them all words are those of the formulas."""
    task, (_, data) = TASKS[name], page_of(name, folder)
    assert (data["considered"], len(data["lines"])) == (len(list(layouts(task))),) * 2
    regrets, seen = regrets_of(task), set()
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
    assert found.considered == len(list(layouts(task))) > 10 * len(found.lines) and 140 <= len(found.lines) <= 150
    assert found.best == next(iter(regrets_of(task)))
    assert f"{len(found.lines):,} of the {found.considered:,} layouts" in write.evidence(ENDS, found)
    degrees = {(each.dp, each.tp, each.pp, each.cp) for each in layouts(task)}
    assert all(
        set(found.stops[name]) == {each[side] for each in degrees} for side, name in enumerate(("dp", "tp", "pp", "cp"))
    )


def test_it_says_whose_measurements_it_stands_on(folder):
    text = re.sub("<[^>]*>", "", page_of("llama3-70b", folder)[0].split("<main>")[0])
    assert (
        "nanotron, the slow end: the habits of 1,532 runs of the playbook's authors, with 4 models on 1 to 64" in text
    )
    assert re.search(r"tuned, the fast end: faster than \d\d% of \d\d runs that others have published", text)
    assert re.search(r"103 runs of other systems are known. \d\d% of them are in the range", text)
    alone = write.evidence((PROFILES["fsdp"],), grid.Grid({}, [], 0, [], {}, {}, None))
    assert "that of one profile" in alone and "pipelines; tp across nodes" in alone and "in the range" not in alone


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


# ---- clicks ----------------------------------------------------------------------------------------------------------

CLICKS = """
const ids = ["verdict", "numbers", "memory", "time", "command", "said"];
const see = () => {
  const seen = Object.fromEntries(ids.map((id) => [id, find(id).textContent]));
  const styles = [...find("memory").querySelectorAll("span"), ...find("time").querySelectorAll("span")];
  const values = Object.fromEntries(CHOICES.map((name) => [name, find(`${name}-value`).textContent]));
  const widths = styles.map((each) => each.getAttribute("style")).filter((style) => style.includes("--size"));
  return { ...seen, values, widths, kind: find("verdict").className, address: location.hash };
};
const opened = see();
const seen = MOVES.map(([name, stop]) => {
  find(name).value = stop;
  find(name).dispatchEvent(new Event("input"));
  return see();
});
"""
IN_NODE = """
const [html, hash, clicks] = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(require(process.argv[1]).open_page(html, hash, clicks + "return [opened, ...seen];")));
"""
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --dump-dom"


def moves_of(data: dict) -> list[tuple[str, int]]:
    """Sliders and their stops, at random."""
    chance = random.Random(1)
    names = [name for name, some in data["stops"].items() if len(some) > 1]
    return [(name, chance.randrange(len(data["stops"][name]))) for name in chance.choices(names, k=SETTINGS)]


def in_node(text: str, hash: str, moves: list) -> list[dict]:
    given = json.dumps([text, hash, CLICKS.replace("MOVES", json.dumps(moves))])
    words = [NODE, "-e", IN_NODE, str(Path(__file__).with_name("dom.js"))]
    done = subprocess.run(words, input=given, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def in_browser(text: str, hash: str, moves: list, folder: Path) -> list[dict]:
    clicks = CLICKS.replace("MOVES", json.dumps(moves))
    clicks += 'document.body.replaceChildren(make("pre", {}, JSON.stringify([opened, ...seen])));'
    (folder / "clicked.html").write_text(text.replace("</body>", f"<script>{{ {clicks} }}</script></body>"))
    address = (folder / "clicked.html").as_uri() + hash
    words = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder}/chromium", address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(html.unescape(re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL).group(1)))


def check_clicks(task: Task, data: dict, moves: list, seen: list[dict]) -> None:
    """What is shown after each click is what Python says, of the nearest layout that has this stop."""
    regrets, stops = regrets_of(task), data["stops"]
    assert layout_of(task, seen[0]["values"]) == next(iter(regrets)), "it opens with the layout of least regret"
    everywhere = [tuple(ord(code) - data["first"] for code in line.split(" ")[0]) for line in data["lines"]]
    before, *others = [
        {name: list(map(str, stops[name])).index(each["values"][name]) for name in stops} for each in seen
    ]
    for (name, stop), now, each in zip(moves, others, seen[1:], strict=True):
        wanted = before | {name: stop}
        apart = [sum(abs(a - b) for a, b in zip(wanted.values(), line)) for line in everywhere]
        place = list(stops).index(name)
        least = min(distance for distance, line in zip(apart, everywhere) if line[place] == stop)
        first = next(line for distance, line in zip(apart, everywhere) if line[place] == stop and distance == least)
        assert tuple(now.values()) == first, (before, name, stop)
        said = [
            f"{grid.CHOICES[other]} is now {stops[other][now[other]]} instead of {stops[other][before[other]]}"
            for other in stops
            if other != name and now[other] != before[other]
        ]
        words = f"With {grid.CHOICES[name]} {stops[name][stop]}, {', '.join(said)}." if said else ""
        layout = layout_of(task, each["values"])
        right = expected(task, layout, regrets)
        texts = shown(task, layout, right)
        assert [each["kind"], each["verdict"]] == texts.pop("verdict")
        assert {key: each[key] for key in texts} == texts and each["said"] == words
        assert each["address"] == "#" + "&".join(f"{name}={value}" for name, value in each["values"].items())
        parts = [*right["stages"], *right["causes"]]
        sizes = [size for part in parts for key, size in part.items() if size != "0" and key not in ("stage", "all")]
        assert [re.match("--size: ([^;]*);", style)[1] for style in each["widths"]] == sizes
        before = now
    assert any(each["said"] for each in seen) and len({each["kind"] for each in seen}) > 1


@needs_node
@pytest.mark.parametrize("name", TASKS)
def test_clicks_without_a_browser(name, folder):
    text, data = page_of(name, folder)
    check_clicks(TASKS[name], data, moves_of(data), in_node(text, "", moves_of(data)))


@needs_node
def test_an_address_opens_its_layout_or_says_that_there_is_none(folder):
    text, data = page_of("llama3-70b", folder)
    (seen,) = in_node(text, "#tp=8&pp=4&recompute=full&zero=9&dp=2.7", [])
    assert [seen["values"][name] for name in ("tp", "pp", "recompute")] == ["8", "4", "full"] and not seen["said"]
    (seen,) = in_node(text, "#tp=8&pp=8&dp=2&cp=4", [])
    assert seen["said"] == "There is no layout as the address names it: this one is the nearest."


@opens_browser
@pytest.mark.parametrize("name", TASKS)
def test_clicks_in_a_browser(name, folder):
    text, data = page_of(name, folder)
    check_clicks(TASKS[name], data, moves_of(data), in_browser(text, "", moves_of(data), folder))


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_dots_of_runs():
    """A dot's area is its speed and its colour its MFU, both of the best; what a run says cannot be markup."""
    found = runs.tables(
        [
            runs.Dot("t", "dp 16", "tp 2", "", 100.0, 0.2, 0.25, 3e9),
            runs.Dot("t", "dp 2", "tp 2", "", 400.0, 0.1),
            runs.Dot("t", "dp 2", "tp 10", "", 1.0, 0.4),
            runs.Dot("t", "dp 16", "tp 10", "hang (</script> & late)"),
        ]
    )
    assert "t: 3 of 4 runs ended" in found and "<p>The best: dp 2, tp 10 · MFU 40.0% · 1 tokens/s per rank</p>" in found
    assert re.findall("<th>([^<]*)</th>", found) == ["", "tp 2", "tp 10", "dp 2", "dp 16"]
    assert re.findall('--size:(.*?);--heat:(.*?)"', found) == [("1.00", "0.25"), ("0.05", "1.00"), ("0.50", "0.50")]
    assert "dp 16, tp 2 · MFU 20.0% (predicted 25.0%) · 100 tokens/s per rank · 3.0 GB" in found
    assert "×<span>dp 16, tp 10: hang (&lt;/script&gt; &amp; late)" in found
    assert "The best" not in runs.tables([runs.Dot("t", "a", "b", "hang")])


def test_a_sweep_is_shown_before_the_published_runs(tmp_path, capsys):
    ok = {"status": "ok", "mfu": None, "peak_memory_bytes": None}
    records = [
        {"id": "a", "world": 2, "values": {"tp": 2, "micro_batch": 1}, "tokens_per_s": 4096.0} | ok,
        {"id": "b", "world": 4, "values": {"pp": 4, "micro_batch": 1}, "status": "hang", "line": "gone"},
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    words = "--model llama3-1b --gpus 1 --tokens-per-batch 16k --profile fsdp".split()
    main(["page", *words, "--out", str(tmp_path / "plan.html"), "--sweep", str(tmp_path / "runs.jsonl")])
    assert capsys.readouterr().out.startswith(f"  page: {tmp_path}/plan.html (0.")
    text = (tmp_path / "plan.html").read_text()
    tables = re.findall("<summary>(.*?)</summary>", text)[1:]
    assert tables[0] == f"your sweep {tmp_path.name}: 1 of 2 runs ended" and len(tables) == 14
    assert "ranks 2, tp 2, micro batch 1 · 2,048 tokens/s per rank" in text


def test_bad_input_is_one_line(tmp_path, capsys):
    for words, line in (
        ("--gpus 2.7", "argument --gpus: invalid count value: '2.7'"),
        ("--gpus 8 --tokens-per-batch 0", "argument --tokens-per-batch: invalid tokens value: '0'"),
        (f"--gpus 1 --tokens-per-batch 4096 --sweep {tmp_path}", f"--sweep {tmp_path}: no runs.jsonl with runs"),
        (
            f"--gpus 1 --tokens-per-batch 4096 --out {tmp_path}",
            f"cannot write {tmp_path}: [Errno 21] Is a directory: '{tmp_path}'",
        ),
    ):
        assert main(["page", "--model", "llama3-1b", "--out", f"{tmp_path}/plan.html", *words.split()]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith(line)
