"""The claims of step 8, predicted and measured.

python -m step08_5d.experiments  # all of them
python -m step08_5d.experiments --only grid
"""

from common.experiments.runner import run_experiments
from step08_5d.experiments import (
    cluster,
    cost,
    first,
    grid,
    groups,
    head,
    layer_bytes,
    memory_8b,
    nodes,
    precision,
    shapes,
    timeline,
)

EXPERIMENTS = [
    grid.grid,
    grid.order,
    nodes.nodes,
    groups.groups,
    shapes.shapes,
    precision.precision,
    precision.masters,
    cost.cost,
    timeline.timeline,
    head.head,
    layer_bytes.layer_bytes,
    memory_8b.memory_8b,
    cluster.llama,
    first.first,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
