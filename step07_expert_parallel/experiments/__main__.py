"""The claims of step 7, predicted and measured.

    python -m step07_expert_parallel.experiments                   # all of them, about 14 minutes on 2 cores
    python -m step07_expert_parallel.experiments --only routing

Prints tables of predicted, measured and measured / predicted, and draws into step07_expert_parallel/figures (with
--quick into runs/step07-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Measured
is a clock, the trace, a counter of the kernel, or the storages behind tensors; what only a cluster can show is called
predicted, and what others have computed, published.
"""

import sys

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
    sys.exit(run_experiments("step07_expert_parallel", __doc__.splitlines()[0], EXPERIMENTS))
