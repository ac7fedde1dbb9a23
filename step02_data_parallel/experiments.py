"""The claims of step 2, predicted and measured.

    python -m step02_data_parallel.experiments                   # all of them, 2 to 4 minutes on 2 cores
    python -m step02_data_parallel.experiments --only overlap --quick

Prints tables of predicted, measured and measured / predicted, and draws into step02_data_parallel/figures (with --quick
into runs/step02-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. "Measured" is a
clock, the trace, or a counter of the kernel; what only a cluster can show is called predicted.
"""

import sys
import time
from pathlib import Path

from common.command_line import OneLineParser
from step02_data_parallel import experiment_tools, experiments_cluster, experiments_numbers, experiments_overlap

EXPERIMENTS = {
    function.__name__: function
    for function in (
        experiments_numbers.traffic,
        experiments_overlap.overlap,
        experiments_overlap.bucket_size,
        experiments_numbers.gradients,
        experiments_numbers.curves,
        experiments_cluster.scaling,
        experiments_cluster.journey,
    )
}


def main(argv: list[str] | None = None) -> int:
    """Run the experiments that the command line names. Returns the exit status."""
    parser = OneLineParser(prog="python -m step02_data_parallel.experiments", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=EXPERIMENTS, help="one experiment (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer steps, rougher numbers")
    options = parser.parse_or_exit(argv)
    if options.quick:
        experiment_tools.figures = Path("runs/step02-figures")
    for name in [options.only] if options.only else EXPERIMENTS:
        print(f"\n==== {name}: {EXPERIMENTS[name].__doc__.splitlines()[0]}")
        start = time.perf_counter()
        EXPERIMENTS[name](options.quick)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
