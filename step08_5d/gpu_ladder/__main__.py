"""The GPU ladder: kernels from eager PyTorch to CUDA C++, and what limits each of them.

    python -m step08_5d.gpu_ladder                # all rungs
    python -m step08_5d.gpu_ladder --only matmul
    python -m step08_5d.gpu_ladder --quick        # smaller sizes; figures go to runs/step08-figures

On a GPU the rungs have full sizes and are timed. Without one, Triton interprets the kernels on toy sizes, and we count
what a GPU would be asked for: sectors of memory, bytes, FLOPs.
"""

import common.entry  # noqa: F401
from common.experiments.runner import run_experiments
from step08_5d.gpu_ladder.attention import attention
from step08_5d.gpu_ladder.attention_versions import attention_versions
from step08_5d.gpu_ladder.contention import contention
from step08_5d.gpu_ladder.divergence import divergence
from step08_5d.gpu_ladder.elu import elu
from step08_5d.gpu_ladder.elu_over_n import elu_over_n
from step08_5d.gpu_ladder.formats import formats
from step08_5d.gpu_ladder.four_bits import four_bits
from step08_5d.gpu_ladder.fusion import fusion
from step08_5d.gpu_ladder.generated import generated
from step08_5d.gpu_ladder.machine import missing
from step08_5d.gpu_ladder.matmul import matmul
from step08_5d.gpu_ladder.roofline import roofline

EXPERIMENTS = [elu, elu_over_n, generated, matmul, divergence, fusion, attention, attention_versions]
EXPERIMENTS += [roofline, contention, formats, four_bits]

if __name__ == "__main__":
    raise SystemExit(run_experiments(__package__, __doc__, EXPERIMENTS, step="step08_5d/gpu_ladder", first=missing))
