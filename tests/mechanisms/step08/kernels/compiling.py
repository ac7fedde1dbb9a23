"""Compiles kernels for a GPU on a machine without one, since the interpreter takes Python that the compiler refuses.

    TRITON_INTERPRET=0 python -m tests.mechanisms.step08.kernels.compiling

Every launch compiles the kernel for its arguments, down to machine code, and does not run it. One line for each says
how many bytes of shared memory a program needs, and whether it multiplies on Hopper's tensor cores ("wgmma").
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from step07_expert_parallel.experts import Counts
from step08_5d.gpu_ladder import elu, fusion, matmul
from step08_5d.kernels import adamw, cross_entropy, grouped_matmul, rms_norm, rotary, swiglu
from step08_5d.kernels.flash_attention_backward import flash_attention_core

CAPABILITY, SHARED = 90, 227 * 1024  # H100, and the bytes that a program may have there (CUDA C++ Programming Guide)
NARROW, WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)


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
    print(self.__name__, kernel.metadata.shared, "wgmma" if "wgmma" in kernel.asm["ptx"] else "", flush=True)
    assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED


def forward_and_backward(function, *inputs) -> None:
    """Both, for tensors that want gradients."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.empty_like(each) for each in outputs])


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def heads(dtype: torch.dtype, width: int, seq: int, *counts: int) -> list[torch.Tensor]:
    """Laid out as a linear layer writes them."""
    return [torch.empty(1, seq, each, width, dtype=dtype).transpose(1, 2).requires_grad_() for each in counts]


def launch_attention(dtype: torch.dtype, width: int, seq: int = 512) -> None:
    q, k = heads(dtype, width, seq, 4, 2)
    forward_and_backward(flash_attention_core, q, k, k)


def launch_loss(dtype: torch.dtype, vocab: int) -> None:
    logits, targets = torch.empty(4, vocab, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    statistics = cross_entropy.row_statistics(logits, targets, vocab)
    cross_entropy.logits_to_gradient(logits, targets, vocab, *statistics)


def launch_experts(dtype: torch.dtype) -> None:
    x, weight = (torch.empty(shape, dtype=dtype) for shape in ((64, 256), (8, 128, 256)))
    counts = Counts(torch.zeros(8, dtype=torch.int64))
    grouped_matmul.multiply_transposed(grouped_matmul.multiply(x, weight.mT, counts), x, counts)


def launch_norms(dtype: torch.dtype, hidden: int) -> None:
    x, residual, weight = *(empty(64, hidden, dtype=dtype) for _ in range(2)), empty(hidden, dtype=dtype)
    forward_and_backward(rms_norm.rms_norm, x, weight, 1e-5)
    forward_and_backward(rms_norm.add_rms_norm, x, residual, weight, 1e-5)


def launch_activation(dtype: torch.dtype) -> None:
    forward_and_backward(swiglu.swiglu, *(empty(8, 1536, dtype=dtype) for _ in range(2)))


def launch_rotation(dtype: torch.dtype, q_heads: int, k_heads: int) -> None:
    angles = torch.empty(16, 64, dtype=torch.promote_types(dtype, torch.float32))
    forward_and_backward(rotary.rotary, *heads(dtype, 64, 16, q_heads, k_heads), angles, angles)


def launch_update(dtype: torch.dtype, skips: bool = False) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    tensors, scalars = [torch.empty(2048, dtype=wide) for _ in range(4)], [torch.empty((), dtype=wide)] * 3
    copy, skip = torch.empty(2048, dtype=dtype) if dtype != wide else None, torch.empty(()) if skips else None
    adamw.adamw(*tensors, copy, *scalars, skip, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)


def launch_ladder() -> None:
    """The kernels of the GPU ladder."""
    square = torch.empty(128, 128)
    elu.in_triton(square)
    fusion.in_triton(square)
    matmul.naive(square, square)
    matmul.coalesced(square, square)
    for tile in (32, 64, 128):
        matmul.tiled(square, square, tile)
        matmul.tiled(square.bfloat16(), square.bfloat16(), tile)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    driver.set_active(Driver())
    run, JITFunction.run = JITFunction.run, compile_only
    for each in (*NARROW, *WIDE):
        launch_attention(each, 64)
        launch_loss(each, 49152)
        launch_experts(each)
        launch_norms(each, 2048)
        launch_activation(each)
        launch_rotation(each, 32, 8)
        launch_update(each, skips=each == torch.float16)
    for width in (96, 128, 256):  # the first is padded
        launch_attention(torch.bfloat16, width)
    launch_attention(torch.bfloat16, 64, seq=1)  # a size of 1 is compiled as a constant
    launch_loss(torch.bfloat16, 384)
    for hidden in (576, 16384):
        launch_norms(torch.bfloat16, hidden)
    launch_rotation(torch.bfloat16, 9, 3)
    launch_ladder()
