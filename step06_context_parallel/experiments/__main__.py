"""The claims of step 6, predicted and measured.

    python -m step06_context_parallel.experiments                   # all of them, about 8 minutes on 2 cores
    python -m step06_context_parallel.experiments --only balance

Prints tables of predicted, measured and measured / predicted, and draws into step06_context_parallel/figures (with
--quick into runs/step06-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Measured
is a clock, the trace, a counter of the kernel, or the storages behind tensors; what only a cluster can show is called
predicted, and what others have computed, published.
"""

import sys

from common.experiments.runner import run_experiments
from step06_context_parallel.experiments import balance, cluster, frames, longest, memory, messages, nodes, overlap

EXPERIMENTS = [
    balance.balance,
    frames.frames,
    messages.messages,
    messages.gradients,
    messages.curves,
    memory.buffers,
    memory.activations,
    longest.longest,
    longest.published,
    cluster.condition,
    overlap.overlap,
    nodes.nodes,
]

if __name__ == "__main__":
    sys.exit(run_experiments("step06_context_parallel", __doc__.splitlines()[0], EXPERIMENTS))
