"""The claims of step 1, predicted and measured.

python -m step01_single_gpu.experiments  # all of them, about 3 minutes on 2 cores
python -m step01_single_gpu.experiments --only first_steps --quick
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step01_single_gpu.experiments import compute, launches, memory, playbook, precision

EXPERIMENTS = [
    memory.first_steps,
    memory.bytes_held,
    memory.out_of_memory,
    compute.recomputation,
    compute.flops,
    launches.launches,
    launches.loading,
    precision.master_weights,
    precision.loss_scaling,
    precision.curves,
    playbook.llama_profile,
    playbook.predict_memory,
    playbook.widget,
    playbook.scales,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
