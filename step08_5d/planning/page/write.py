"""The planner as one HTML file that works without a network: `python -m step08_5d.planning page`.

page.html is put together with its style, its code and its numbers. share.js, memory.js and plan.js repeat the
formulas of memory and speed; tests compare the two.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from common.costs.networks import BUS_GB_PER_S, NETWORK
from common.costs.vocabulary import KINDS, WIDTHS
from common.counts import count_parameters
from common.drawing.figures import COLOURS, DIMENSIONS
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import PRESETS
from step08_5d.kernels.linear_cross_entropy import FEW_BYTES, RATIO
from step08_5d.planning.command_line import Command
from step08_5d.planning.explain import NAMES
from step08_5d.planning.memory.rank_parameters import BUCKET
from step08_5d.planning.published.runs import Fit, predicted, read_runs
from step08_5d.planning.search import MOST_FULL
from step08_5d.planning.sweeps import sweep
from step08_5d.planning.sweeps.pictures import words
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.nanotron import RING_HOP
from step08_5d.planning.time.profiles import PROFILES
from step08_5d.planning.time.speed import AGAIN, CORE_AGAIN, UPDATE_BYTES

FOLDER = Path(__file__).parent
FORMULAS = ("share.js", "memory.js", "plan.js")
SHAPE = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn", "tie_embeddings", "max_positions", "experts", "top_k")
SHAPE += ("shared_experts", "dense_layers", "expert_ffn", "head_width")
RECOMPUTE = ("none", "selective", "full")


def shape(model: ModelConfig) -> dict:
    """What plan.js needs to know of a model."""
    return {name: getattr(model, name) for name in SHAPE} | {"count": asdict(count_parameters(model))}


def constants() -> dict:
    """All numbers of plan.js that are not formulas, by the names that they have in Python."""
    found = {"KINDS": KINDS, "WIDTHS": WIDTHS["bfloat16"], "BUS_GB_PER_S": BUS_GB_PER_S, "NETWORK": NETWORK}
    found |= {"RATIO": RATIO, "FEW_BYTES": FEW_BYTES, "BUCKET": BUCKET}
    found |= {"MOST_FULL": MOST_FULL, "UPDATE_BYTES": UPDATE_BYTES, "RING_HOP": RING_HOP}
    found |= {"RECOMPUTE": RECOMPUTE, "AGAIN": AGAIN, "CORE_AGAIN": CORE_AGAIN, "OURS": PROFILES["nanotron"]._asdict()}
    found["MODELS"] = {name: shape(model) for name, model in PRESETS.items()}
    found["MACHINES"] = {name: machine._asdict() | {"peak": machine.peak} for name, machine in MACHINES.items()}
    return found


def published_dots() -> list[dict]:
    """The playbook's runs, as dots of a grid: which grid, its row and column, and what was published."""
    result = []
    for run in read_runs():
        layout, failed = run.layout, run.mfu is None
        dot = {"grid": f"the playbook's {run.name} on {run.nodes} node{'s' * (run.nodes > 1)}"}
        dot["row"] = f"dp {layout.dp}, tp {layout.tp}, pp {layout.pp}"
        dot["column"] = f"ZeRO-{layout.zero}, micro-batch {layout.micro_batch}"
        dot |= {"status": "failed", "line": "published without numbers"} if failed else {"status": "ok"}
        if not failed:
            dot |= {"mfu": run.mfu, "speed": run.tokens_per_second, "memory": run.memory}
            dot["predicted"] = predicted(run, Fit())
        result.append(dot)
    return result


def sweep_dots(file: str) -> list[dict]:
    """The runs of a sweep, from its runs.jsonl. Raises UsageError if there are none."""
    folder = Path(file) if Path(file).is_dir() else Path(file).parent
    found = sweep.records(folder)
    if not found:
        raise UsageError(f"--sweep {file}: no runs.jsonl with runs")
    result = []
    for each in found:
        dot = {"grid": f"your sweep {folder.resolve().name}", "row": words(each, False), "column": words(each, True)}
        dot |= {"status": each["status"], "line": each.get("line", ""), "mfu": each.get("mfu")}
        if dot["status"] == "ok":
            dot |= {"speed": each["tokens_per_s"] / each["world"], "memory": each.get("peak_memory_bytes")}
        result.append(dot)
    return result


def write_page(path: str, file: str | None = None) -> Path:
    """Write the page. Returns its path. Raises UsageError if it cannot be written, or the sweep has no runs.

    Args:
        file: the runs.jsonl of a sweep, shown first.
    """
    colours = COLOURS | DIMENSIONS | {"working": COLOURS["temporaries"], "compute": COLOURS["forward"]}
    colours |= {"launch": COLOURS["recompute"], "bubble": COLOURS["other"], "update": COLOURS["optimizer"]}
    colours |= {"communication": COLOURS["all_gather"]}
    dots = [*(sweep_dots(file) if file else ()), *published_dots()]
    data = {"constants": constants(), "COLOURS": colours, "NAMES": NAMES, "DOTS": dots}
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", *FORMULAS, "looks.js", "view.js"):
        text = text.replace(f"/* {name} */", (FOLDER / name).read_text(encoding="utf-8"))
    text = text.replace("/* data */", json.dumps(data).replace("<", "\\u003c"))  # no text may end the script
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from None
    return Path(path)


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/planning/plan.html", help="the file to open in a browser")
    parser.add_argument("--sweep", help="the runs.jsonl of a sweep to show, such as runs/sweeps/laptop/runs.jsonl")


def show(options: Namespace) -> None:
    """The planner with sliders, as one file for a browser."""
    print(f"  page: {write_page(options.out, options.sweep)}")


COMMAND = Command(add_flags, show)
