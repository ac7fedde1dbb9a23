"""`python -m stepNN_name.experiments`: runs the experiments of a step. Its __main__.py is a list and one call.

run_experiments(__package__, __doc__, [numbers.traffic, overlap.overlap])
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.drawing import figures
from common.launching.command_line import OneLineParser, one_line_errors, summary

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """
Prints tables of predicted, measured and measured / predicted, and draws into the figures of the step's folder (with
--quick into runs/, so that the lesson keeps its own). Ranks are gloo processes on this machine. "Measured" is a clock,
a trace, an allocator or a counter of the kernel; what this machine cannot show is called predicted.
"""


@one_line_errors
def run_experiments(
    package: str,
    description: str | None,
    experiments: list[Callable],
    argv: list[str] | None = None,
    step: str | None = None,
    first: Callable[[], list[str]] = list,
) -> int:
    """Run the experiments that the command line names, all of them by default. Returns the exit status.

    Args:
        package: what follows `python -m`, such as step01_single_gpu.experiments.
        experiments: functions of `quick`; the first line of its docstring is printed before each.
        step: name of the folder in which figures/ is, by default the first part of `package`.
        first: returns lines to print before all experiments.
    """
    by_name, step = {function.__name__: function for function in experiments}, step or package.partition(".")[0]
    parser = OneLineParser(prog=f"python -m {package}", description=summary(description), epilog=EPILOG)
    parser.add_argument("--only", nargs="+", choices=by_name, metavar="NAME", help=f"some of {', '.join(by_name)}")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements, rougher numbers")
    options = parser.parse_args(argv)
    figures.folder = Path(f"runs/{step.partition('_')[0]}-figures") if options.quick else ROOT / step / "figures"
    names = options.only or list(by_name)
    for line in first():
        print(line)
    for number, name in enumerate(names, 1):
        print(f"\n==== {number} of {len(names)}, {name}: {summary(by_name[name].__doc__)}", flush=True)
        start = time.perf_counter()
        try:
            by_name[name](options.quick)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return 0
