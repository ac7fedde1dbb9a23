"""`python -m stepNN_name.experiments`: runs the experiments of a step."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.command_line import OneLineParser
from common.drawing import figures

ROOT = Path(__file__).resolve().parents[2]


def run_experiments(
    step: str, description: str, experiments: list[Callable], argv: list[str] | None = None, module: str | None = None
) -> int:
    """Run the experiments that the command line names, all of them by default. Returns the exit status.

    Figures are saved in the folder of the step, with --quick in runs/, so that the lesson keeps its own.

    Args:
        step: name of the step's folder.
        experiments: functions of `quick`; the first line of its docstring is printed before each.
        module: what follows `python -m`, by default STEP.experiments.
    """
    by_name = {function.__name__: function for function in experiments}
    parser = OneLineParser(prog=f"python -m {module or step + '.experiments'}", description=description)
    parser.add_argument("--only", choices=by_name, help="one experiment (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements, rougher numbers")
    options = parser.parse_or_exit(argv)
    figures.folder = Path(f"runs/{step.partition('_')[0]}-figures") if options.quick else ROOT / step / "figures"
    names = [options.only] if options.only else list(by_name)
    for number, name in enumerate(names, 1):
        print(f"\n==== {number} of {len(names)}, {name}: {by_name[name].__doc__.splitlines()[0]}", flush=True)
        start = time.perf_counter()
        try:
            by_name[name](options.quick)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return 0
