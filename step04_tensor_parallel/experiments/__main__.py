"""The claims of step 4, predicted and measured.

python -m step04_tensor_parallel.experiments  # all of them, about 8 minutes on 2 cores
python -m step04_tensor_parallel.experiments --only shapes
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step04_tensor_parallel.experiments import cluster, gpt, memory, nodes, numbers, orders, overlap

EXPERIMENTS = [
    orders.orders,
    numbers.traffic,
    numbers.shapes,
    numbers.curves,
    memory.activations,
    gpt.gpt,
    overlap.overlap,
    overlap.backward,
    nodes.nodes,
    cluster.condition,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
