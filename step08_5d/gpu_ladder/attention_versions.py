"""FlashAttention 1, 2 and 3 by work and bytes, and FlexAttention: one mask, as a matrix and as a function.

Everything about the three versions is predicted, from the algorithms as their papers give them. The forward of one
head, not causal, in 16 bits; blocks of 128 queries and 128 keys.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from common.drawing.tables import print_comparison, print_table
from common.measure.gpu_time import seconds_of
from step08_5d.gpu_ladder import roofline
from step08_5d.gpu_ladder.machine import DEVICE
from step08_5d.kernels.launching import ceil_div

BLOCK = 128  # queries, and keys, of a tile
SOFTMAX = 5  # operations per score beside its exponential: scale, maximum, subtract, sum, convert


class RatesPerClock(NamedTuple):
    """What a multiprocessor does in a cycle: FLOPs of 16-bit products, other operations, exponentials.

    From the CUDA C++ Programming Guide's table of arithmetic throughput, and from the data sheets' peaks.
    """

    products: int
    operations: int
    exponentials: int
    multiprocessors: int


RATES = {"A100": RatesPerClock(2048, 64, 16, 108), "H100": RatesPerClock(4096, 128, 16, 132)}


class Version(NamedTuple):
    """What distinguishes a version.

    rescales: operations on each number of the output's block, each time that it meets a block of keys.
    overlaps: whether exponentials and other operations run while the tensor cores multiply.
    """

    rescales: int
    overlaps: bool


VERSIONS = {  # 1 scales the old output and the new, adds, and divides by the sum; from 2 on it scales the old one only
    "FlashAttention-1": Version(4, False),
    "FlashAttention-2": Version(1, False),
    "FlashAttention-3": Version(1, True),
}


def share_of_peak(version: str, width: int, gpu: str) -> float:
    """Share of the tensor cores' peak: of the cycles that a score takes, those of its products.

    Where a version does not plan to overlap, we add up all cycles; yet warps that are ready overlap by themselves.
    """
    rates, (rescales, overlaps) = RATES[gpu], VERSIONS[version]
    products = 4 * width / rates.products
    others = 1 / rates.exponentials + (SOFTMAX + rescales * width / BLOCK) / rates.operations
    return products / max(products, others) if overlaps else products / (products + others)


def bytes_asked(version: str, tokens: int, width: int) -> int:
    """Bytes that the forward asks of memory or the L2 cache: the inner loop's blocks again in every turn of the outer.

    Version 1 goes through the keys outside and the queries inside, so the output and its two statistics are read and
    written in every turn (but for the first, that only writes). From 2 on queries are outside, and the output is
    written once, with one statistic.
    """
    row, statistic, turns = 2 * tokens * width, 4 * tokens, ceil_div(tokens, BLOCK)
    if version == "FlashAttention-1":
        return 2 * row + turns * (2 * row + 2 * statistic) + (turns - 1) * (row + 2 * statistic)
    return 2 * row + statistic + turns * 2 * row


def programs(version: str, tokens: int, heads: int) -> int:
    """Programs of a launch for one sequence: from version 2 on each block of queries has one."""
    return heads if version == "FlashAttention-1" else heads * ceil_div(tokens, BLOCK)


MEMORY = 1.5e12  # bytes/s of the A100 in the paper's figure (19e12 of its SRAM)
NAIVE_MATRICES = 8  # the product writes the scores, mask, softmax and dropout read and write them, the next one reads


def gpt2_speedup(masked: bool, tokens: int = 1024, width: int = 64) -> float:
    """How many times as fast as five kernels FlashAttention-1 is on an A100, forward, in 16 bits.

    The kernels wait for memory: the matrix of scores passes `NAIVE_MATRICES` times, dropout's mask of bytes once.
    FlashAttention waits for arithmetic.

    Args:
        masked: whether it leaves out the half of the scores that a causal mask drops.
    """
    flops, least = roofline.attention(tokens, width, matrices=NAIVE_MATRICES)
    naive = (least + tokens * tokens) / MEMORY
    peak = roofline.peak_flops("A100") * share_of_peak("FlashAttention-1", width, "A100")
    return naive / (flops / (2 if masked else 1) / peak)


# ---- one mask, written both ways -------------------------------------------------------------------------------------


def window_of_documents(documents: torch.Tensor, window: int) -> Callable:
    """The mask as a function. A query sees itself and the `window` - 1 tokens before it, in its own document.

    documents: (tokens,), the number of each token's document.
    """

    def sees(batch, head, query, key):
        return (key <= query) & (query - key < window) & (documents[query] == documents[key])

    return sees


def by_matrix(q, k, v, sees: Callable) -> torch.Tensor:
    """Attention with the mask as a matrix of tokens x tokens; q, k, v: (batch, heads, tokens, width)."""
    tokens = q.shape[-2]
    matrix = create_mask(sees, None, None, tokens, tokens, device=q.device.type)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=matrix)


def by_function(q, k, v, blocks: BlockMask, flex: Callable = flex_attention) -> torch.Tensor:
    """The same with FlexAttention. On a GPU, `flex` is compiled: the function becomes part of the kernel."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # then it is slow, but right
        return flex(q, k, v, block_mask=blocks)


def blocks_of(sees: Callable, tokens: int, device: str) -> BlockMask:
    """Which blocks of 128 x 128 scores the mask leaves empty, which full, and which need the function."""
    return create_block_mask(sees, None, None, tokens, tokens, device=device, BLOCK_SIZE=BLOCK)


def documents_of(tokens: int, length: int) -> torch.Tensor:
    """Documents of equal length, one after the other."""
    return torch.arange(tokens, device=DEVICE) // length


def predicted_blocks(tokens: int, window: int, length: int) -> int:
    """Blocks that are not empty, if blocks divide documents and documents the sequence, and a window is whole blocks.

    The i-th block of queries in its document sees its own block, and up to window / 128 before it.
    """
    rows, reach = length // BLOCK, window // BLOCK
    return tokens // length * sum(min(i, reach) + 1 for i in range(rows))


def attention_versions(quick: bool) -> None:
    """FlashAttention 1, 2, 3 by work and bytes, predicted; FlexAttention's blocks for a mask."""
    tokens, width, heads = 16384, 128, 32
    naive = f"{1e-6 * roofline.attention(tokens, width, matrices=6)[1]:,.0f}"
    rows = [("naive", *["-"] * 5, naive, "-")]
    for name in VERSIONS:
        shares = [f"{share_of_peak(name, each, gpu):.0%}" for gpu in RATES for each in (64, width)]
        asked = f"{1e-6 * bytes_asked(name, tokens, width):,.0f}"
        rows.append((name, VERSIONS[name].rescales, *shares, asked, f"{programs(name, tokens, heads):,}"))
    header = ("", "rescales", *(f"{gpu}, d {each}" for gpu in RATES for each in (64, width)), "MB asked", "programs")
    print_table(f"Share of the peak; MB of a head and programs for {tokens:,} tokens", header, rows)
    speedups = [f"{gpt2_speedup(masked):.1f}" for masked in (False, True)]
    rows = [("GPT-2's attention, 1,024 tokens, d 64, A100", *speedups, "7.6")]
    print_table("FlashAttention-1, times as fast as naive", ("", "all scores", "half of them", "published"), rows)
    tokens, window, length = (1024, 256, 512) if quick else (8192, 1024, 4096)
    sees = window_of_documents(documents_of(tokens, length), window)
    blocks, causal, whole = blocks_of(sees, tokens, DEVICE.type), tokens // BLOCK, (tokens // BLOCK) ** 2
    full = int(blocks.full_kv_num_blocks.sum())
    found = int(blocks.kv_num_blocks.sum()) + full
    compared = [("blocks computed", predicted_blocks(tokens, window, length), found)]
    print_comparison(f"A window of {window:,} in documents of {length:,}, {tokens:,} tokens", "", compared)
    print(f"  of {whole:,} blocks; causal would be {causal * (causal + 1) // 2:,}; {full:,} need no mask")
    stored = sum(each.nbytes for each in blocks.as_tuple() if isinstance(each, torch.Tensor))
    print(f"  the mask: {tokens**2:,} bytes as a matrix, {stored:,} as lists of blocks")
    q, k, v = (torch.randn(1, 1, 1024, 64, dtype=torch.float32, device=DEVICE) for _ in range(3))
    sees = window_of_documents(documents_of(1024, 512), 256)
    difference = (by_matrix(q, k, v, sees) - by_function(q, k, v, blocks_of(sees, 1024, DEVICE.type))).abs().max()
    print(f"  both ways differ by {difference:.0e} at most (1,024 tokens, not compiled)")
    if DEVICE.type == "cuda":
        rows = [(name, f"{1e3 * seconds:.2f}") for name, seconds in measure(tokens, window, length).items()]
        print_table("Forward, 32 heads of 128, bfloat16", ("", "ms"), rows)


def measure(tokens: int, window: int, length: int) -> dict[str, float]:
    """Seconds on this GPU of PyTorch's attention with a matrix, of FlexAttention compiled, and of causal flash."""
    q, k, v = (torch.randn(1, 32, tokens, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    sees = window_of_documents(documents_of(tokens, length), window)
    matrix = create_mask(sees, None, None, tokens, tokens, device=DEVICE.type)
    blocks, flex = blocks_of(sees, tokens, DEVICE.type), torch.compile(flex_attention, dynamic=False)
    ways = {
        "mask as a matrix": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=matrix),
        "mask as a function, FlexAttention": lambda: by_function(q, k, v, blocks, flex),
        "causal, no other mask": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    return {name: seconds_of(way) for name, way in ways.items()}
