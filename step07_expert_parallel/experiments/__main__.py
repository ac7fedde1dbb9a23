"""The claims of step 7, predicted and measured.

python -m step07_expert_parallel.experiments                   # all of them, about 10 minutes on 2 cores
python -m step07_expert_parallel.experiments --only routing
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step07_expert_parallel.experiments import dualpipe, memory, nodes, overlap, routing, traffic

EXPERIMENTS = [
    routing.gates,
    routing.routing,
    routing.learning,
    traffic.traffic,
    nodes.nodes,
    memory.memory,
    memory.growth,
    overlap.condition,
    overlap.overlap,
    dualpipe.dualpipe,
    dualpipe.partners,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
