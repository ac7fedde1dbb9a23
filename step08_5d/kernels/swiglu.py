"""The product inside SwiGLU (Shazeer, arXiv:2002.05202): silu(gate) * up, where silu(g) = g * sigmoid(g).

The bytes moved per element in bfloat16, where each tensor that is read or written counts 2:

                least                                          eager (a test counts it)
    forward     6   read gate, up, write out                   10   silu(gate) is written and read again
    backward   10   read d_out, gate, up, write d_gate, d_up   18   and so are silu(gate) and its gradient

The kernel saves memory, too: for the backward of the eager operations autograd keeps gate, up and silu(gate). The
kernel's backward needs gate and up only, and computes silu(gate) again in registers.
"""

import torch

from step08_5d.kernels.launching import ceil_div, tl, triton, warps_for, wide_type

BLOCK = 1024  # elements per program


@triton.jit
def _forward_kernel(gate, up, out, size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: tokens * ffn may exceed 2^31
    inside = offsets < size
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(WIDE)
    tl.store(out + offsets, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(d_out, gate, up, d_gate, d_up, size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """d_up = d_out * silu(g), d_gate = d_out * up * silu'(g) with silu'(g) = s * (1 + g * (1 - s)), s = sigmoid(g)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    d = tl.load(d_out + offsets, mask=inside, other=0.0).to(WIDE)
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(WIDE)
    s = 1 / (1 + tl.exp(-g))
    tl.store(d_up + offsets, (d * g * s).to(d_up.dtype.element_ty), mask=inside)
    tl.store(d_gate + offsets, (d * u * s * (1 + g * (1 - s))).to(d_gate.dtype.element_ty), mask=inside)


def _launch(kernel, *tensors):
    size = tensors[0].numel()
    if size:
        wide = wide_type(tensors[0].dtype)
        kernel[ceil_div(size, BLOCK),](*tensors, size, wide, BLOCK, num_warps=warps_for(BLOCK))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _launch(_forward_kernel, gate, up, out)
        return out

    @staticmethod
    def backward(ctx, d_out):
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _launch(_backward_kernel, d_out.contiguous(), gate, up, d_gate, d_up)
        return d_gate, d_up


def swiglu(gate, up):
    """gate and up of one shape and type -> `silu_and_multiply` of them (common/model.py), rounded once."""
    return _SwiGLU.apply(gate, up)
