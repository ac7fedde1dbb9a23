"""The claims of step 8, predicted and measured.

    python -m step08_5d.experiments                   # all of them
    python -m step08_5d.experiments --only grid

Prints tables of predicted, measured and measured / predicted, and draws into step08_5d/figures (with --quick into
runs/step08-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Measured is a clock,
the trace, a log of calls, or the storages behind tensors; what only a cluster can show is called predicted, and what
others have computed, published.
"""

import sys

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
    sys.exit(run_experiments("step08_5d", __doc__.splitlines()[0], EXPERIMENTS))
