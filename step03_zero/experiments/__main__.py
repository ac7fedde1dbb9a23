"""The claims of step 3, predicted and measured.

python -m step03_zero.experiments  # all of them, about 5 minutes on 2 cores
python -m step03_zero.experiments --only memory --quick
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step03_zero.experiments import cluster, nodes, numbers, overlap

EXPERIMENTS = [
    numbers.memory,
    numbers.traffic,
    numbers.unit_size,
    numbers.curves,
    overlap.overlap,
    nodes.nodes,
    cluster.llama,
    cluster.condition,
    cluster.early_gathers,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
