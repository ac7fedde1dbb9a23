"""The claims of step 5, predicted and measured.

    python -m step05_pipeline.experiments  # all of them, about 7 minutes on 2 cores
    python -m step05_pipeline.experiments --only schedules

Simulated is what follows from a schedule and given costs.
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step05_pipeline.experiments import bubble, cluster, memory, messages, nodes, schedules

EXPERIMENTS = [
    schedules.schedules,
    schedules.bubbles,
    schedules.split_backward,
    bubble.bubble,
    messages.messages,
    messages.gradients,
    memory.activations,
    memory.balance,
    nodes.nodes,
    nodes.slack,
    cluster.condition,
    cluster.scaling,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
