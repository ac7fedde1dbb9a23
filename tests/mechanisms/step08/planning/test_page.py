"""The planner's page: its formulas beside Python's on random settings, and clicks in a headless browser."""

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.errors import UsageError
from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning.__main__ import main
from step08_5d.planning.explain import NAMES
from step08_5d.planning.memory.backwards import fullest_ranks
from step08_5d.planning.memory.peak import memory, of_stage
from step08_5d.planning.page import write
from step08_5d.planning.search import Candidate, Task, command, flags
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.speed import mfu, times

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IN_NODE = """
const plan = require(process.argv[1]), { constants, cases } = JSON.parse(require("fs").readFileSync(0));
plan.use(constants);
const answers = cases.map(([name, gpu, values]) => {
  const model = constants.MODELS[name], machine = constants.MACHINES[gpu], layout = plan.layout_of(values);
  const refusal = plan.refusal(name, model, layout);
  if (refusal) return { refusal };
  const times = plan.times(model, layout, machine), seconds = plan.total(times);
  const mfu = plan.mfu(model, layout, seconds, machine), speed = plan.speed(layout, seconds);
  return { memory: plan.memory(model, layout), times, mfu, speed, command: plan.command(name, layout, machine) };
});
console.log(JSON.stringify(answers));
"""


def random_settings(number: int) -> list[tuple[str, str, Layout]]:
    """Of all models and machines; about a third of them step 8 accepts."""
    chance, degrees = random.Random(0), (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 8, 3, 16)
    values = {"seq": (1024, 2048, 4096, 8192, 6000), "dp": (1, 2, 8, 64, 512, 3), "zero": range(4)}
    values |= dict.fromkeys(("tp", "pp", "cp", "ep"), degrees) | {"recompute": write.RECOMPUTE}
    values |= {"micro_batch": (1, 2, 4, 5), "micro_batches": (1, 2, 8, 30), "dtype": ("bfloat16",)}
    layouts = [Layout(**{name: chance.choice(some) for name, some in values.items()}) for _ in range(number)]
    return [(chance.choice(list(PRESETS)), chance.choice(list(MACHINES)), layout) for layout in layouts]


def expected(name: str, gpu: str, layout: Layout) -> dict:
    """What Python says of a layout."""
    model, machine, sequences = PRESETS[name], MACHINES[gpu], layout.dp * layout.micro_batch * layout.micro_batches
    task = Task(name, model, layout.copies * layout.tp * layout.pp, layout.seq, sequences, machine)
    try:
        flags(task, layout)
    except UsageError as error:
        return {"refusal": str(error)}
    plan = Candidate(layout, memory(model, layout), times(model, layout, machine), 0)
    numbers = {"memory": plan.held, "times": plan.times._asdict(), "speed": plan.tokens_per_second}
    numbers["mfu"] = mfu(model, layout, plan.times.step, machine)
    return numbers | {"command": command(task, layout)}


needs_node = pytest.mark.skipif(not NODE, reason="node, which runs the page's code, is not installed")


@needs_node
def test_the_page_says_what_python_says(tmp_path):
    """Of more than 200 settings that step 8 accepts all numbers, of those that it refuses the same line."""
    cases = random_settings(700)
    as_json = [(name, gpu, layout._asdict()) for name, gpu, layout in cases]
    given = json.dumps({"constants": write.constants(), "cases": as_json})
    formulas = tmp_path / "formulas.js"  # as in the page, one after the other
    formulas.write_text("".join((write.FOLDER / name).read_text() for name in write.FORMULAS))
    words = [NODE, "-e", IN_NODE, formulas]
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=True)
    accepted = 0
    for case, found in zip(cases, json.loads(done.stdout), strict=True):
        right = expected(*case)
        assert found.keys() == right.keys(), case
        for key, value in right.items():
            wanted = value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-15)
            assert found[key] == wanted, (case, key)
        accepted += "refusal" not in found
    assert accepted >= 200 and len(cases) - accepted >= 100


def look(expression: str) -> object:
    """What an expression with the functions of looks.js gives."""
    code = f"const looks = require({str(write.FOLDER / 'looks.js')!r}); console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=True).stdout)


OF_LAYOUT = """[
  [70, 72, 72.1, 80, 80.1].map((size) => looks.verdict(size * 1e9, 80e9, 0.9)),
  looks.longest_of_the_rest({ compute: 9, bubble: 2, tp: 3, dp: 1 }),
  looks.pieces({ weights: 20, gradients: 0, activations: 30 }, 80),
  [looks.memory_scale([60], 100, 0.9), looks.memory_scale([60, 200], 100, 0.9)],
  [[4, 4], [5, 5, 5, 3]].map(looks.unevenness),
  [999, 1234, 8.03e9, 4e12].map(looks.short), [0.5, 1.5].map(looks.duration), looks.percent(0.4567),
]"""


@needs_node
def test_what_one_layout_looks_like():
    verdicts, longest, pieces, scales, uneven, short, durations, percent = look(OF_LAYOUT)
    assert [kind for kind, _ in verdicts] == ["good", "good", "tight", "tight", "bad"]
    assert verdicts[0][1] == "Should fit: 70.0 GB of 80.0 GB predicted on the fullest rank"
    assert longest == ["tp", 3] and pieces == [["weights", 20, 25], ["activations", 30, 37.5]]
    assert [each["whole"] for each in scales] == [102, 204]
    marks = [scale[name] for scale in scales for name in ("most", "all")]
    assert marks == pytest.approx([100 * 90 / 102, 100 * 100 / 102, 100 * 90 / 204, 100 * 100 / 204])
    assert uneven == ["", "Stages have 3 to 5 layers, the last one 3 and the head."]
    assert [*short, *durations, percent] == ["999", "1.23k", "8.03B", "4T", "500.0 ms", "1.50 s", "45.7 %"]


def dot(row: str, column: str, **values) -> dict:
    return {"grid": "g", "row": row, "column": column, "status": "ok"} | values


@needs_node
def test_what_many_runs_look_like():
    """A dot's area is its speed, its colour its MFU; both of the best in the picture, and each in its own cell."""
    dots = [
        dot("dp 16", "tp 2", speed=100.0, mfu=0.2, predicted=0.25, memory=3e9),
        dot("dp 2", "tp 2", speed=400.0, mfu=0.1),
        dot("dp 2", "tp 10", speed=1.0, mfu=0.4),
        dot("dp 16", "tp 10", status="hang", line="late"),
    ]
    found, legend = look(f"[looks.picture_of({json.dumps(dots)}), looks.legend_of({json.dumps(dots)})]")
    assert (found["rows"], found["columns"]) == (["dp 2", "dp 16"], ["tp 2", "tp 10"])
    first, second, least, cross = found["marks"]
    assert (first["r"] / second["r"]) ** 2 == pytest.approx(100 / 400) and second["r"] == 15 and least["r"] == 2
    left, top, cell = found["left"], found["top"], 34
    places = [((mark["x"] - left) / cell, (mark["y"] - top) / cell) for mark in found["marks"]]
    assert places == [(0.5, 1.5), (0.5, 0.5), (1.5, 0.5), (1.5, 1.5)] and 2 * 15 < cell
    assert found["width"] >= left + 2 * cell and found["height"] >= top + 2 * cell
    viridis = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"]
    mixed = "color-mix(in srgb, {} {:g}%, {})".format
    assert first["fill"] == mixed(viridis[3], 0, viridis[2]) and second["fill"] == mixed(viridis[2], 0, viridis[1])
    assert least["fill"].startswith("color-mix(in srgb, #fde725 99.") and "fill" not in cross
    assert legend["ends"].startswith("3 of 4 runs ended; a cross failed.") and legend["unit"] == "MFU up to 40.0 %"
    assert legend["detail"] == "The best: dp 2, tp 10 · MFU 40.0 % · 1 tokens/s per rank"
    described = look(f"{json.dumps(dots)}.map(looks.described)")
    assert described[0] == "dp 16, tp 2 · MFU 20.0 % (predicted 25.0 %) · 100 tokens/s per rank · 3.0 GB"
    assert described[3] == "dp 16, tp 10: hang (late)"
    slow = [dot("a", "b", speed=2500.0), dot("a", "c", speed=5000.0)]  # on a CPU: no MFU
    found, legend = look(f"[looks.picture_of({json.dumps(slow)}), looks.legend_of({json.dumps(slow)})]")
    assert legend["unit"] == "up to 5k tokens/s per rank" and found["marks"][0]["fill"] == first["fill"]
    assert look(f"looks.legend_of([{json.dumps(dots[3])}])")["unit"] == ""


@needs_node
def test_all_code_of_the_page_is_one_program(tmp_path):
    """Its files share their names in a browser: none may be declared twice."""
    write.write_page(str(tmp_path / "plan.html"))
    text = (tmp_path / "plan.html").read_text()
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == len(write.FORMULAS) + 2 and "/* " not in text
    (tmp_path / "page.js").write_text("\n".join(scripts))
    subprocess.run([NODE, "--check", tmp_path / "page.js"], check=True)


CLICKS = """<script>
  const set = (id, value) => {
    find(id).value = value;
    find(id).dispatchEvent(new Event("input", { bubbles: true }));
  };
  set("model", "llama3-70b");
  set("tp", 8);
  const seen = ["verdict", "command"].map((id) => find(id).textContent);
  set("tp", 3);
  seen.push(find("verdict").textContent);
  find("show-runs").click();
  document.querySelector("#dots .cross").dispatchEvent(new Event("click"));
  seen.push(find("detail").textContent, String(find("layout").hidden));
  document.body.replaceChildren(make("pre", {}, seen.join("\\n")));
</script></body>"""
IN_DOM = """
const { body, find, location, open_page } = require(process.argv[1]);
open_page(require("fs").readFileSync(0, "utf8"));
const set = (id, value) => {
  find(id).value = value;
  find(id).dispatch("input");
};
const seen = { opened: ["layout", "runs"].map((id) => find(id).hidden), address: location.hash };
set("model", "llama3-70b");
set("tp", 8);
seen.numbers = find("numbers").textContent;
seen.command = find("command").textContent;
seen.verdict = [find("verdict").attributes.class, find("verdict").textContent];
seen.bars = ["memory", "time"].map((id) => {
  const bar = find(id).all().find((each) => each.words().includes("bar"));
  return bar.all().map((each) => [each.name, each.attributes.title, parseFloat(each.attributes.style.split(": ")[1])]);
});
const slider = find("pp").parent.children.find((each) => each.attributes?.type === "range");
slider.value = "1";
slider.dispatch("input");
seen.stages = [find("pp").value, location.hash, find("memory").all().filter((each) => each.name === "td")];
seen.stages[2] = seen.stages[2].map((each) => each.textContent);
set("pp", 1);
set("cp", 2);
seen.longer = find("numbers").textContent;
set("cp", 1);
set("model", "mixtral-8x7b");
seen.experts = find("numbers").textContent;
set("model", "llama3-70b");
set("tp", 3);
seen.refused = [find("verdict").attributes.class, find("verdict").textContent, find("costs").hidden];
find("show-runs").dispatch("click");
const marks = find("dots").all().filter((each) => each.words().includes("dot"));
seen.marks = marks.map((each) => [each.name, each.attributes.r, each.textContent]);
seen.best = find("detail").textContent;
seen.legend = find("legend").textContent;
for (const each of marks) each.dispatch("focus"); // as with the keyboard
seen.chosen = [find("detail").textContent, body.all().filter((each) => each.words().includes("chosen")).length];
seen.shown = ["layout", "runs"].map((id) => find(id).hidden);
console.log(JSON.stringify(seen));
"""


def page_with_runs(tmp_path) -> str:
    """The page with a sweep of a fast run, one at a quarter of its speed, and one that hung."""
    ok = {"status": "ok", "mfu": None, "peak_memory_bytes": None}
    records = [
        {"id": "a", "world": 2, "values": {"tp": 2, "micro_batch": 1}, "tokens_per_s": 4096.0} | ok,
        {"id": "b", "world": 4, "values": {"pp": 4, "micro_batch": 1}, "status": "hang", "line": "</script> & gone"},
        {"id": "c", "world": 2, "values": {"tp": 2, "micro_batch": 2}, "tokens_per_s": 1024.0} | ok,
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    main(["page", "--out", str(tmp_path / "plan.html"), "--sweep", str(tmp_path / "runs.jsonl")])
    return (tmp_path / "plan.html").read_text()


CLICKED = expected("llama3-70b", "H100", Layout(4096, 32, tp=8, zero=1, micro_batches=8, dtype="bfloat16"))
FULLEST = sum(CLICKED["memory"].values())
TIGHT = f"Too tight: {FULLEST / 1e9:.1f} GB of 80.0 GB predicted on the fullest rank; CUDA and NCCL need some, too"
REFUSED = "Step 8 refuses it: --tp 3 does not divide --heads 64"


@needs_node
def test_clicks_without_a_browser(tmp_path):
    words = [NODE, "-e", IN_DOM, Path(__file__).with_name("dom.js")]
    done = subprocess.run(words, input=page_with_runs(tmp_path), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    seen = json.loads(done.stdout)
    assert seen["opened"] == [False, True] and seen["shown"] == [True, False]
    assert seen["address"].startswith("#model=llama3-8b&gpu=H100&dp=32&tp=2&pp=1")
    step, speed = sum(CLICKED["times"].values()), CLICKED["speed"]
    assert f"time of a step{step:.2f} s" in seen["numbers"] and f"tokens/s/GPU{speed:,.0f}" in seen["numbers"]
    assert "GPUs256" in seen["numbers"] and f"MFU{100 * CLICKED['mfu']:.1f} %" in seen["numbers"]
    name, longest = max(list(CLICKED["times"].items())[1:], key=lambda each: each[1])
    assert seen["numbers"].endswith(f"most of the rest of the step{NAMES[name]} ({100 * longest / step:.1f} %)")
    assert seen["numbers"].startswith("parameters70.6B"), "published: 70.6B"
    assert seen["experts"].startswith("parameters46.7B"), "published: 46.7B, of which a token uses 12.9B"
    assert "GPUs512" in seen["longer"], "cp takes more GPUs, and no more tokens: 32 x 8 x 4,096"
    assert "tokens per batch1.05M" in seen["numbers"] and "tokens per batch1.05M" in seen["longer"]
    assert seen["command"] == CLICKED["command"] and seen["verdict"] == ["tight", TIGHT]
    memory, time = seen["bars"]
    whole = 1.02 * max(80e9, FULLEST)
    widths = {title.split(":")[0]: width for name, title, width in memory if name == "span"}
    assert widths == pytest.approx({kind: 100 * size / whole for kind, size in CLICKED["memory"].items() if size})
    assert [width for name, _, width in memory if name == "i"] == pytest.approx([7.2e12 / whole, 8e12 / whole])
    assert sum(width for *_, width in time) == pytest.approx(100)
    pp, address, cells = seen["stages"]
    assert int(pp) == 2 and "&pp=2&" in address, "a slider has powers of two"
    model, layout = PRESETS["llama3-70b"], Layout(4096, 32, pp=2, tp=8, zero=1, micro_batches=8, dtype="bfloat16")
    held = [of_stage(model, layout, stage) for stage in fullest_ranks(model, layout)]
    rows = [[kind, *(f"{each[kind] / 1e9:.1f} GB" for each in held)] for kind in held[0]]
    rows.append(["all", *(f"{sum(each.values()) / 1e9:.1f} GB" for each in held)])
    assert cells == [cell for row in rows for cell in row] and len(held) == 2
    assert seen["refused"] == ["bad", REFUSED, True]
    (circle, large, fast), (cross, _, gone), (_, small, slow) = seen["marks"]
    assert (circle, cross) == ("circle", "path") and gone == "ranks 4, pp 4, micro batch 1: hang (</script> & gone)"
    assert (float(large) / float(small)) ** 2 == pytest.approx(4)
    assert fast.endswith("2,048 tokens/s per rank") and slow.endswith("512 tokens/s per rank")
    assert seen["best"] == f"The best: {fast}" and "2 of 3 runs ended" in seen["legend"]
    assert seen["chosen"] == [slow, 1]


FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --dump-dom"


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium, which would show the page")
def test_clicks_in_a_browser(tmp_path):
    text = page_with_runs(tmp_path)
    assert not re.findall(r"(?:src|href)=|https?://(?!www.w3.org/2000/svg)", text), "needs nothing else"
    (tmp_path / "plan.html").write_text(text.replace("</body>", CLICKS))
    words = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}/chromium", (tmp_path / "plan.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    lines = html.unescape(re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL).group(1)).splitlines()
    assert lines == [
        *(TIGHT, CLICKED["command"], REFUSED),
        "ranks 4, pp 4, micro batch 1: hang (</script> & gone)",
        "true",
    ]


def test_bad_input_is_one_line(tmp_path, capsys):
    for words, line in (
        (["--sweep", f"{tmp_path}/runs.jsonl"], f"--sweep {tmp_path}/runs.jsonl: no runs.jsonl with runs"),
        (["--out", f"{tmp_path}"], f"cannot write {tmp_path}: [Errno 21] Is a directory: '{tmp_path}'"),
    ):
        assert main(["page", "--out", f"{tmp_path}/plan.html", *words]) == 2
        assert capsys.readouterr().err == f"error: {line}\n"
