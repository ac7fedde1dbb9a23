"""The claims of step 2, predicted and measured.

    python -m step02_data_parallel.experiments                   # all of them, about 4 minutes on 2 cores
    python -m step02_data_parallel.experiments --only overlap --quick

Prints tables of predicted, measured and measured / predicted, and draws into step02_data_parallel/figures (with --quick
into runs/step02-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. "Measured" is a
clock, the trace, or a counter of the kernel; what only a cluster can show is called predicted.
"""

import sys

from common.experiments.runner import run_experiments
from step02_data_parallel.experiments import cluster, nodes, numbers, overlap, pictures

EXPERIMENTS = [
    pictures.two_ranks,
    pictures.ring,
    numbers.traffic,
    overlap.overlap,
    overlap.bucket_size,
    nodes.nodes,
    numbers.gradients,
    numbers.curves,
    cluster.scaling,
    cluster.journey,
]

if __name__ == "__main__":
    sys.exit(run_experiments("step02_data_parallel", __doc__.splitlines()[0], EXPERIMENTS))
