"""Naive attention against flash attention: what each keeps in memory, and what each moves.

Naive attention writes the matrix of all scores, its masked and its normalized version. FlashAttention never does: it
goes through the keys in blocks, keeps a running maximum and sum per query (the online softmax), and computes the scores
again in the backward. Here it is PyTorch's kernel; step 8 has one of its own in kernels/.
"""

import torch
import torch.nn.functional as F

from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.measure.gpu_time import seconds_of
from step01_single_gpu.running.memory_meter import MemoryMeter
from step08_5d.gpu_ladder.machine import DEVICE
from step08_5d.gpu_ladder.traffic import BytesMoved
from step08_5d.kernels.launching import HAS_TRITON, ceil_div

HEADS, WIDTH = 4, 64
QUERIES = 128  # of a block in flash attention's kernels


def naive(q, k, v):
    """Causal attention, an operator at a time; q, k and v are (batch, heads, tokens, width)."""
    tokens = q.shape[-2]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def flash(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def matrix_bytes(tokens: int, heads: int = HEADS, itemsize: int = 4) -> int:
    """One tokens x tokens matrix for every head: the scores, or what is made of them."""
    return heads * tokens * tokens * itemsize


def rows_bytes(tokens: int, heads: int = HEADS, width: int = WIDTH, itemsize: int = 4) -> int:
    """One tensor the size of q: also k, v, the output, and a gradient of any of them."""
    return heads * tokens * width * itemsize


def naive_peak(tokens: int) -> int:
    """Three matrices at the peak, in the backward: the probabilities, their gradient, and that of the scores.

    Beside them the mask (a byte for each pair of tokens), and q, k, v, the scaled q, the output, its gradient and the
    gradient of v.
    """
    return 3 * matrix_bytes(tokens) + tokens * tokens + 7 * rows_bytes(tokens)


def flash_peak(tokens: int) -> int:
    """No matrix: q, k, v, the output, the four gradients, and one log-sum-exp per query."""
    return 8 * rows_bytes(tokens) + HEADS * tokens * 4


def naive_moved(tokens: int) -> int:
    """Forward: the two products write and read a matrix, mask and softmax both do both; the mask is made and read."""
    mask = 4 * tokens * tokens  # ones writes it, triu reads and writes it, masked_fill reads it
    rows = 2 + 2 + 2  # scaling q; q and k; v and the output
    return 6 * matrix_bytes(tokens) + mask + rows * rows_bytes(tokens)


def flash_moved(tokens: int) -> float:
    """Forward: q and the output once; a block of queries reads the keys and values before it, half of all on average.

    Predicted. A part of these reads meets the L2 cache, so that memory itself moves less.
    """
    return 2 * rows_bytes(tokens) + 2 * rows_bytes(tokens) * (ceil_div(tokens, QUERIES) + 1) / 2 + HEADS * tokens * 4


def peak_bytes(attention, tokens: int) -> int:
    """Peak memory of a forward and backward on the CPU, by its allocator, q, k and v and the gradient included."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(1, HEADS, tokens, WIDTH, generator=generator) for _ in range(4))
    inputs = [each.requires_grad_() for each in (q, k, v)]
    with MemoryMeter("cpu").measure([q, k, v, gradient]) as found:
        torch.autograd.grad(attention(*inputs), inputs, gradient)
    return found.peak_bytes


def attention(quick: bool) -> None:
    """Peak memory of naive and flash attention over the length of the sequence; bytes moved; times on a GPU."""
    lengths = (128, 256, 512) if quick else (128, 256, 512, 1024, 2048)
    found = {tokens: (peak_bytes(naive, tokens), peak_bytes(flash, tokens)) for tokens in lengths}
    rows = [(f"naive, {tokens:,} tokens", naive_peak(tokens), found[tokens][0]) for tokens in lengths]
    rows += [(f"flash, {tokens:,} tokens", flash_peak(tokens), found[tokens][1]) for tokens in lengths]
    setting = f"{HEADS} heads of {WIDTH}, float32"
    print_comparison(f"Peak MiB of forward and backward, {setting}, on the CPU", "", rows, ".2f", 2**20)
    moved = []
    for tokens in lengths:
        q, k, v = (torch.empty(1, HEADS, tokens, WIDTH, device="meta") for _ in range(3))
        with BytesMoved() as counted:
            naive(q, k, v)
        moved.append((f"naive, {tokens:,} tokens", naive_moved(tokens), counted.total))
    print_comparison(f"MiB that the naive forward moves, {setting}", "", moved, ".2f", 2**20)
    rows = [(f"{tokens:,}", f"{naive_moved(tokens) / flash_moved(tokens):.1f}") for tokens in (1024, 4096, 16384)]
    print_table("Bytes moved, naive / flash, predicted", ("tokens", "ratio"), rows)
    _draw(found)
    if DEVICE.type == "cuda" and HAS_TRITON:
        _times((1024, 2048) if quick else (1024, 2048, 4096, 8192, 16384))


def _times(lengths: tuple[int, ...]) -> None:
    """Forward and backward on the GPU, in bfloat16, with the heads of Llama 3 8B."""
    rows = []
    for tokens in lengths:
        inputs = [torch.randn(1, 32, tokens, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        inputs = [each.requires_grad_() for each in inputs]
        flops = 3.5 * 2 * 32 * tokens * tokens * 128  # half of 4 s^2 d in the forward; 2.5 times that in the backward
        rows += [
            (f"{function.__name__}, {tokens:,} tokens", *_timed(function, inputs, flops)) for function in (naive, flash)
        ]
    print_table("Forward and backward, 32 heads of 128, bfloat16", ("", "ms", "TFLOP/s", "peak GiB"), rows)


def _timed(function, inputs: list[torch.Tensor], flops: float) -> tuple[str, str, str]:
    """The cells ms, TFLOP/s and GiB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        seconds = seconds_of(lambda *args: torch.autograd.grad(function(*args).sum(), args), *inputs)
    except torch.OutOfMemoryError:
        return "out of memory", "-", "-"
    peak = torch.cuda.max_memory_allocated() / 2**30
    return f"{1e3 * seconds:.2f}", f"{flops / seconds / 1e12:.0f}", f"{peak:.2f}"


def _draw(found: dict[int, tuple[int, int]]) -> None:
    """Dots are measured, lines predicted; the dashed lines go on where a laptop ends."""
    figure, axis = new_figure(width=7, height=4)
    last = max(found)
    curve = [2**n for n in range(7, 16)]
    for index, (name, peak) in enumerate((("naive", naive_peak), ("flash", flash_peak))):
        colour = (COLOURS["activations"], COLOURS["parameters"])[index]
        for reach, style in (([n for n in curve if n <= last], "-"), ([n for n in curve if n >= last], "--")):
            axis.plot(reach, [peak(n) / 2**20 for n in reach], style, color=colour, linewidth=1.5)
        axis.plot(list(found), [pair[index] / 2**20 for pair in found.values()], "o", color=colour)
        axis.annotate(name, (8192, peak(8192) / 2**20), (-8, 10), textcoords="offset points", color=colour, ha="right")
    axis.plot([], [], "o", color="black", label="measured on the CPU")
    axis.plot([], [], "-", color="black", label="predicted")
    axis.plot([], [], "--", color="black", label="predicted, not measured")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(curve, [f"{n:,}" for n in curve], fontsize=8)
    axis.set(xlabel="tokens of the sequence", ylabel="peak memory, MiB")
    axis.set_title(f"attention, forward and backward: {HEADS} heads of {WIDTH}, float32", fontsize=10)
    axis.legend()
    save_figure(figure, "attention_memory")
