"""The claims of step 3, predicted and measured.

python -m step03_zero.experiments  # all of them, about 10 minutes on 2 cores
python -m step03_zero.experiments --only memory --quick
"""

from common.experiments.runner import run_experiments
from step03_zero.experiments import frames, holds, memory, nodes, overlap, residency, stages, traffic, unit_size

EXPERIMENTS = [
    holds.holds,
    stages.stages,
    frames.frames,
    memory.memory,
    residency.residency,
    residency.peak,
    traffic.traffic,
    unit_size.unit_size,
    traffic.gradients,
    traffic.curves,
    overlap.overlap,
    overlap.condition,
    overlap.formulas,
    nodes.nodes,
    memory.llama,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
