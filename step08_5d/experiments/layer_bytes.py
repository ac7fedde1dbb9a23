"""What a fused kernel saves: bytes that a layer's small operations move, eager and fused, and what that is in time."""

from collections.abc import Callable

import torch

from common.costs.hardware import H100_TFLOPS, MEMORY_BANDWIDTH
from common.counts import count_parameters
from common.drawing.tables import print_comparison, print_table
from common.layers import rotate
from common.model import silu_and_multiply
from common.presets import PRESETS
from step08_5d.gpu_ladder.traffic import BytesMoved, kernel_traffic
from step08_5d.kernels import adamw, rms_norm, rotary, swiglu
from step08_5d.kernels.launching import HAS_TRITON

MODEL, SEQUENCES, SEQ = PRESETS["smollm-1.7b"], 4, 2048
TOKENS = SEQUENCES * SEQ
SMALL = {"rows": 128, "size": 512}  # for the interpreter
GPU = "H200"
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-5}
# Bytes per element that a kernel has to move, forward and backward, in bfloat16; AdamW: per parameter
LEAST = {
    "RMSNorm": 4 + 6,
    "addition and RMSNorm": 8 + 8,
    "rotation of q and k": 4 + 4,
    "SwiGLU": 6 + 10,
    "AdamW and the rounded copy": 30,
}


def eager(function: Callable, shapes: list[tuple[int, ...]], *settings, tables: int = 0) -> int:
    """Bytes that PyTorch's operators read and write for inputs of these shapes, forward and backward; no memory needed.

    Args:
        tables: so many inputs, the last ones, are float32 and have no gradient.
    """
    with torch.device("meta"):
        moving = [
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes[: len(shapes) - tables]
        ]
        fixed = [torch.empty(shape) for shape in shapes[len(shapes) - tables :]]
        with BytesMoved() as forward:
            outputs = function(*moving, *fixed, *settings)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.empty_like(each) for each in outputs]
        with BytesMoved() as backward:
            torch.autograd.grad(outputs, moving, gradients)
    return forward.total + backward.total


def eager_update(parameters: int) -> int:
    """The same of AdamW's formula as separate operators, with float32 gradients and bfloat16 weights."""
    with torch.device("meta"):
        tensors = [torch.empty(parameters) for _ in range(4)]
        copy, scalars = torch.empty(parameters, dtype=torch.bfloat16), [torch.empty(()) for _ in range(3)]
        with BytesMoved() as moved:
            adamw.adamw_reference(*tensors, copy, *scalars, **SETTINGS)
    return moved.total


def interpreted() -> dict[str, float]:
    """Bytes per element that the Triton kernels load and store, counted while the interpreter runs them."""
    rows, size = SMALL.values()
    found = {}

    def count(name: str, function: Callable, inputs: list[torch.Tensor], elements: int, *settings) -> None:
        inputs = [each.to(torch.bfloat16).requires_grad_() for each in inputs]
        with kernel_traffic() as touched:
            outputs = function(*inputs, *settings)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.grad(outputs, inputs, [torch.randn_like(each) for each in outputs])
        found[name] = touched.bytes / elements

    x = torch.randn(rows, size)
    count("RMSNorm", rms_norm.rms_norm, [x, x[0]], x.numel(), 1e-5)
    count("addition and RMSNorm", rms_norm.add_rms_norm, [x, x, x[0]], x.numel(), 1e-5)
    heads = x.view(1, 8, rows, -1)
    tables = [torch.ones(rows, heads.shape[-1])] * 2
    count("rotation of q and k", rotary.rotary, [heads, heads], 2 * x.numel(), *tables)
    count("SwiGLU", swiglu.swiglu, [x, x], x.numel())
    with kernel_traffic() as touched:
        scalars = [torch.ones(()) for _ in range(3)]
        adamw.adamw(*(torch.ones(x.numel()) for _ in range(4)), x.to(torch.bfloat16).flatten(), *scalars, **SETTINGS)
    found["AdamW and the rounded copy"] = touched.bytes / x.numel()
    return found


def layer_bytes(quick: bool) -> None:
    """Bytes of the small operations of one layer, eager and fused, and what they cost on an H200 (predicted)."""
    if HAS_TRITON:
        counted = interpreted()
        rows = [(name, LEAST[name], counted[name]) for name in LEAST]
        title = (
            f"bytes per element that our kernels move, {SMALL['rows']} x {SMALL['size']}, counted in the interpreter"
        )
        print_comparison(title, "", rows, ",.2f")
    h, heads = (TOKENS, MODEL.hidden), [(SEQUENCES, n, SEQ, MODEL.head_width) for n in (MODEL.heads, MODEL.kv_heads)]
    count = count_parameters(MODEL)
    weights = count.attention + count.dense_mlp + 2 * MODEL.hidden
    sizes = {
        "RMSNorm": TOKENS * MODEL.hidden,
        "addition and RMSNorm": TOKENS * MODEL.hidden,
        "rotation of q and k": TOKENS * (MODEL.heads + MODEL.kv_heads) * MODEL.head_width,
        "SwiGLU": TOKENS * MODEL.ffn,
        "AdamW and the rounded copy": weights,
    }
    moved = {
        "RMSNorm": eager(rms_norm.rms_norm_reference, [h, h[1:]], MODEL.norm_eps),
        "addition and RMSNorm": eager(rms_norm.add_rms_norm_reference, [h, h, h[1:]], MODEL.norm_eps),
        "rotation of q and k": eager(rotate, [*heads, *[(SEQ, MODEL.head_width)] * 2], tables=2),
        "SwiGLU": eager(silu_and_multiply, [(TOKENS, MODEL.ffn)] * 2),
        "AdamW and the rounded copy": eager_update(weights),
    }
    rows, sums = [], [0.0, 0.0]
    for name, size in sizes.items():
        least, ms = size * LEAST[name], 1e3 / MEMORY_BANDWIDTH[GPU]
        cells = (f"{moved[name] / size:.0f}", f"{LEAST[name]}", f"{moved[name] / 1e9:.2f}", f"{least / 1e9:.2f}")
        rows.append((name, *cells, f"{moved[name] * ms:.2f}", f"{least * ms:.2f}", f"{moved[name] / least:.1f}"))
        if not name.startswith("AdamW"):
            sums = [sums[0] + moved[name], sums[1] + least]
    cells = ("", "", *(f"{each / 1e9:.2f}" for each in sums), *(f"{each * ms:.2f}" for each in sums))
    rows.insert(4, ("the four together", *cells, f"{sums[0] / sums[1]:.1f}"))
    header = ("", "bytes per element: eager", "fused", "GB: eager", "fused", "ms: eager", "fused", "times less")
    title = f"one layer of smollm-1.7b, {SEQUENCES} x {SEQ:,} tokens, forward and backward, bfloat16"
    print_table(f"{title}; ms predicted for 4.8 TB/s", header, rows)
    core = 3.5 * 2 * TOKENS * SEQ * MODEL.heads * MODEL.head_width  # causal; the backward takes 5 products for 2
    products = 6 * TOKENS * (count.attention + count.dense_mlp)
    busy = 1e3 * (products + core) / (H100_TFLOPS * 1e12)
    ms = [1e3 * each / MEMORY_BANDWIDTH[GPU] for each in sums]
    before, after = busy + ms[0], busy + ms[1]
    print(f"  predicted: products and attention of the layer at {H100_TFLOPS:.0f} TFLOP/s take {busy:.2f} ms;")
    print(f"  with the four operations eager {before:.2f} ms, fused {after:.2f} ms: {1 - after / before:.0%} less")
