"""The claims of step 3, predicted and measured.

    python -m step03_zero.experiments                   # all of them, about 10 minutes on 2 cores
    python -m step03_zero.experiments --only memory --quick

Prints tables of predicted, measured and measured / predicted, and draws into step03_zero/figures (with --quick into
runs/step03-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. "Measured" is a clock,
the trace, a counter of the kernel, or the storages behind tensors; what only a cluster can show is called predicted.
"""

import sys

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
    sys.exit(run_experiments("step03_zero", __doc__.splitlines()[0], EXPERIMENTS))
