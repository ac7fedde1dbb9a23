"""The planner's page under clicks: at 200 settings it shows what Python says, without a browser and in one."""

import html
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from step08_5d.planning.page import grid
from step08_5d.planning.search import Task
from tests.mechanisms.step08.planning.page_words import (
    SETTINGS,
    TASKS,
    expected,
    layout_of,
    page_of,
    regrets_of,
    shown,
)

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_node = pytest.mark.skipif(not NODE, reason="node, which runs the page's code, is not installed")
opens_browser = pytest.mark.skipif(not CHROMIUM or not os.environ.get("TEST_ALL"), reason="needs Chromium, TEST_ALL=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


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
@pytest.mark.parametrize("name", TASKS if os.environ.get("TEST_ALL") else ["mixtral-8x7b"])
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
