"""The planner's page: its formulas beside Python's on random settings, and clicks in a headless browser."""

import html
import json
import random
import re
import shutil
import subprocess

import pytest

from common.errors import UsageError
from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning.__main__ import main
from step08_5d.planning.machines import MACHINES
from step08_5d.planning.memory import memory
from step08_5d.planning.page import write
from step08_5d.planning.search import Plan, Task, command, flags
from step08_5d.planning.speed import mfu, times

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
    plan = Plan(layout, memory(model, layout), times(model, layout, machine), 0)
    numbers = {"memory": plan.held, "times": plan.times._asdict(), "speed": plan.tokens_per_second}
    numbers["mfu"] = mfu(model, layout, plan.times.step, machine)
    return numbers | {"command": command(task, layout)}


@pytest.mark.skipif(not NODE, reason="node, which runs the page's formulas, is not installed")
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
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --dump-dom"


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium, which would show the page")
def test_clicks_in_a_browser(tmp_path):
    ok = {"status": "ok", "step_time_s": 0.5, "tokens_per_s": 4096.0, "mfu": None, "peak_memory_bytes": None}
    records = [
        {"id": "a", "world": 2, "values": {"tp": 2, "micro_batch": 1}} | ok,
        {"id": "b", "world": 4, "values": {"pp": 4, "micro_batch": 1}, "status": "hang", "line": "</script> & gone"},
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    main(["page", "--out", str(tmp_path / "plan.html"), "--sweep", str(tmp_path / "runs.jsonl")])
    text = (tmp_path / "plan.html").read_text()
    assert not re.findall(r"(?:src|href)=|https?://(?!www.w3.org/2000/svg)", text), "needs nothing else"
    (tmp_path / "plan.html").write_text(text.replace("</body>", CLICKS))
    words = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}/chromium", (tmp_path / "plan.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    lines = html.unescape(re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL).group(1)).splitlines()
    right = expected("llama3-70b", "H100", Layout(4096, 32, tp=8, zero=1, micro_batches=8, dtype="bfloat16"))
    size = sum(right["memory"].values()) / 1e9
    assert lines == [
        f"Too tight: {size:.1f} GB of 80.0 GB predicted on the fullest rank; CUDA and NCCL need some, too",
        right["command"],
        "Step 8 refuses it: --tp 3 does not divide --heads 64",
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
