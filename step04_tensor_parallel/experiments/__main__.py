"""The claims of step 4, predicted and measured.

python -m step04_tensor_parallel.experiments  # all of them, about 8 minutes on 2 cores
python -m step04_tensor_parallel.experiments --only toy
"""

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
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
