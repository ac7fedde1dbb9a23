"""What the compiler says about every kernel of step 8, without a GPU: how many programs live at once, and what spills.

    python -m step08_5d.kernels.compiled                              # for an H100
    python -m step08_5d.kernels.compiled --card 80 --only attention

See `compiling` for what the columns say. The launches have real shapes, by tensors that have no memory.
"""

import functools
import os
import sys
from collections.abc import Callable

if __name__ == "__main__":  # before Triton is loaded
    os.environ |= dict.fromkeys(("TRITON_ALWAYS_COMPILE", "TRITON_DUMP_PTXAS_LOG"), "1") | {"TRITON_INTERPRET": "0"}

import common.entry  # noqa: F401

# isort: split
import torch

from common.launching.command_line import one_line_errors, summary
from common.layers import at_least_float32
from step07_expert_parallel.experts import Counts
from step08_5d.kernels import (
    adamw,
    cross_entropy,
    flash_attention_backward,
    grouped_matmul,
    rms_norm,
    rotary,
    swiglu,
)
from step08_5d.kernels.compiling import empty, print_compiled
from step08_5d.kernels.flash_attention import attend
from step08_5d.kernels.merge import merge
from step08_5d.kernels.quantise import Block, quantise

TOKENS = 4096


def forward_and_backward(function: Callable, *inputs) -> None:
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.empty_like(each) for each in outputs])


def heads(dtype: torch.dtype, tokens: int, count: int, width: int) -> torch.Tensor:
    """Laid out as a linear layer writes them."""
    return empty(1, tokens, count, width, dtype=dtype, gradient=False).transpose(1, 2)


def launch_attention(dtype: torch.dtype, width: int, causal: bool, tokens: int = TOKENS) -> None:
    q, k = heads(dtype, tokens, 2048 // width, width), heads(dtype, tokens, 512 // width, width)
    out, lse = attend(q, k, k, causal)
    flash_attention_backward.attend_backward(out, q, k, k, out, lse, causal)
    if not causal:  # a block of a ring
        merge(torch.empty_like(out, dtype=lse.dtype), torch.empty_like(lse), out, lse)


def launch_norm(dtype: torch.dtype, hidden: int, tokens: int = TOKENS, alone: bool = False) -> None:
    x, weight = empty(tokens, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    if alone:
        forward_and_backward(rms_norm.rms_norm, x, weight, 1e-5)
    else:
        forward_and_backward(rms_norm.add_rms_norm, x, torch.empty_like(x).requires_grad_(), weight, 1e-5)


def launch_loss(dtype: torch.dtype, vocab: int) -> None:
    logits, targets = empty(TOKENS, vocab, dtype=dtype, gradient=False), torch.zeros(TOKENS, dtype=int, device="meta")
    statistics = cross_entropy.row_statistics(logits, targets, vocab)
    cross_entropy.logits_to_gradient(logits, targets, vocab, *statistics)


def launch_experts(dtype: torch.dtype, experts: int, hidden: int, ffn: int) -> None:
    x, weight = empty(2 * TOKENS, hidden, dtype=dtype), empty(experts, ffn, hidden, dtype=dtype)
    counts = Counts(torch.zeros(experts, dtype=torch.int64, device="meta"))
    y, sums = grouped_matmul.multiply(x, weight.mT, counts), torch.empty_like(weight, dtype=at_least_float32(dtype))
    grouped_matmul.multiply_transposed(y, x, counts)
    grouped_matmul.multiply_transposed(y, x, counts, sums, first=False)


def launch_activation(dtype: torch.dtype, ffn: int) -> None:
    forward_and_backward(swiglu.swiglu, *(empty(TOKENS, ffn, dtype=dtype) for _ in range(2)))


def launch_rotation(dtype: torch.dtype, q_heads: int, k_heads: int, width: int) -> None:
    angles = empty(TOKENS, width, dtype=at_least_float32(dtype), gradient=False)
    q, k = (heads(dtype, TOKENS, count, width).requires_grad_() for count in (q_heads, k_heads))
    forward_and_backward(rotary.rotary, q, k, angles, angles)


def launch_update(dtype: torch.dtype, skips: bool) -> None:
    wide = functools.partial(empty, dtype=at_least_float32(dtype), gradient=False)
    copy, skip = empty(2**24, dtype=dtype) if dtype != wide().dtype else None, wide() if skips else None
    tensors, scalars = [wide(2**24) for _ in range(4)], [wide() for _ in range(3)]
    adamw.adamw(*tensors, copy, *scalars, skip, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)


def launch_quantise(dtype: torch.dtype, block: Block, turned: bool = False, given: bool = False) -> None:
    """Of one recipe, all that a run launches: formats, and scales that are found or given."""
    x = empty(TOKENS, 2048, dtype=dtype, gradient=False)
    x = x.t() if turned else x
    scales = empty(1, 1, dtype=at_least_float32(dtype), gradient=False) if given else None
    for format in (torch.float8_e4m3fn, torch.float8_e5m2):
        quantise(x, format, block, scales, power_of_two=block[1] == 32)


def attention_of(*widths: int) -> dict[str, tuple]:
    modes = {"causal": True, "full": False}
    return {f"d {width}, {mode}": (launch_attention, width, modes[mode]) for width in widths for mode in modes}


QUANTISED = {"rows": (1, None), "1 x 128": (1, 128), "128 x 128": (128, 128), "1 x 32": (1, 32)}  # have one scale
CASES = {
    "attention": attention_of(64, 128),
    "wide_attention": {"d 192, full": (launch_attention, 192, False), "d 256, causal": (launch_attention, 256, True)},
    "norms": {f"h {hidden}": (launch_norm, hidden) for hidden in (576, 2048, 4096, 5120, 8192, 16384)}
    | {"h 2048, 512 rows": (launch_norm, 2048, 512)},
    "loss": {f"vocabulary {vocab}": (launch_loss, vocab) for vocab in (384, 6000, 49152, 128256)},
    "experts": {"8 experts, 2048 x 8192": (launch_experts, 8, 2048, 8192), "64": (launch_experts, 64, 2048, 1024)},
    "small": {
        "one token, d 64": (launch_attention, 64, True, 1),  # a size of 1 is compiled as a constant
        "width 96": (launch_attention, 96, True),  # padded
        "h 2048 alone": (launch_norm, 2048, TOKENS, True),
        "ffn 8192": (launch_activation, 8192),
        "ffn 1531": (launch_activation, 1531),
        "32 and 8 heads, d 64": (launch_rotation, 32, 8, 64),
        "9 and 3 heads, d 64": (launch_rotation, 9, 3, 64),
        "64 and 8 heads, d 128": (launch_rotation, 64, 8, 128),
        "16.8 M": (launch_update, False),
        "16.8 M, skips": (launch_update, True),
    },
    "narrow": {
        **{
            f"{name}{', turned' if turned else ''}": (launch_quantise, block, turned)
            for name, block in QUANTISED.items()
            for turned in (False, True)
        },
        "given": (launch_quantise, (None, None), False, True),
    },
}  # fmt: skip


@one_line_errors
def main() -> None:
    """Print how the kernels compile, as the command line asks."""
    print_compiled(CASES, summary(__doc__))


if __name__ == "__main__":
    sys.exit(main())
