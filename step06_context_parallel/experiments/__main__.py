"""The claims of step 6, predicted and measured.

python -m step06_context_parallel.experiments  # all of them, about 8 minutes on 2 cores
python -m step06_context_parallel.experiments --only balance
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step06_context_parallel.experiments import balance, cluster, longest, memory, messages, nodes, overlap

EXPERIMENTS = [
    balance.balance,
    messages.messages,
    messages.gradients,
    memory.buffers,
    memory.activations,
    longest.longest,
    longest.published,
    cluster.condition,
    overlap.overlap,
    nodes.nodes,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
