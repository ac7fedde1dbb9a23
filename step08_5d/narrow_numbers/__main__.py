"""Low precision: formats, errors of products, training curves and bytes in FP8 and below, all on the CPU.

python -m step08_5d.narrow_numbers
python -m step08_5d.narrow_numbers --only divergence
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step08_5d.narrow_numbers.experiments.memory import memory
from step08_5d.narrow_numbers.experiments.messages import messages
from step08_5d.narrow_numbers.experiments.pictures import formats
from step08_5d.narrow_numbers.experiments.products import four_bits, outliers
from step08_5d.narrow_numbers.experiments.training import divergence, underflow

EXPERIMENTS = [formats, outliers, underflow, divergence, memory, messages, four_bits]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS, step="step08_5d/narrow_numbers"))
