"""The claims of step 2, predicted and measured.

    python -m step02_data_parallel.experiments                   # all of them, 2 to 4 minutes on 2 cores
    python -m step02_data_parallel.experiments --only overlap --quick

Prints tables of predicted, measured and measured / predicted, and draws into step02_data_parallel/figures (with --quick
into runs/step02-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. "Measured" is a
clock, the trace, or a counter of the kernel; what only a cluster can show is called predicted.
"""

import sys

from step02_data_parallel.experiments import cluster as experiments_cluster
from step02_data_parallel.experiments import numbers as experiments_numbers
from step02_data_parallel.experiments import overlap as experiments_overlap
from step02_data_parallel.experiments.tools import command

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


if __name__ == "__main__":
    sys.exit(command("step02_data_parallel", __doc__.splitlines()[0], EXPERIMENTS))
