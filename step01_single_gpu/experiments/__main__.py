"""The claims of step 1, predicted and measured.

    python -m step01_single_gpu.experiments                # all of them, about three minutes on two cores
    python -m step01_single_gpu.experiments --only first_steps --quick

Prints tables of predicted, measured and measured / predicted, and draws into step01_single_gpu/figures (with --quick
into runs/step01-figures, so that the lesson keeps its own).
"""

import os
import sys
import time
from pathlib import Path

import torch

from common.command_line import OneLineParser
from step01_single_gpu.experiments import compute as experiments_compute
from step01_single_gpu.experiments import memory as experiments_memory
from step01_single_gpu.experiments import precision as experiments_precision
from step01_single_gpu.experiments import tools as experiment_tools

EXPERIMENTS = {
    function.__name__: function
    for function in (
        experiments_memory.saved_activation_bytes,
        experiments_memory.llama_bars,
        experiments_memory.first_steps,
        experiments_memory.accumulation,
        experiments_compute.recomputation,
        experiments_compute.utilisation,
        experiments_precision.bytes_per_parameter,
        experiments_precision.master_weights,
        experiments_precision.loss_scaling,
        experiments_precision.curves,
        experiments_compute.profile,
    )
}


def main(argv: list[str] | None = None) -> None:
    """Run the experiments that the command line names."""
    parser = OneLineParser(prog="python -m step01_single_gpu.experiments", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=EXPERIMENTS, help="one experiment (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    options = parser.parse_or_exit(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints lines of its own otherwise
    import matplotlib
    from tqdm import tqdm

    matplotlib.use("Agg")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.quick:
        experiment_tools.figures = Path("runs/step01-figures")
    begin = time.perf_counter()
    names = [options.only] if options.only else list(EXPERIMENTS)
    for name in tqdm(names, disable=not sys.stderr.isatty()):
        print(f"\n==== {name}: {EXPERIMENTS[name].__doc__.splitlines()[0]}")
        start = time.perf_counter()
        EXPERIMENTS[name](options.quick)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"\n{len(names)} experiments in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
