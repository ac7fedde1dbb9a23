"""The claims of step 3, predicted and measured.

    python -m step03_zero.experiments                   # all of them, 5 to 10 minutes on 2 cores
    python -m step03_zero.experiments --only memory --quick

Prints tables of predicted, measured and measured / predicted, and draws into step03_zero/figures (with --quick into
runs/step03-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. "Measured" is a clock,
the trace, a counter of the kernel, or the storages behind tensors; what only a cluster can show is called predicted.
"""

import sys

from step02_data_parallel.experiments.tools import command
from step03_zero.experiments import memory as experiments_memory
from step03_zero.experiments import overlap as experiments_overlap
from step03_zero.experiments import pictures
from step03_zero.experiments import residency as experiments_residency
from step03_zero.experiments import traffic as experiments_traffic

EXPERIMENTS = {
    function.__name__: function
    for function in (
        pictures.stages,
        experiments_memory.memory,
        experiments_residency.residency,
        experiments_residency.peak,
        experiments_traffic.traffic,
        experiments_traffic.gradients,
        experiments_traffic.curves,
        experiments_overlap.overlap,
        experiments_overlap.condition,
        experiments_memory.llama,
    )
}

if __name__ == "__main__":
    sys.exit(command("step03_zero", __doc__.splitlines()[0], EXPERIMENTS))
