"""Compiles kernels for a GPU on a machine without one, since the interpreter takes Python that the compiler refuses.

    TRITON_INTERPRET=0 python -m tests.mechanisms.step08.kernels.compiling

Every launch compiles the kernel for its arguments, down to machine code, and does not run it. One line for each says
how many bytes of shared memory a program needs.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from step07_expert_parallel.experts import Counts
from step08_5d.kernels import cross_entropy, flash_attention, flash_attention_backward, grouped_matmul

CAPABILITY, SHARED = 90, 227 * 1024  # H100, and the bytes that a program may have there (CUDA C++ Programming Guide)


class Driver:
    """What Triton asks its driver when it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_only(self, *arguments, grid, warmup, **named):
    """In the place of a launch."""
    kernel = run(self, *arguments, grid=grid, warmup=True, **named)
    print(self.__name__, kernel.metadata.shared)
    assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED


def launch_attention(dtype: torch.dtype, width: int, length: int, causal: bool) -> None:
    q, k = (torch.empty(1, length, heads, width, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    flash_attention.attend(q, k, k, causal)
    flash_attention_backward.attend_backward(q, q, k, k, q, torch.empty(1, 4, length), causal)


def launch_loss() -> None:
    logits, targets = torch.empty(4, 4096, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    statistics = cross_entropy.row_statistics(logits, targets, 4096)
    cross_entropy.logits_to_gradient(logits, targets, 4096, *statistics)


def launch_experts() -> None:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 256), (8, 128, 256)))
    counts = Counts(torch.zeros(8, dtype=torch.int64))
    grouped_matmul.multiply_transposed(grouped_matmul.multiply(x, weight.mT, counts), x, counts)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    driver.set_active(Driver())
    run, JITFunction.run = JITFunction.run, compile_only
    launch_attention(torch.bfloat16, 64, 512, causal=True)
    launch_attention(torch.bfloat16, 96, 1, causal=False)  # padded; and a size of 1, which is compiled as a constant
    launch_loss()
    launch_experts()
