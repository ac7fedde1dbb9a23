"""The claims of step 8, predicted and measured.

python -m step08_5d.experiments                   # all of them
python -m step08_5d.experiments --only cost
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step08_5d.experiments import (
    cluster,
    deepseek,
    dimensions,
    head,
    layer_bytes,
    memory_8b,
    nodes,
    precision,
    restart,
    timeline,
)

EXPERIMENTS = [
    nodes.nodes,
    precision.precision,
    precision.masters,
    dimensions.cost,
    timeline.timeline,
    head.head,
    layer_bytes.layer_bytes,
    memory_8b.memory_8b,
    cluster.llama,
    deepseek.deepseek,
    restart.restart,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
