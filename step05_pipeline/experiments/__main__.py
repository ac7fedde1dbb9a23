"""The claims of step 5, predicted and measured.

    python -m step05_pipeline.experiments                   # all of them, about 7 minutes on 2 cores
    python -m step05_pipeline.experiments --only schedules

Prints tables of predicted, measured and measured / predicted, and draws into step05_pipeline/figures (with --quick into
runs/step05-figures, so that the lesson keeps its own). Ranks are gloo processes on this machine. Simulated is what
follows from a schedule and given costs; measured is a clock, the trace, a counter of the kernel, or the storages behind
tensors; what only a cluster can show is called predicted, and what others have measured there, published.
"""

import sys

from step02_data_parallel.experiments.tools import command
from step05_pipeline.experiments import bubble as experiments_bubble
from step05_pipeline.experiments import cluster as experiments_cluster
from step05_pipeline.experiments import memory as experiments_memory
from step05_pipeline.experiments import messages as experiments_messages
from step05_pipeline.experiments import schedules as experiments_schedules

EXPERIMENTS = {
    function.__name__: function
    for function in (
        experiments_schedules.naive,
        experiments_schedules.schedules,
        experiments_schedules.bubbles,
        experiments_schedules.llama3,
        experiments_schedules.split_backward,
        experiments_bubble.bubble,
        experiments_messages.messages,
        experiments_messages.gradients,
        experiments_messages.curves,
        experiments_memory.activations,
        experiments_memory.balance,
        experiments_cluster.condition,
        experiments_cluster.scaling,
    )
}

if __name__ == "__main__":
    sys.exit(command("step05_pipeline", __doc__.splitlines()[0], EXPERIMENTS))
