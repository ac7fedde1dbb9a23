"""What the compiler says about every kernel, without a GPU: how many programs live at once, and what spills.

    python -m step08_5d.kernels.compiled                              # for an H100
    python -m step08_5d.kernels.compiled --card 80 --only attention

Triton brings NVIDIA's assembler along. So each launch compiles its kernel for the card that we name, down to machine
code, and does not run it. From the assembler's log we read the registers of a thread, the bytes that did not fit into
them and go to memory (they *spill*), and its warnings. C7510 to C7515 say that Hopper's matrix products, which could
overlap with everything else, are *serialized*: the program waits for each of them. Registers, shared memory and warps
together decide how many programs a multiprocessor can keep at once.
"""

import contextlib
import functools
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

if __name__ == "__main__":  # before Triton is loaded
    os.environ |= dict.fromkeys(("TRITON_ALWAYS_COMPILE", "TRITON_DUMP_PTXAS_LOG"), "1") | {"TRITON_INTERPRET": "0"}

import torch

from common.drawing.tables import print_table
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.model import at_least_float32
from step07_expert_parallel.experts import Counts
from step08_5d.gpu_ladder import elu, fusion
from step08_5d.gpu_ladder import matmul as products
from step08_5d.kernels import (
    adamw,
    cross_entropy,
    flash_attention,
    flash_attention_backward,
    grouped_matmul,
    rms_norm,
    rotary,
    swiglu,
)
from step08_5d.kernels.flash_attention import attend
from step08_5d.kernels.launching import HAS_TRITON, ceil_div, triton
from step08_5d.kernels.merge import merge
from step08_5d.kernels.quantise import Block, quantise

if HAS_TRITON:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

KIB, TOKENS = 1024, 4096


class Card(NamedTuple):
    """A GPU, and what one of its multiprocessors has (CUDA C++ Programming Guide, technical specifications)."""

    name: str
    multiprocessors: int
    warps: int
    programs: int
    shared: int  # bytes. A program may have all but 1 KiB, which the system takes for each program
    registers: int = 65536


CARDS = {
    80: Card("A100", 108, 64, 32, 164 * KIB),
    89: Card("L40S", 142, 48, 24, 100 * KIB),
    90: Card("H100", 132, 64, 32, 228 * KIB),
    100: Card("B200", 148, 64, 32, 228 * KIB),
    120: Card("RTX PRO 6000", 188, 48, 24, 100 * KIB),
}


class Compiled(NamedTuple):
    """One kernel, compiled for one launch."""

    kernel: str
    case: str
    card: int  # compute capability
    registers: int  # of a thread
    spilled: int  # bytes of a thread that are stored to memory
    shared: int  # bytes of a program
    warps: int  # of a program
    grid: int  # programs of the launch
    tensor_memory: int  # columns of a program, of the 512 on Blackwell
    warnings: list[str]
    products: str  # the instruction that multiplies matrices

    @property
    def resident(self) -> int:
        """How many programs fit on a multiprocessor. A warp gets registers in units of 256."""
        card, of_warp = CARDS[self.card], ceil_div(self.registers * 32, 256) * 256
        limits = [card.programs, card.warps // self.warps, card.registers // of_warp // self.warps]
        limits += [card.shared // (self.shared + KIB), 512 // max(1, self.tensor_memory)]
        return min(limits)

    @property
    def waves(self) -> float:
        """How often the card is filled: just above a whole number, it is nearly empty at the end."""
        return self.grid / (self.resident * CARDS[self.card].multiprocessors) if self.resident else math.inf


class Compiler:
    """Stands in for Triton's driver, and takes the place of every launch for as long as this process lives."""

    def __init__(self, capability: int):
        self.capability, self.case, self.rows = capability, "", []
        self.logs: dict[str, str] = {}
        driver.set_active(self)
        flash_attention.capability = lambda device: capability  # what launches ask about their device
        for module in (rms_norm, flash_attention_backward):
            module.processors = lambda device: CARDS[capability].multiprocessors
        self.compile = JITFunction.run
        JITFunction.run = lambda kernel, *arguments, **named: self.launch(kernel, *arguments, **named)

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def launch(self, kernel, *arguments, grid, warmup, **named) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            made = self.compile(kernel, *arguments, grid=grid, warmup=True, **named)
        log = self.logs.setdefault(made.hash, log.getvalue())  # silent if it is compiled already
        registers, spilled = (int(re.search(rf"(\d+) {what}", log)[1]) for what in ("registers", "bytes spill stores"))
        instruction = re.search(r"wgmma|tcgen05\.mma|mma\.sync", made.asm["ptx"])
        facts = made.metadata
        self.rows.append(
            Compiled(
                *(kernel.__name__.strip("_").removesuffix("_kernel"), self.case, self.capability, registers, spilled),
                *(facts.shared, facts.num_warps, math.prod(grid), getattr(facts, "tmem_size", 0)),
                *(sorted(set(re.findall(r"C75\d\d", log))), instruction[0] if instruction else ""),
            )
        )


# ---- launches of real shapes, by tensors that have no memory ---------------------------------------------------------


def empty(*shape: int, dtype: torch.dtype, gradient: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)


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


def launch_ladder(dtype: torch.dtype) -> None:
    square = empty(4096, 4096, dtype=dtype, gradient=False)
    for function in (elu.in_triton, fusion.in_triton):
        function(square)
    for function in (products.naive, products.coalesced):
        function(square, square)
    for tile in (32, 64, 128):
        products.tiled(square, square, tile)


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
    "ladder": {"ladder": (launch_ladder,)},  # not in float64
}  # fmt: skip


def compile_cases(capability: int, dtype: torch.dtype, groups: list[str]) -> list[Compiled]:
    """Compile the launches of these groups for a card."""
    compiler = Compiler(capability)
    for group in groups:
        for case, (launch, *shape) in CASES[group].items():
            compiler.case = case
            launch(dtype, *shape)
    return compiler.rows


def cells(row: Compiled) -> tuple:
    resident = row.resident or "none"
    notes = ", ".join([*row.warnings, row.products])
    sizes = row.registers, row.spilled, f"{row.shared / KIB:.1f}", row.warps
    return f"{row.kernel}, {row.case}", *sizes, resident, row.resident * row.warps, f"{row.waves:.2f}", notes


@one_line_errors
def main() -> None:
    """Print how kernels compile, as the command line asks."""
    parser = OneLineParser(description=summary(__doc__))
    parser.add_argument("--card", type=int, default=90, choices=CARDS, help="compute capability; 90 is Hopper")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="groups of kernels")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--json", action="store_true", help="print rows for a program instead of a table")
    arguments = parser.parse_args()
    rows = compile_cases(arguments.card, getattr(torch, arguments.dtype), arguments.only)
    if arguments.json:
        print(json.dumps(rows))
    else:
        title = f"Compiled by Triton {triton.__version__} for {CARDS[arguments.card].name}, {arguments.dtype}"
        header = "", "registers", "spilled", "shared KiB", "warps", "resident", "their warps", "waves", ""
        print_table(title, header, map(cells, rows))


if __name__ == "__main__":
    sys.exit(main())
