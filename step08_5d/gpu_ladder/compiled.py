"""What the compiler says about the ladder's kernels in Triton, without a GPU: registers, and what spills.

    python -m step08_5d.gpu_ladder.compiled                       # for an H100
    python -m step08_5d.gpu_ladder.compiled --only matmul --dtype float32

`kernels.compiling` says how, and what the columns mean. There is no float64, as the products add up in float32.
"""

import os
import sys
from collections.abc import Callable

if __name__ == "__main__":  # before Triton is loaded
    os.environ |= dict.fromkeys(("TRITON_ALWAYS_COMPILE", "TRITON_DUMP_PTXAS_LOG"), "1") | {"TRITON_INTERPRET": "0"}

import common.entry  # noqa: F401

# isort: split
import torch

from common.launching.command_line import one_line_errors, summary
from step08_5d.gpu_ladder import elu, fusion, matmul
from step08_5d.kernels.compiling import TYPES, empty, print_compiled

SIZE = 4096


def launch(dtype: torch.dtype, function: Callable, matrices: int, *settings: int) -> None:
    """Call a rung with this many square matrices."""
    square = empty(SIZE, SIZE, dtype=dtype, gradient=False)
    function(*[square] * matrices, *settings)


CASES = {
    "elu": {f"{SIZE} x {SIZE}": (launch, elu.in_triton, 1)},
    "fusion": {f"{SIZE} x {SIZE}": (launch, fusion.in_triton, 1)},
    "matmul": {
        "naive": (launch, matmul.naive, 2),
        "coalesced": (launch, matmul.coalesced, 2),
        **{f"tiles of {tile}": (launch, matmul.tiled, 2, tile) for tile in (32, 64, 128)},
    },
}


@one_line_errors
def main() -> None:
    """Print how the rungs compile, as the command line asks."""
    print_compiled(CASES, summary(__doc__), TYPES[:3])


if __name__ == "__main__":
    sys.exit(main())
