"""Gradient accumulation and mixed precision by hand (Micikevicius et al., arXiv:1710.03740).

Parameters and activations have the training type. In bfloat16 and float16
  - gradients of micro-batches are added up in float32 (`GradientSums`),
  - the optimizer updates float32 master weights and hands copies to the model (`Optimizer`): an update smaller than
    half a bfloat16 step would vanish if it were added to the bfloat16 weight itself,
  - float16 scales the loss up, so that small gradients do not flush to zero, and skips steps that overflow
    (`LossScaler`).
In float32 and float64 the master weights are the weights themselves, and none of this costs anything.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from common.checkpoints.boxes import SavedBox
from common.errors import Diverged
from common.layers import at_least_float32
from common.start import environment

Add = Callable[[torch.Tensor, bool], None]  # called as add(total, first): if `first`, it overwrites what `total` holds


class TakesGradients(Protocol):
    """What adds up the gradients of a step's micro-batches, in at least float32: such as `GradientSums`."""

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor | Add, whole: bool = True) -> None:
        """Add one micro-batch's gradient of one parameter to its sum.

        Args:
            gradient: a tensor like the parameter. Or, where a product of matrices can add its result to the sum in one
                go, a function that does so.
            whole: whether no part of it follows. If a weight is used twice and somebody hands over the gradient of one
                use, that of the other one follows in the same backward. (Autograd adds both before it calls a hook.)
        """


def take_gradients(parameters: list[nn.Parameter], sums: TakesGradients) -> None:
    """Pass every gradient to `sums.accumulate(parameter, gradient)` as soon as a backward has computed it.

    `sums` is also an attribute of each parameter: whoever computes a gradient without autograd hands it over there.

    The gradient is taken away from autograd, so only one parameter's gradient in the training type exists at a time.
    Raises ValueError for a frozen parameter, which never has one.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            raise ValueError(f"{parameter.spec.name} is frozen (requires_grad is False): its gradient never comes")
        parameter.sums = sums

    def take(parameter: nn.Parameter) -> None:  # torch passes the parameter, not its gradient
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # a Function that returned None for a weight fires the hook all the same
            sums.accumulate(parameter, gradient)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(take)


class GradientSums:
    """Adds up the gradients of a step's micro-batches in at least float32."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        take_gradients(parameters, self)

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor | Add, whole: bool = True) -> None:
        """See `TakesGradients`. A step's first tensor becomes the sum, uncopied if it is wide."""
        if callable(gradient):
            first = parameter not in self.sums
            if first:
                self.sums[parameter] = torch.empty_like(parameter, dtype=at_least_float32(parameter.dtype))
            gradient(self.sums[parameter], first)
            return
        if parameter in self.sums:
            self.sums[parameter].add_(gradient)
        else:
            self.sums[parameter] = gradient.to(at_least_float32(gradient.dtype))

    def finish(self) -> list[torch.Tensor]:
        """Return the step's gradients, one per parameter (zeros for one that was not used), and start over."""
        sums, self.sums = self.sums, {}
        return [
            sums[each] if each in sums else torch.zeros_like(each, dtype=at_least_float32(each.dtype))
            for each in self.parameters
        ]


class LossScaler:
    """The factor by which losses are multiplied before the backward: adapted to overflows in float16, else 1.

    It doubles after `interval` steps without overflow and halves on overflow. It is a power of two, so scaling and
    unscaling lose no digit. Ten overflows in a row are reported. If the scale has fallen to 1 by then, it is not the
    scale that overflows: no step would ever be taken again, so the run ends.
    """

    def __init__(self, dtype: torch.dtype, interval: int = 2000):
        self.dynamic = dtype == torch.float16
        self.scale = 2.0**16 if self.dynamic else 1.0
        self.interval, self.good_steps, self.skipped = interval, 0, 0  # steps in a row

    def overflow(self, grad_norm: torch.Tensor) -> torch.Tensor | None:
        """Return 1 if the step with this global gradient norm must be skipped and else 0, a 0-d float32 tensor.

        A single infinite or undefined gradient makes the global norm infinite or undefined, on all ranks alike. For
        types other than float16 return None: no step is skipped.
        """
        return (~grad_norm.isfinite()).float() if self.dynamic else None

    def accept(self, grad_norm: float) -> bool:
        """Return whether the step with this global gradient norm was taken, and adjust the scale for the next one.

        Raises Diverged, alike on all ranks, when ten steps in a row were skipped and the scale is down to 1.
        """
        if not self.dynamic:
            return True
        finite = math.isfinite(grad_norm)
        self.good_steps, self.skipped = (self.good_steps + 1, 0) if finite else (0, self.skipped + 1)
        if not finite:
            skipped = f"float16 has skipped {self.skipped} steps in a row, whose gradients were infinite or NaN"
            if self.skipped >= 10 and self.scale == 1:
                raise Diverged(f"{skipped}, and the loss scale is down to 1; --dtype bfloat16 has a wider range")
            if self.skipped == 10 and environment().rank == 0:
                print(f"warning: {skipped}; the loss scale was {self.scale:g}", file=sys.stderr)
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0
        return finite


class Optimizer:
    """AdamW or SGD on the master weights of `parameters`, which need a spec. Only matrices decay.

    Args:
        parameters: the tensors that this rank updates: weights, or pieces of them. A rank may have none.
        dtype: the training type, which all of them have.
        kind: adamw or sgd.
        betas, eps: AdamW's; by default those of Llama 2 (arXiv:2307.09288, section 2.2).
        buffers: further tensors with a spec, which others update: they are saved and loaded with the rest.
        scaler: the factor of the losses, whose gradients `step` receives; by default that of `dtype`.

    masters     the parameters' values in at least float32: the optimizer updates these
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        weight_decay: float = 0.0,
        kind: str = "adamw",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-5,
        buffers: Sequence[torch.Tensor] = (),
        scaler: LossScaler | None = None,
    ):
        self.parameters, self.buffers, self.float64 = parameters, buffers, dtype == torch.float64
        self.weight_decay, self.kind, self.betas, self.eps = weight_decay, kind, betas, eps
        self.scaler = scaler or LossScaler(dtype)
        # .to() returns the weight itself in float32 and float64, a copy in narrower types
        self.masters = [parameter.detach().to(at_least_float32(parameter.dtype)) for parameter in parameters]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # of each master, by name: see `state_of`

    @torch.no_grad()
    def step(
        self,
        gradients: list[torch.Tensor],
        lr: float,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update at learning rate `lr` with `factor` times the gradients: clipping and unscaling in one.

        If `skip` is 1, nothing changes. Both are 0-d tensors on the device of the gradients: the fused kernel reads
        them there, so the host need not wait for the norm that they come from. There AdamW also counts its updates.
        """
        if not self.masters:
            return
        if factor is not None and self.float64:  # the kernel would take it as float32
            torch._foreach_mul_(gradients, factor)
            factor = None
        scale = None if factor is None else (1 / factor).float()  # which the kernel divides gradients by
        triples = list(zip(self.parameters, self.masters, gradients, strict=True))
        for decays, weight_decay in ((True, self.weight_decay), (False, 0.0)):
            masters = [master for parameter, master, _ in triples if parameter.spec.decay == decays]
            chosen = [gradient for parameter, _, gradient in triples if parameter.spec.decay == decays]
            settings = {"lr": lr, "weight_decay": weight_decay, "maximize": False}
            settings |= {"fused": True, "grad_scale": scale, "found_inf": skip}
            # As functions: torch.optim.AdamW.step would import torch's compiler, half of the CPU time of a start
            if self.kind == "adamw":
                states = [self.state_of(master) for master in masters]
                mean, square, counts = ([each[key] for each in states] for key in ("exp_avg", "exp_avg_sq", "step"))
                (beta1, beta2), more = self.betas, {"amsgrad": False, "eps": self.eps}
                adamw(masters, chosen, mean, square, [], counts, beta1=beta1, beta2=beta2, **more, **settings)
            else:
                sgd(masters, chosen, [], momentum=0.0, dampening=0.0, nesterov=False, **settings)
        self._copy_to_parameters()

    def _copy_to_parameters(self) -> None:
        """Round the masters to the parameters, unless they are the same tensors. One launch for many on CUDA."""
        if self.masters and self.masters[0].dtype != self.parameters[0].dtype:
            torch._foreach_copy_(self.parameters, self.masters)

    def state_of(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what AdamW keeps for a master weight, zeros at first: exp_avg, exp_avg_sq, step. SGD keeps nothing."""
        state = self.state.setdefault(master, {})
        if self.kind == "adamw" and not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def slices(self) -> list[SavedBox]:
        """Return the boxes of master weights and moments, which `checkpoint.save` reads and `checkpoint.load` fills."""
        result = [box for each in self.buffers for box in SavedBox.of("parameter", each.spec, each)]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            spec, state = parameter.spec, self.state_of(master)
            tensors = {"parameter": master} | {key: state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}
            for kind, tensor in tensors.items():
                result += SavedBox.of(kind, spec, tensor)
        return result

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """Take over what `checkpoint.load` has filled: `updates` steps were taken, and the model gets its weights."""
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(updates)
        self._copy_to_parameters()
