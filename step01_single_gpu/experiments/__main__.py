"""The claims of step 1, predicted and measured.

python -m step01_single_gpu.experiments  # all of them, about 3 minutes on 2 cores
python -m step01_single_gpu.experiments --only first_steps --quick
"""

from common.experiments.runner import run_experiments
from step01_single_gpu.experiments import compute, launches, memory, playbook, precision, toy

EXPERIMENTS = [
    toy.toy,
    memory.saved_activation_bytes,
    memory.first_steps,
    memory.accumulation,
    memory.out_of_memory,
    compute.same_gradients,
    compute.recomputation,
    compute.flops,
    compute.profile,
    launches.launches,
    precision.bytes_per_parameter,
    precision.master_weights,
    precision.loss_scaling,
    precision.curves,
    playbook.gpt_layer,
    playbook.llama_bars,
    playbook.claims,
    playbook.llama_profile,
    playbook.widget,
]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS))
