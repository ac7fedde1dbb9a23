"""The planner as one HTML file that works without a network.

    python -m step08_5d.planning page --model llama3-8b --gpus 64 --tokens-per-batch 1M

Python computes all layouts of the task and writes what the page shows (grid.py, runs.py); page.js looks it up.
"""

import html
import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from common.config import spelled
from common.drawing.figures import COLOURS, DIMENSIONS
from common.errors import UsageError
from step08_5d.planning.command_line import Command, add_cluster, add_model, ends_of
from step08_5d.planning.explain import NAMES, outer
from step08_5d.planning.page.grid import CHOICES, FIRST, OF_END, OF_LAYOUT, OF_STAGE, Grid, digits, make_grid
from step08_5d.planning.page.runs import tables
from step08_5d.planning.plan import task_of
from step08_5d.planning.published import others
from step08_5d.planning.published.evidence import unknown
from step08_5d.planning.published.runs import read_runs
from step08_5d.planning.search import MOST_FULL, Task, command
from step08_5d.planning.time.profiles import ENDS, PROFILES, TUNED, Profile

FOLDER = Path(__file__).parent
SHOWN = 1.25  # how much of a GPU's memory a bar has room for


def flags_of() -> dict[str, tuple[str, object]]:
    """The flag of each choice in the order of `search.flags`, and with which value it is left out."""
    left_out = {"micro_batch": None} | dict.fromkeys(CHOICES, 1)
    left_out |= {"micro_batch": None, "zero": 0, "recompute": "none"}
    return {name: (spelled(name), value) for name, value in left_out.items()}


def data_of(task: Task, ends: tuple[Profile, ...], grid: Grid) -> dict:
    """All that page.js knows."""
    colours = COLOURS | DIMENSIONS | {"working": COLOURS["temporaries"], "compute": COLOURS["forward"]}
    colours |= {"launch": COLOURS["recompute"], "bubble": COLOURS["other"], "update": COLOURS["optimizer"]}
    colours |= {"communication": COLOURS["all_gather"]}
    memory = task.machine.memory / 1e9
    return {
        **{name: value for name, value in grid._asdict().items() if name != "best"},
        "title": f"{task.name} on {task.gpus:,} {task.machine.name}, {task.sequences} x {task.seq:,} tokens a step",
        "ends": [each.name for each in ends],
        "command": command(task, grid.best).split(" --micro-batch ")[0],
        "flags": flags_of(),
        "choices": CHOICES,
        "first": FIRST,
        "of_layout": OF_LAYOUT,
        "of_end": OF_END,
        "of_stage": OF_STAGE,
        "names": NAMES,
        "colours": colours,
        "memory": {
            name: digits(share * memory) for name, share in (("may be filled", MOST_FULL), ("all", 1), ("bar", SHOWN))
        },
    }


# ---- what it stands on -----------------------------------------------------------------------------------------------


def evidence(ends: tuple[Profile, ...], grid: Grid) -> str:
    """Whose measurements the page stands on, as HTML."""
    theirs, lines = others.read_runs(), []
    for place, profile in zip((", mostly the slow end", ", mostly the fast end") if len(ends) > 1 else ("",), ends):
        nothing = f" They say nothing of: {unknown(profile.name)}." if profile.name in PROFILES else ""
        lines.append(f"<li><b>{profile.name}</b>{place}: {stands_on(profile, theirs)}.{nothing}</li>")
    what = "a range" if len(ends) > 1 else "that of one profile"
    covers = (
        f". {1 - len(others.outside(theirs)) / len(theirs):.0%} of them are in the range of all profiles"
        if ends == ENDS
        else ""
    )
    sources = ", ".join(f"{number} of {source}" for source, number in Counter(run.source for run in theirs).items())
    some = f"All {grid.considered:,} layouts that the planner considers are here."
    if len(grid.lines) < grid.considered:
        some = f"{len(grid.lines):,} of the {grid.considered:,} layouts that the planner considers are here: "
        some += "of each set of degrees those of least regret."
    return f"""<p>Nothing here has been run: all is predicted. Every time and MFU is {what}:</p>
<ul>{"".join(lines)}</ul>
<p>Memory is calculated, and nothing of it fitted: dry runs confirm it. {some}</p>
<details><summary>{len(theirs)} runs of other systems are known{covers}</summary>{html.escape(sources)}</details>"""


def stands_on(profile: Profile, theirs: list[others.OtherRun]) -> str:
    """The runs behind a profile."""
    if profile == PROFILES["nanotron"]:
        runs = read_runs()
        nodes, models = sorted({run.nodes for run in runs}), len({run.name for run in runs})
        where = f"{nodes[0]} to {nodes[-1]} nodes of eight H100"
        return f"the habits of {len(runs):,} runs of the playbook's authors, with {models} models on {where}"
    names = (profile.name,) if profile.name in PROFILES else ("fsdp", "megatron")
    some = [run for run in theirs if run.profile in names]
    if profile == TUNED:
        slower = sum(run.ratio(TUNED) >= 1 for run in some) / len(some)
        return f"faster than {slower:.0%} of {len(some)} runs that others have published with FSDP or Megatron"
    if profile.name in PROFILES:
        return f"the habits of {len(some)} runs that {len({run.source for run in some})} sources have published"
    return "three shares that you gave"


# ---- the page --------------------------------------------------------------------------------------------------------


def write_page(path: str, task: Task, ends: tuple[Profile, ...]) -> Path:
    """Write the page. Returns its path. Raises UsageError if it cannot be written, or if nothing fits."""
    grid = make_grid(task, ends)
    parts = {"data": json.dumps(data_of(task, ends, grid)).replace("<", "\\u003c")}  # no text may end the script
    parts |= {"evidence": evidence(ends, grid), "runs": tables()}
    parts |= {name: (FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "page.js")}
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"/* {name} */", part)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from None
    return Path(path)


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--out", default="runs/planning/plan.html", help="the file to open in a browser")


def show(options: Namespace) -> None:
    """All layouts of a task, with sliders, as one file for a browser."""
    path = write_page(options.out, task_of(options), outer(ends_of(options)))
    print(f"  page: {path} ({path.stat().st_size / 1e6:.1f} MB)")


COMMAND = Command(add_flags, show, takes_more=True)
