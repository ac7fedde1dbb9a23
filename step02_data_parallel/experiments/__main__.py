"""The claims of step 2, predicted and measured.

python -m step02_data_parallel.experiments  # all of them, about 4 minutes on 2 cores
python -m step02_data_parallel.experiments --only overlap --quick
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step02_data_parallel.experiments import cluster, nodes, numbers, overlap

EXPERIMENTS = [
    numbers.traffic,
    overlap.overlap,
    overlap.bucket_sweep,
    nodes.nodes,
    numbers.gradients,
    cluster.scaling,
    cluster.journey,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
