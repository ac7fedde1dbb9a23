"""The claims of step 4, predicted and measured.

    python -m step04_tensor_parallel.experiments                   # all of them, 4 to 6 minutes on 2 cores
    python -m step04_tensor_parallel.experiments --only shapes

Prints tables of predicted, measured and measured / predicted, and draws into step04_tensor_parallel/figures (with
--quick into runs/step04-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Measured
is a clock, the trace, a counter of the kernel, or the storages behind tensors; what only a cluster can show is called
predicted, and what others have measured there, published.
"""

import sys

from step02_data_parallel.experiments.tools import command
from step04_tensor_parallel.experiments import cluster as experiments_cluster
from step04_tensor_parallel.experiments import collectives as experiments_collectives
from step04_tensor_parallel.experiments import memory as experiments_memory
from step04_tensor_parallel.experiments import overlap as experiments_overlap
from step04_tensor_parallel.experiments import pictures
from step04_tensor_parallel.experiments import shapes as experiments_shapes

EXPERIMENTS = {
    function.__name__: function
    for function in (
        pictures.operators,
        experiments_shapes.worked,
        experiments_shapes.shapes,
        experiments_collectives.collectives,
        experiments_memory.activations,
        experiments_memory.logits,
        experiments_collectives.gradients,
        experiments_collectives.curves,
        experiments_overlap.overlap,
        experiments_cluster.condition,
        experiments_cluster.scaling,
    )
}

if __name__ == "__main__":
    sys.exit(command("step04_tensor_parallel", __doc__.splitlines()[0], EXPERIMENTS))
