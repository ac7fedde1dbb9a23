"""The claims of step 5, predicted and measured.

    python -m step05_pipeline.experiments                   # all of them, about 7 minutes on 2 cores
    python -m step05_pipeline.experiments --only schedules

Prints tables of predicted, measured and measured / predicted, and draws into step05_pipeline/figures (with --quick into
runs/step05-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Simulated is what
follows from a schedule and given costs; measured is a clock, the trace, a counter of the kernel, or the storages behind
tensors; what only a cluster can show is called predicted, and what others have measured there, published.
"""

import sys

from common.experiments.runner import run_experiments
from step05_pipeline.experiments import bubble, cluster, drawings, frames, memory, messages, nodes, schedules

EXPERIMENTS = [
    drawings.toy,
    drawings.circle,
    drawings.deadlock,
    frames.frames,
    schedules.naive,
    schedules.schedules,
    schedules.bubbles,
    schedules.llama3,
    schedules.split_backward,
    bubble.bubble,
    messages.messages,
    messages.gradients,
    messages.curves,
    memory.activations,
    memory.balance,
    nodes.nodes,
    nodes.slack,
    cluster.condition,
    cluster.scaling,
]

if __name__ == "__main__":
    sys.exit(run_experiments("step05_pipeline", __doc__.splitlines()[0], EXPERIMENTS))
