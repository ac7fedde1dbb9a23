"""Puts the kernels of this step into the model (`--fused`), or compiles what they would do.

Small operations move most of the bytes of a layer: the norm with the addition before it, the rotation of queries and
keys, and the activation of the MLP. Eager PyTorch reads and writes memory for every `*` and `+` in them. A kernel
reads each input once and writes each output once, and so does the code that `torch.compile` makes of the same formulas.

None of these talks to other ranks or registers hooks. So they go into the model's seams, and no mechanism of an earlier
step notices, if they go there before ZeRO does: `Norm` takes over the weight of the norm that it replaces, and ZeRO has
hooks on modules. (`HeadAndLoss` owns weights, too, and talks as step 4's head and loss do.) Products of matrices add
their results to the sums of gradients (`weight_sums.py`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from common.config import TrainConfig
from common.errors import UsageError, first_line
from common.group import Group
from common.launching.system import TRITON, require
from common.layers import RMSNorm, rotate
from common.model import ATTENTION_CORES, Decoder, SwiGLU, fused_attention, silu_and_multiply
from common.process_groups import Mesh
from step06_context_parallel.attention_block import NaiveKernels
from step06_context_parallel.context_parallel import replaces_attention
from step07_expert_parallel.experts import Experts
from step08_5d.kernels import linear_cross_entropy, rms_norm, rotary, swiglu
from step08_5d.kernels.flash_attention import WIDEST_HEAD, attend
from step08_5d.kernels.flash_attention_backward import attend_backward, flash_attention_core
from step08_5d.kernels.launching import capability
from step08_5d.kernels.merge import merge
from step08_5d.weight_sums import sum_in_products


class SmallOperations(NamedTuple):
    """What computes the small operations of a layer; see the files in kernels/ for their arguments."""

    rms_norm: Callable
    add_rms_norm: Callable
    rotate: Callable
    activation: Callable


IN_TRITON = SmallOperations(rms_norm.rms_norm, rms_norm.add_rms_norm, rotary.rotary, swiglu.swiglu)
REFERENCES = SmallOperations(rms_norm.rms_norm_reference, rms_norm.add_rms_norm_reference, rotate, silu_and_multiply)


@functools.cache
def compiled_operations() -> SmallOperations:
    """The same formulas in PyTorch, compiled when they are first used."""
    return SmallOperations(*(_compiled(function) for function in REFERENCES))


def _compiled(function: Callable) -> Callable:
    """The function, compiled at its first call, which raises UsageError if that cannot be done: without g++, say."""
    from torch._dynamo.exc import BackendCompilerFailed

    compiled = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*arguments, **options):
        try:
            return compiled(*arguments, **options)
        except BackendCompilerFailed as error:
            what = f"--compile: PyTorch cannot compile {function.__name__}"
            raise UsageError(f"{what} ({first_line(error.inner_exception)})") from error

    return call


class BlockKernels(NaiveKernels):
    """The kernels of this step for step 6's blocks of attention."""

    narrow_values = False
    attend, attend_backward, merge = staticmethod(attend), staticmethod(attend_backward), staticmethod(merge)


def launches_kernels(config: TrainConfig, device: torch.device) -> bool:
    """Whether the Triton kernels are taken. On the CPU they run in an interpreter, which is for tests.

    Triton's tensor cores begin with Ampere. For a GPU before it, it multiplies without them, in tiles that neither fit
    into its registers nor into its shared memory: there PyTorch computes. Raises UsageError where Triton is missing.
    """
    taken = config.fused and device.type == "cuda" and capability(device) >= 80
    if taken:
        require("step 8 on a GPU, unless with --no-fused,", TRITON)
    return taken


def apply_kernels(model: Decoder, config: TrainConfig, mesh: Mesh) -> None:
    """Let kernels compute a `Decoder`: its small operations (or compile these), experts, head with loss, attention.

    Raises UsageError for --own-attention where no kernel is launched, and ValueError if context parallelism has yet to
    replace the attention, or experts an MLP, or if ZeRO's hooks are on the modules already that are replaced here.
    """
    cores = [layer.attention.core for layer in model.layers.values()]
    if replaces_attention(config) and any(core in ATTENTION_CORES.values() for core in cores):
        raise ValueError("apply_kernels comes after apply_context_parallel, into whose attention it puts kernels")
    if any(config.model_config.has_experts(int(i)) and isinstance(model.layers[i].mlp, SwiGLU) for i in model.layers):
        raise ValueError("apply_kernels comes after apply_experts, for whose products there are kernels as well")
    if any(hasattr(weight, "sums") for weight in model.parameters()):  # of gradients
        raise ValueError("apply_kernels comes before ZeRO, whose hooks are on modules that it replaces")
    in_kernels = launches_kernels(config, mesh.device)
    if config.own_attention and not in_kernels:
        raise UsageError(
            "--own-attention: our kernels run on a GPU since Ampere (compute capability 8.0), and with --fused"
        )
    if in_kernels:
        apply_operations(model, IN_TRITON)
    elif config.compile:
        apply_operations(model, compiled_operations())
    flash = in_kernels and config.attention == "fused" and config.model_config.head_width <= WIDEST_HEAD
    for layer in model.layers.values():
        if flash and layer.attention.core is not fused_attention:  # step 6's, which works in blocks
            layer.attention.core = functools.partial(layer.attention.core, kernels=BlockKernels())
        elif flash and config.own_attention:  # or PyTorch chooses among kernels that are faster (as published)
            layer.attention.core = flash_attention_core
    if config.fused and model.has_head:
        model.loss = HeadAndLoss(model.head, config.model_config.vocab, mesh.tp, in_kernels)
        model.head = nn.Identity()  # hidden states go to the loss: logits of all tokens at once would be too large
    if in_kernels:
        sum_in_products(model)


def apply_operations(model: Decoder, operations: SmallOperations) -> None:
    """Replace norms, rotation and activation."""
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm):
            model.set_submodule(name, Norm(module, operations))
    for layer in model.layers.values():
        layer.attention.rotate = operations.rotate
        for module in layer.mlp.modules():
            # A dense MLP, shared experts, and experts. These have other numbers of rows in every step: a compiler would
            # begin anew for each
            if hasattr(module, "activation") and (operations is IN_TRITON or not isinstance(module, Experts)):
                module.activation = operations.activation


class Norm(nn.Module):
    """RMSNorm, alone or after an addition."""

    def __init__(self, norm: RMSNorm, operations: SmallOperations):
        super().__init__()
        self.weight, self.eps, self.operations = norm.weight, norm.eps, operations

    def forward(self, x):  # (..., size) -> (..., size)
        return self.operations.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x, residual):
        """Return the norm of x + residual, and x + residual."""
        return self.operations.add_rms_norm(x, residual, self.weight, self.eps)


class HeadAndLoss(nn.Module):
    """The head and the loss in one: logits exist for one chunk of the tokens at a time."""

    def __init__(self, head: nn.Linear, vocab: int, tp: Group, in_kernels: bool):
        super().__init__()
        self.weight, self.split = head.weight, getattr(head, "split", None)  # how tensor parallelism has divided it
        self.settings = vocab, tp, in_kernels

    def forward(self, x, targets):  # (batch, seq, hidden), (batch, seq) -> (), the sum over tokens
        if self.split:
            x = self.split.begin_sublayer(x)
        return linear_cross_entropy.linear_cross_entropy(x, self.weight, targets, *self.settings)

    def weighted(self, x, targets, factors):
        """Return the sum over tokens times their factors, and their losses: see `weighted_linear_cross_entropy`."""
        x = self.split.begin_sublayer(x) if self.split else x
        return linear_cross_entropy.weighted_linear_cross_entropy(x, self.weight, targets, factors, *self.settings)
