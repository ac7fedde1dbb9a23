"""The claims of step 4, predicted and measured.

    python -m step04_tensor_parallel.experiments                   # all of them, about 8 minutes on 2 cores
    python -m step04_tensor_parallel.experiments --only toy

Prints tables of predicted, measured and measured / predicted, and draws into step04_tensor_parallel/figures (with
--quick into runs/step04-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Measured
is a clock, the trace, a counter of the kernel, or the storages behind tensors; what only a cluster can show is called
predicted, and what others have measured there, published.
"""

import sys

from common.experiments.runner import run_experiments
from step04_tensor_parallel.experiments import cluster, collectives, drawings, gpt, memory, nodes, overlap, shapes

EXPERIMENTS = [
    drawings.toy,
    drawings.operators,
    shapes.worked,
    shapes.shapes,
    collectives.collectives,
    memory.activations,
    memory.logits,
    gpt.gpt,
    collectives.gradients,
    collectives.curves,
    overlap.overlap,
    nodes.nodes,
    cluster.condition,
    cluster.scaling,
]

if __name__ == "__main__":
    sys.exit(run_experiments("step04_tensor_parallel", __doc__.splitlines()[0], EXPERIMENTS))
