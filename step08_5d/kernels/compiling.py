"""Compiles kernels for a card that is not here, and reads what the compiler says about them.

Triton brings NVIDIA's assembler along. So each launch compiles its kernel for the card that we name, down to machine
code, and does not run it. From the assembler's log we read the registers of a thread, the bytes that did not fit into
them and go to memory (they *spill*), and its warnings. C7510 to C7515 say that Hopper's matrix products, which could
overlap with everything else, are *serialized*: the program waits for each of them. Registers, shared memory and warps
together decide how many programs a multiprocessor can keep at once.

A command that does this has to set TRITON_ALWAYS_COMPILE and TRITON_DUMP_PTXAS_LOG before Triton is loaded.
"""

import contextlib
import io
import json
import math
import re
from typing import NamedTuple

import torch

from common.drawing.tables import print_table
from common.launching.command_line import OneLineParser
from common.launching.system import TRITON, require
from step08_5d.kernels import flash_attention, flash_attention_backward, rms_norm
from step08_5d.kernels.launching import HAS_TRITON, ceil_div, triton

if HAS_TRITON:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

KIB = 1024
TYPES = "bfloat16", "float16", "float32", "float64"
Cases = dict[str, dict[str, tuple]]  # by group and name: a function that launches, and its arguments after the type


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


def empty(*shape: int, dtype: torch.dtype, gradient: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)


def compile_cases(cases: Cases, capability: int, dtype: torch.dtype) -> list[Compiled]:
    """Compile what these cases launch for a card."""
    compiler = Compiler(capability)
    for group in cases.values():
        for case, (launch, *shape) in group.items():
            compiler.case = case
            launch(dtype, *shape)
    return compiler.rows


def cells(row: Compiled) -> tuple:
    resident = row.resident or "none"
    notes = ", ".join([*row.warnings, row.products])
    sizes = row.registers, row.spilled, f"{row.shared / KIB:.1f}", row.warps
    return f"{row.kernel}, {row.case}", *sizes, resident, row.resident * row.warps, f"{row.waves:.2f}", notes


def print_compiled(cases: Cases, description: str, types: tuple[str, ...] = TYPES) -> None:
    """Print how kernels compile, as the command line asks."""
    parser = OneLineParser(description=description)
    parser.add_argument("--card", type=int, default=90, choices=CARDS, help="compute capability; 90 is Hopper")
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases), help="groups of kernels")
    parser.add_argument("--dtype", default="bfloat16", choices=types)
    parser.add_argument("--json", action="store_true", help="print rows for a program instead of a table")
    arguments = parser.parse_args()
    require("the compiler's report", TRITON)
    chosen = {group: cases[group] for group in arguments.only}
    rows = compile_cases(chosen, arguments.card, getattr(torch, arguments.dtype))
    if arguments.json:
        print(json.dumps(rows))
    else:
        title = f"Compiled by Triton {triton.__version__} for {CARDS[arguments.card].name}, {arguments.dtype}"
        header = "", "registers", "spilled", "shared KiB", "warps", "resident", "their warps", "waves", ""
        print_table(title, header, map(cells, rows))
