"""Find a layout: what fits, what it costs, what to run. Everything that is printed is predicted.

python -m step08_5d.planning plan --model llama3-8b --gpus 64 --seq-len 4096 --tokens-per-batch 1M
python -m step08_5d.planning memory --model llama3-70b --dp 4 --tp 8 --pp 2 --zero 1 --recompute full
python -m step08_5d.planning memory --model llama3-8b --tp 8 --form gpt
python -m step08_5d.planning compare --model llama3-8b "--dp 8 --zero 3" "--dp 4 --tp 2 --zero 1"
python -m step08_5d.planning bars
python -m step08_5d.planning recipe --model llama3-70b --gpus 1024 --tokens-per-batch 4M
python -m step08_5d.planning overlap --model llama3-8b --dp 8 --tp 8 --pp 4 --peak 989 --bandwidth 450
python -m step08_5d.planning cheatsheet --model llama3-8b --dp 4 --tp 8 --zero 1
python -m step08_5d.planning dry-run --world 16384 --rank 77 --model llama3-405b --tp 8 --pp 16 --dtype bfloat16
python -m step08_5d.planning sweep step08_5d/planning/laptop.toml
python -m step08_5d.planning calibrate step08_5d/planning/laptop.toml
python -m step08_5d.planning published
python -m step08_5d.planning page
"""

import argparse
import math
import sys

import common.entry  # noqa: F401
from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.presets import resolve
from step08_5d.planning import compare, recipe
from step08_5d.planning.explain import print_plans
from step08_5d.planning.memory import report as memory_report
from step08_5d.planning.page import write
from step08_5d.planning.published import bars, cheatsheet
from step08_5d.planning.published import report as published_report
from step08_5d.planning.search import Task, plans
from step08_5d.planning.sweeps.sweep import STATES
from step08_5d.planning.time import overlap
from step08_5d.planning.time.machines import MACHINES


def tokens(text: str) -> int:
    """A number of tokens, such as 4096, 512k or 4M (of 1,024 each). Raises ValueError for anything else."""
    unit = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1)
    number = float(text.rstrip("kKmM")) * unit
    if number < 1 or number % 1:  # also of infinity
        raise ValueError(text)
    return int(number)


def count(text: str) -> int:
    """A number of GPUs, ranks or the like, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def speed(text: str) -> float:
    """GB/s or TFLOP/s, for argparse."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{number:g} must be above 0")
    return number


def plan(options) -> None:
    """The fastest layouts for the options of the command line. Raises UsageError for what cannot be planned."""
    model = resolve(options.model)
    if options.seq_len > model.max_positions:
        raise UsageError(f"--seq-len {options.seq_len} exceeds the {model.max_positions} positions of {options.model}")
    sequences, machine = options.tokens_per_batch // options.seq_len, MACHINES[options.gpu]
    if options.gpus % -(-options.gpus // machine.gpus):
        raise UsageError(f"--gpus {options.gpus} must be as many on every node of {machine.gpus}")
    if options.within:
        machine = machine._replace(near=1e9 * options.within)
    if options.between:
        machine = machine._replace(far=1e9 * options.between)
    task = Task(options.model, model, options.gpus, options.seq_len, sequences, machine, options.interleaved)
    print_plans(task, *plans(task), options.shown)


def play(options) -> None:
    """One step of one rank, on fake tensors: what is left of the command line are flags of step 8."""
    from step08_5d.planning.dry_run import play as dry_run  # here, as it imports all that trains

    found = dry_run.dry_run(dry_run.configuration(options.rest, options.world), options.rank, progress=True)
    dry_run.show(found, options.rank)


def sweep(options) -> None:
    """Run what a file asks for, then show the table and the heat map."""
    from step08_5d.planning.sweeps import pictures
    from step08_5d.planning.sweeps import sweep as sweeps

    asked = sweeps.read(options.file)
    records = sweeps.carry_out(asked, options.again)
    pictures.print_records(asked.name, records)
    if any(each["status"] == "ok" for each in records):
        print(f"  figure: {pictures.draw_heat(records, asked.folder / 'heat.png')}")


def calibrate(options) -> None:
    """Fit rates to a sweep's runs, and show how well they predict others."""
    from step08_5d.planning.sweeps import calibration_report  # here, as dry runs import all that trains

    calibration_report.show(options)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command that the command line names."""
    parser = OneLineParser(prog="python -m step08_5d.planning", description=summary(__doc__))
    commands = parser.add_subparsers(dest="command", required=True)
    functions = {"plan": plan, "memory": memory_report.show, "dry-run": play, "sweep": sweep, "calibrate": calibrate}
    functions |= {"published": published_report.show, "overlap": overlap.show, "cheatsheet": cheatsheet.show}
    functions |= {"bars": bars.show, "recipe": recipe.show, "page": write.show, "compare": compare.show}
    for name, function in functions.items():
        more = "Other flags are those of step 8." if function in (play, memory_report.show) else None
        sub = commands.add_parser(name, allow_abbrev=False, epilog=more)
        sub.set_defaults(run=function)
        if name in ("plan", "recipe", "memory", "compare", "overlap", "cheatsheet"):
            sub.add_argument("--model", required=True, help="a preset, configuration file or Hub name")
            sub.add_argument("--seq-len", type=tokens, default=4096)
        if name == "page":
            sub.add_argument("--out", default="runs/planning/plan.html", help="the file to open in a browser")
            sub.add_argument("--sweep", help="the runs.jsonl of a sweep to show, such as runs/sweeps/laptop/runs.jsonl")
        if name in ("published", "bars"):
            sub.add_argument("--out", default=f"runs/planning/{name}.png", help="the figure")
        if name == "compare":
            sub.add_argument("layouts", nargs="+", help='flags of step 8 in quotes, such as "--dp 4 --tp 2 --zero 1"')
        if name in ("plan", "recipe", "compare"):
            sub.add_argument("--gpu", choices=MACHINES, default="H100")
        if name in ("plan", "recipe"):
            sub.add_argument("--gpus", type=count, required=True)
            sub.add_argument("--tokens-per-batch", type=tokens, default=2**20, help="such as 1M")
        if name == "plan":
            sub.add_argument("--shown", type=count, default=8, help="rows of the table")
            sub.add_argument("--interleaved", action="store_true", help="also several stages on each pipeline rank")
            sub.add_argument("--within", type=speed, help="GB/s of a GPU to others of its node (default: data sheet)")
            sub.add_argument("--between", type=speed, help="GB/s of a GPU to other nodes (default: data sheet)")
        if name in ("sweep", "calibrate"):
            sub.add_argument("file", help="a TOML file that says what to run, such as step08_5d/planning/laptop.toml")
        if name == "sweep":
            sub.add_argument("--again", nargs="+", choices=STATES, default=[], help="repeat runs that ended so")
        if name == "calibrate":
            sub.add_argument(
                "--judge", help="another sweep's TOML file: fit to all runs of FILE, judge on those of this one"
            )
            sub.add_argument("--cores", type=count, help="that the ranks share (default: those of this process)")
        if name == "dry-run":
            sub.add_argument("--world", type=count, required=True, help="how many ranks there would be")
            sub.add_argument("--rank", type=int, default=0, help="which of them to play")
        if name in ("overlap", "cheatsheet"):
            for degree in ("dp", "tp", "pp", "cp", "ep", "micro-batch"):
                sub.add_argument(f"--{degree}", type=count, default=1)
        if name == "cheatsheet":
            sub.add_argument("--zero", type=int, choices=range(4), default=0)
        if name in ("memory", "compare", "cheatsheet"):
            sub.add_argument("--global-batch", "--sequences", type=count, default=256, help="sequences of a step")
        if name == "memory":
            sub.add_argument("--play", action="store_true", help="also a dry run of each stage, on fake tensors")
            sub.add_argument("--form", choices=("ours", "gpt"), default="ours", help="our model, or the playbook's GPT")
        if name == "overlap":
            sub.add_argument("--peak", type=speed, default=989, help="TFLOP/s that a GPU's products reach")
            sub.add_argument("--bandwidth", type=speed, default=450, help="GB/s of a GPU to others of its node")
            sub.add_argument("--between", type=speed, default=50, help="GB/s of a GPU to other nodes")
            sub.add_argument("--near", nargs="*", choices=overlap.DEGREES, default=["tp"], help="within a node")
    options, options.rest = parser.parse_known_args(argv)
    if options.rest and options.run not in (play, memory_report.show):
        parser.error(f"unknown: {' '.join(options.rest)}")
    if "gpus" in options and options.tokens_per_batch % options.seq_len:
        raise UsageError(f"--tokens-per-batch {options.tokens_per_batch} is no multiple of --seq-len {options.seq_len}")
    options.run(options)


if __name__ == "__main__":
    sys.exit(main())
