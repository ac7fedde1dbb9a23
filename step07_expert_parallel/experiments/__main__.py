"""The claims of step 7, predicted and measured.

python -m step07_expert_parallel.experiments  # all of them, about 14 minutes on 2 cores
python -m step07_expert_parallel.experiments --only routing
"""

from common.experiments.runner import run_experiments
from step07_expert_parallel.experiments import (
    active,
    dualpipe,
    frames,
    learning,
    memory,
    node_limit,
    nodes,
    overlap,
    routing,
    same,
    traffic,
)

EXPERIMENTS = [
    routing.routing,
    learning.learning,
    active.active,
    node_limit.node_limit,
    same.gradients,
    same.curves,
    frames.dispatch,
    traffic.traffic,
    traffic.preserved,
    nodes.nodes,
    memory.memory,
    memory.activations,
    overlap.condition,
    overlap.overlap,
    dualpipe.dualpipe,
    dualpipe.simulated,
    dualpipe.partners,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
