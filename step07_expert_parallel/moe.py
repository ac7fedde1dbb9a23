"""A mixture of experts: many SwiGLUs in the place of one, of which every token passes through a few.

Sparsely-gated experts: Shazeer et al., arXiv:1701.06538; in every layer of a transformer: Switch, arXiv:2101.03961;
the two shapes built here: Mixtral, arXiv:2401.04088, and DeepSeekMoE with shared experts, arXiv:2401.06066.

The layer copies each token once for each expert that it has chosen, and sorts the copies by expert. Then the tokens of
an expert are neighbours, and each of an expert's three matrices multiplies them in one go, however many there are. Back
at its place, a token is the sum of the outputs of its experts, weighted by their gates.
"""

from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import TrainConfig, flag_names, spelled
from common.errors import UsageError
from common.model import Decoder, SwiGLU, at_least_float32
from common.parameter import ParameterSpec, attach_specs
from common.process_groups import Mesh
from common.weight_gradients import weight_gradient
from step05_pipeline.stages import DeferringLinear
from step07_expert_parallel.router import Router

# ---- products with one matrix for each expert ------------------------------------------------------------------------


def to_host(counts: Tensor) -> list[int]:
    """Wait for the device until it has computed `counts`. Nothing else in this layer reads numbers from it."""
    return counts.tolist()


class Counts:
    """How many rows belong to each expert, in rows that are sorted by expert. `device`: (experts,) int64."""

    def __init__(self, device: Tensor):
        self.device = device

    @cached_property
    def host(self) -> list[int]:
        """The same, where Python can read it."""
        return to_host(self.device)

    @cached_property
    def ends(self) -> Tensor:
        """Behind the last row of each expert: (experts,) int32, on the device."""
        return self.device.cumsum(0, dtype=torch.int32)

    @property
    def rows(self) -> list[slice]:
        """The rows of each expert."""
        return [slice(*ends) for ends in pairwise(accumulate(self.host, initial=0))]


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these tensors: not float64, no rows at all, or rows of odd lengths."""
    dtypes = (torch.bfloat16,) if tensors[0].is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(each.shape[-1] * each.element_size() % 16 == 0 for each in tensors)
    return tensors[0].dtype in dtypes and len(tensors[0]) > 0 and aligned


def multiply(x: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    """The rows of each expert times its matrix: x (rows, in), matrices (experts, in, out) -> (rows, out)."""
    if _has_kernel(x, matrices, matrices.mT):
        return F.grouped_mm(x, matrices, offs=counts.ends)
    out = x.new_empty(len(x), matrices.shape[-1])
    for rows, matrix in zip(counts.rows, matrices, strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def multiply_transposed(y: Tensor, x: Tensor, counts: Counts) -> Tensor:
    """The transposed rows of each expert in y times those in x: (rows, out), (rows, in) -> (experts, out, in)."""
    if _has_kernel(y, x):
        return F.grouped_mm(y.T, x, offs=counts.ends)
    out = x.new_empty(len(counts.device), y.shape[-1], x.shape[-1])
    for rows, matrix in zip(counts.rows, out, strict=True):
        torch.mm(y[rows].T, x[rows], out=matrix)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.counts = counts
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), gradient = ctx.saved_tensors, gradient.contiguous()  # the kernel takes no expanded tensor
        dw = weight_gradient(weight, gradient, x, partial(multiply_transposed, counts=ctx.counts))
        return multiply(gradient, weight, ctx.counts), dw, None


class Experts(nn.Module):
    """SwiGLUs of the same width, each for the rows of one expert."""

    def __init__(self, count: int, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(count, ffn, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, ffn))

    def forward(self, x, counts):  # (rows, hidden), sorted by expert -> (rows, hidden)
        gate = _GroupedLinear.apply(x, self.gate_proj, counts)
        up = _GroupedLinear.apply(x, self.up_proj, counts)
        return _GroupedLinear.apply(F.silu(gate) * up, self.down_proj, counts)


# ---- to the experts and back -----------------------------------------------------------------------------------------


def sort_by_expert(chosen: Tensor, experts: int, some_dropped: bool) -> tuple[Tensor, Counts]:
    """Sort all choices, (tokens, k), by expert and then by token. What chose number `experts` is left out.

    Returns `order`, for each sorted choice which of the tokens * k it is, and how many chose each expert.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    counts, order = Counts(counts[:experts]), flat.argsort(stable=True)
    return order[: sum(counts.host)] if some_dropped else order, counts


class _Permute(torch.autograd.Function):
    """x (tokens, hidden) -> one row for each choice, in this order. Backward: a token's gradient is a sum of rows."""

    @staticmethod
    def forward(ctx, x, tokens):
        ctx.save_for_backward(tokens)
        ctx.length = len(x)
        return x[tokens]

    @staticmethod
    def backward(ctx, gradient):
        (tokens,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.length, gradient.shape[-1], dtype=at_least_float32(gradient.dtype))
        return total.index_add_(0, tokens, gradient.to(total.dtype)).to(gradient.dtype), None


class _Combine(torch.autograd.Function):
    """The mirror of it: a token is the sum of its rows times their gates, in the type of the gates.

    rows (choices, hidden), gates (choices,) -> (length, hidden). Only the rows are kept for the backward, in their own
    type.
    """

    @staticmethod
    def forward(ctx, rows, gates, tokens, length):
        ctx.save_for_backward(rows, gates, tokens)
        total = gates.new_zeros(length, rows.shape[-1])
        return total.index_add_(0, tokens, rows * gates.unsqueeze(-1))

    @staticmethod
    def backward(ctx, gradient):
        rows, gates, tokens = ctx.saved_tensors
        gradient = gradient[tokens]  # (choices, hidden)
        return (gradient * gates.unsqueeze(-1)).to(rows.dtype), (gradient * rows).sum(-1), None, None


class NoDispatch:
    """How rows get to their experts and back if all experts are on this rank: they are there."""

    def send(self, rows: Tensor, counts: Counts) -> tuple[Tensor, Counts]:
        """Rows sorted by expert, and how many there are for each -> those for the experts of this rank, likewise."""
        return rows, counts

    def send_back(self, rows: Tensor) -> Tensor:
        """The outputs of this rank's experts -> the outputs for the rows that this rank has sent."""
        return rows


class MoE(nn.Module):
    """The layer: x (batch, seq, hidden) -> the gated sum of its tokens' experts, plus the shared experts."""

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None, dispatch: NoDispatch):
        super().__init__()
        self.router, self.experts, self.shared, self.dispatch = router, experts, shared, dispatch

    def forward(self, x):
        chosen, gates = self.router(x)  # (tokens, k)
        shape = self.router.shape
        order, counts = sort_by_expert(chosen, shape.experts, bool(self.router.config.capacity_factor))
        tokens = order // shape.top_k  # of each row
        rows, counts = self.dispatch.send(_Permute.apply(x.flatten(0, 1), tokens), counts)
        rows = self.dispatch.send_back(self.experts(rows, counts))
        out = _Combine.apply(rows, gates.flatten()[order], tokens, len(chosen)).to(x.dtype).view_as(x)
        return out if self.shared is None else out + self.shared(x)


# ---- the model -------------------------------------------------------------------------------------------------------


def apply_experts(model: Decoder, config: TrainConfig, mesh: Mesh) -> None:
    """Replace the MLPs of a `Decoder` on the meta device by experts, in all layers but the first `dense_layers`."""
    shape = config.model_config
    if not shape.experts:
        return
    for name, forbidden in (("ep", True), ("tp", True), ("cp", config.capacity_factor)):  # until they are divided
        if getattr(config, name) > 1 and forbidden:
            raise UsageError(f"--{name} {getattr(config, name)} does not go together with --experts yet")
    for index, layer in model.layers.items():
        if int(index) >= shape.dense_layers:
            residual, name = layer.mlp.down_proj.weight.spec.init_std, f"layers.{index}.mlp"
            router = Router(config, mesh.device, (mesh.tp, mesh.cp))
            with torch.device("meta"):
                experts = Experts(shape.experts, shape.hidden, shape.expert_ffn)
                shared = SwiGLU(shape.hidden, shape.shared_experts * shape.expert_ffn) if shape.shared_experts else None
            for projection, module in list(shared.named_children() if shared else ()):
                shared.set_submodule(projection, DeferringLinear(module.weight))
            layer.mlp = MoE(router, experts, shared, NoDispatch())
            attach_specs(layer.mlp, {"down_proj": residual, "down_proj.weight": residual, "": 0.02})
            for parameter in layer.mlp.parameters():
                parameter.spec.name = f"{name}.{parameter.spec.name}"
            first = mesh.dp_cp.rank == mesh.tp.rank == 0  # every rank has the whole bias
            whole = ((0, shape.experts),)
            router.bias.spec = ParameterSpec(f"{name}.router.bias", (shape.experts,), whole, init_std=0.0, owner=first)


def check_experts(config: TrainConfig) -> None:
    """Raises UsageError if the experts do not fit together, or if a flag about them means nothing."""
    shape = config.model_config
    if not shape.experts:
        for name in flag_names("model", "update", "layout"):
            introduced = TrainConfig.__dataclass_fields__[name].metadata["step"] == 7
            if introduced and getattr(config, name) not in (getattr(TrainConfig, name), 0):
                raise UsageError(f"{spelled(name)} {getattr(config, name)} needs --experts")
        return
    groups, per_token = shape.expert_groups, shape.groups_per_token
    if shape.expert_ffn < 1:
        raise UsageError(f"--expert-ffn {shape.expert_ffn} must be at least 1")
    if shape.dense_layers >= shape.layers:
        raise UsageError(f"--dense-layers {shape.dense_layers} leaves none of --layers {shape.layers} for experts")
    if shape.experts % groups:
        raise UsageError(f"--expert-groups {groups} does not divide --experts {shape.experts}")
    if per_token > groups:
        raise UsageError(f"--node-limit {per_token} exceeds --expert-groups {groups}")
    if shape.top_k > (allowed := shape.experts // groups * per_token):
        raise UsageError(f"--top-k {shape.top_k} exceeds the {allowed} experts of --node-limit {per_token} groups")
