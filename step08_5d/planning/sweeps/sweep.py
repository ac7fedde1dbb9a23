"""A sweep: real runs of many layouts, one after the other, and what became of each.

A file says which (laptop.toml is an example). Every run is a command of its own, so that it may crash, hang or take all
memory without ending the sweep: it is recorded as such. Records are lines of runs.jsonl, written at once, so a sweep
that was interrupted goes on where it stopped.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common.config import spelled
from common.errors import UsageError
from common.launching.command_line import parse
from common.launching.process_tree import kill, new_mark
from step08_5d import config as step08
from step08_5d.planning.time.machines import nodes_for

STATES = ("ok", "refused", "out of memory", "diverged", "crash", "hang")
OF_NODES = ("nodes", "bandwidth", "latency")  # what a table may ask of `python -m common.nodes`; all else are flags
NO_MEMORY = r"out of memory|OutOfMemoryError|MemoryError|DefaultCPUAllocator|GB are free|into the memory of|Signal 9 "
DIVERGED = r"(loss|grad_norm) is (nan|-?inf)"  # as `Run.check_finite` says it
ERROR = re.compile(r"^(?:\[.*?\]:)?(?:error: |rank \d+: |\w*Error: )(.*)", re.MULTILINE)


class Sweep(NamedTuple):
    """What a file asks for."""

    name: str
    flags: str  # of step 8, of all runs
    world: list[int]  # numbers of ranks, where a table has none of its own
    grid: list[dict[str, list]]  # tables of flags (world, OF_NODES) with lists of values; runs: each table's products
    timeout: float = 300.0  # seconds that a run may take
    launcher: str = "torchrun"  # or slurm, with `gpus` ranks on each node at most
    gpus: int = 8

    @property
    def folder(self) -> Path:
        return Path("runs", "sweeps", self.name)


class SweepRun(NamedTuple):
    """One run."""

    id: str
    world: int
    values: dict[str, object]  # of the grid
    flags: list[str]

    @property
    def nodes(self) -> dict[str, object]:
        """The virtual nodes that its ranks are spread over, in flags of `common.nodes`, or nothing."""
        return {name: value for name, value in self.values.items() if name in OF_NODES}


def read(path: str) -> Sweep:
    """Return the sweep that a TOML file describes. Raises UsageError, with the key, for what is missing or wrong."""
    try:
        import tomllib
    except ImportError:
        raise UsageError("sweep reads TOML, which Python can do from 3.11 on") from None
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    unknown = content.keys() - set(Sweep._fields)
    missing = {"name", "flags", "world", "grid"} - content.keys()
    if unknown or missing:
        what = f"has no key {min(missing)}" if missing else f"has an unknown key {min(unknown)}"
        raise UsageError(f"{path} {what}; the keys are {', '.join(Sweep._fields)}")
    sweep = Sweep(**content)
    if wrong := _what_is_wrong(sweep):
        raise UsageError(f"{path}: {wrong}")
    return sweep


def _what_is_wrong(sweep: Sweep) -> str:
    """A line about a key whose value nothing can be done with, or nothing."""
    name, grid = sweep.name, sweep.grid
    rules = {
        "name must be that of a folder": isinstance(name, str) and Path(name).name == name not in ("", ".."),
        "flags must be a text": isinstance(sweep.flags, str),
        "world must be a list of numbers, each at least 1": _are_counts(sweep.world),
        "grid must be tables, [[grid]]": isinstance(grid, list) and all(isinstance(each, dict) for each in grid),
        "timeout must be above 0": isinstance(sweep.timeout, int | float) and sweep.timeout > 0,
        "launcher must be torchrun or slurm": sweep.launcher in ("torchrun", "slurm"),
        "gpus must be at least 1": _are_counts([sweep.gpus]),
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        return broken[0]
    try:
        shlex.split(sweep.flags)
    except ValueError as error:  # a quotation mark too many, say
        return f"flags: {error}"
    for table in grid:
        if not all(isinstance(values, list) for values in table.values()):
            return "every value in a [[grid]] table must be a list"
        if not _are_counts(table.get("world", [1]) + table.get("nodes", [1])):
            return "world and nodes in a [[grid]] table must be numbers, each at least 1"
        if "nodes" not in table and table.keys() & set(OF_NODES):
            return "bandwidth and latency are those between nodes = [2]"
    return ""


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(each) is int and each > 0 for each in values)


def cases(sweep: Sweep) -> Iterator[SweepRun]:
    """All runs, each once."""
    seen = set()
    for table in sweep.grid:
        table = {"world": sweep.world} | table
        for world, *values in itertools.product(*table.values()):
            chosen = dict(zip(list(table)[1:], values))
            run = "_".join([f"ranks-{world}", *(f"{name}-{value}" for name, value in chosen.items())])
            if run not in seen:
                seen.add(run)
                yield SweepRun(run, world, chosen, [*shlex.split(sweep.flags), *_words(chosen)])


def _words(values: dict[str, object]) -> Iterator[str]:
    """Flags of the command line, from names and values."""
    for name, value in values.items():
        if name not in OF_NODES and value is not False:
            yield from [spelled(name)] if value is True else [spelled(name), str(value)]


def refusal(case: SweepRun) -> str:
    """The line with which step 8 would refuse these flags, or nothing."""
    if case.world % case.nodes.get("nodes", 1):
        return f"{case.nodes['nodes']} nodes do not divide {case.world} ranks"
    try:
        config = parse(8, case.flags)
        config.resolve_and_check(case.world)
        step08.check(config)
    except UsageError as error:
        return str(error)
    return ""


def command(sweep: Sweep, case: SweepRun, run_dir: Path) -> list[str]:
    """What starts a run."""
    flags = [*case.flags, "--run-dir", str(run_dir)]
    if sweep.launcher == "slurm":
        nodes = nodes_for(case.world, sweep.gpus)
        places = ["--nodes", str(nodes), "--gpus-per-node", str(case.world // nodes)]
        return ["sbatch", "--wait", *places, "--output", str(run_dir / "output.txt"), "step08_5d/train.slurm", *flags]
    if case.nodes:
        options = [word for name, value in case.nodes.items() for word in (f"--{name}", str(value))]
        ranks = ["--ranks", str(case.world // case.nodes["nodes"])]
        return [sys.executable, "-m", "common.nodes", *options, *ranks, "--", "step08_5d/train.py", *flags]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(case.world)]
    return [*launcher, "-m", "step08_5d.train", *flags]


def run(sweep: Sweep, case: SweepRun) -> dict:
    """Run a case to its end, or to the timeout. Returns its record."""
    record = case._asdict()
    if line := refusal(case):
        return record | {"status": "refused", "line": line}
    run_dir = sweep.folder / case.id
    run_dir.mkdir(parents=True, exist_ok=True)
    for old in ("metrics.jsonl", "output.txt"):
        (run_dir / old).unlink(missing_ok=True)
    start, status, mark = time.perf_counter(), None, new_mark()
    with (run_dir / "output.txt").open("a", encoding="utf-8") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command(sweep, case, run_dir), env=os.environ | dict([mark]), **options)
        try:
            process.wait(sweep.timeout)
        except subprocess.TimeoutExpired:
            status = "hang"
        finally:  # also after Ctrl-C, or a launcher that died: nothing of a run stays behind
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(1)
            kill(process, mark)
            process.wait()
    record["seconds"] = round(time.perf_counter() - start, 1)
    printed = (run_dir / "output.txt").read_text(encoding="utf-8", errors="replace")
    if status is None and process.returncode == 0:
        return record | {"status": "ok"} | numbers(run_dir)
    lines = ERROR.findall(printed) or printed.strip().splitlines()[-1:] or [""]
    known = {"out of memory": NO_MEMORY, "diverged": DIVERGED}
    status = status or next((state for state, words in known.items() if re.search(words, printed)), "crash")
    return record | {"status": status, "line": lines[0].strip()[:300]}


def numbers(run_dir: Path) -> dict[str, float]:
    """What a run's record says of its steps: medians, without the first two, which warm up.

    Of the loss, the last one, and `rise`: the most by which it was ever above its lowest value until then. A spike is
    a rise that the last loss does not show.
    """
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    result = {}
    if losses := [step["loss"] for step in steps if isinstance(step.get("loss"), int | float)]:
        rises = [loss - lowest for loss, lowest in zip(losses, itertools.accumulate(losses, min))]
        result = {"loss": losses[-1], "rise": max(rises)}
    steps = steps[2:] or steps
    for name in ("step_time_s", "tokens_per_s", "mfu", "peak_memory_bytes"):
        values = [step[name] for step in steps if isinstance(step.get(name), int | float)]
        if values:
            result[name] = statistics.median(values)
    return result


def records(folder: Path) -> list[dict]:
    """What has been recorded, the newest record of each run."""
    return [each[-1] for each in history(folder).values()]


def fastest(folder: Path) -> list[dict]:
    """Of each run that has ended, the record with the shortest step: other programs can only slow a run down."""
    ended = [[each for each in records if each["status"] == "ok"] for records in history(folder).values()]
    return [min(each, key=lambda record: record["step_time_s"]) for each in ended if each]


def history(folder: Path) -> dict[str, list[dict]]:
    """All records of each run with its newest flags, the newest last: --again repeats runs."""
    file = folder / "runs.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = {}
    for line in lines:
        try:
            each = json.loads(line)
            name, flags = each["id"], each.get("flags")
        except (ValueError, TypeError, KeyError):  # an interrupted write, or not a sweep's file
            continue
        earlier = found.setdefault(name, [])
        if earlier and earlier[0].get("flags") != flags:  # the TOML file's flags have changed: another run
            earlier.clear()
        earlier.append(each)
    return found


def carry_out(sweep: Sweep, again: list[str]) -> list[dict]:
    """Run all cases that have no record, or one with a status in `again`. Returns all records of the sweep."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    wanted = list(cases(sweep))
    done = {each["id"]: each.get("flags") for each in records(sweep.folder) if each["status"] not in again}
    left = [case for case in wanted if done.get(case.id) != case.flags]
    if left and sweep.launcher == "slurm" and not shutil.which("sbatch"):
        raise UsageError("launcher slurm needs the command sbatch, which is not installed here")
    terminal = sys.stderr.isatty()
    for case in tqdm(left, unit="run", desc=sweep.name, disable=not terminal):
        record = run(sweep, case)
        with (sweep.folder / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if not terminal:
            speed = f"{record['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in record else record.get("line", "")
            print(f"{case.id}: {record['status']}  {speed}", flush=True)
    ids = {case.id for case in wanted}
    return [each for each in records(sweep.folder) if each["id"] in ids]
