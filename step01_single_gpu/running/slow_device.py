"""A simulated device (`--compute`): products and attention take the time of their FLOPs, as messages do with `--link`.

Several ranks cannot compute side by side on two cores. If they sleep instead, as long as a slow device would compute,
a timeline of theirs shows what it would show with a core for each.
"""

import time
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import collectives
from common.tracing.tracer import Tracer

_aten = torch.ops.aten
# Products, with and without a tensor for the result: the place of the first factor among the arguments
PRODUCTS = {_aten.mm: 0, _aten.bmm: 0} | dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm, _aten.baddbmm_), 1)
PRODUCTS |= {_aten._grouped_mm: 0}  # of experts: each row is multiplied by one of the matrices
# Of attention: the places of q and of `causal`, and the FLOPs of a pair of a query and a key, per number of q
ATTENTION = {_aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 4, 4)}
ATTENTION |= {_aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 7, 10)}


class SlowDevice(TorchDispatchMode):
    """In this context, also in backwards, products and attention take as long as on a device of `speed` FLOP/s.

    Each of them is a phase of the trace, with the argument `op`.
    """

    def __init__(self, speed: float, tracer: Tracer | None = None):
        super().__init__()
        self.speed, self.tracer, self.flops = speed, tracer, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        flops = count(function, args)
        if not flops:
            return function(*args, **(kwargs or {}))
        self.flops += flops
        name = "product" if function.overloadpacket in PRODUCTS else "attention"
        with self.tracer.phase(collectives.phase, op=name) if self.tracer else nullcontext():
            start = time.perf_counter()
            result = function(*args, **(kwargs or {}))
            time.sleep(max(0.0, start + flops / self.speed - time.perf_counter()))
        return result


def count(function, args: tuple) -> float:
    """FLOPs of a matrix product or of attention, where a causal one has half of the pairs; 0 for all else."""
    if function.overloadpacket in PRODUCTS:
        first = PRODUCTS[function.overloadpacket]
        return 2 * args[first].numel() * args[first + 1].shape[-1]
    if function in ATTENTION:
        first, place, each = ATTENTION[function]
        q, k = args[first], args[first + 1]
        causal = len(args) > place and args[place]  # which is not among `args` if it is False
        return each * q.numel() * k.shape[2] * (0.5 if causal else 1)
    return 0
