"""What the planner's page should show: the words of a layout, from the formulas that `plan` uses."""

import json
import math
import re
from functools import cache
from pathlib import Path

from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning.explain import NAMES, Range, divided, most_of_the_rest
from step08_5d.planning.memory.backwards import fullest_ranks
from step08_5d.planning.memory.peak import memory, peak
from step08_5d.planning.page import write
from step08_5d.planning.search import Task, command, plans
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import ENDS
from step08_5d.planning.time.speed import mfu

H100 = MACHINES["H100"]
TASKS = {"llama3-70b": Task("llama3-70b", PRESETS["llama3-70b"], 64, 4096, 16, H100)}
TASKS |= {"mixtral-8x7b": Task("mixtral-8x7b", PRESETS["mixtral-8x7b"], 16, 2048, 8, H100)}
LINE = {"good": "Should fit", "tight": "Too tight, as CUDA and NCCL need some, too", "bad": "Does not fit"}
SETTINGS = 100  # of each task


@cache
def page_of(name: str, folder: Path) -> tuple[str, dict]:
    """The page of a task, and what it holds."""
    text = write.write_page(str(folder / f"{name}.html"), TASKS[name], ENDS).read_text(encoding="utf-8")
    return text, json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


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
        kinds = {kind: three(size / 1e9) for kind, size in peak(task.model, layout, rank).held.items()}
        stages.append(
            {"stage": str(rank), "all": three(sum(peak(task.model, layout, rank).held.values()) / 1e9)} | kinds
        )
    return {
        "held": three(held / 1e9),
        "fits": fits,
        "regret": f"{regrets[layout]:+.0%}" if layout in regrets else "-",
        "step": [three(each.step) for each in span.times.values()],
        "mfu": [f"{mfu(task.model, layout, each.step, task.machine):.1%}" for each in span.times.values()],
        "speed": [f"{tokens / each.step:,.0f}" for each in span.times.values()],
        "binds": [most_of_the_rest(each) for each in span.times.values()],
        "causes": [{name: three(size) for name, size in each._asdict().items()} for each in span.times.values()],
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
