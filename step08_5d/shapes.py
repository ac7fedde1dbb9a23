"""`--shapes`: what one layer of this run looks like on one rank, with the true shapes, bytes and messages.

The playbook's figure of 5D parallelism writes beside every tensor which dimensions divide it. Here the same is read off
a running layer, in its first forward, and every shape is checked against its formula. So is that of every weight.
"""

import math
import re
from dataclasses import dataclass, replace

from torch import Tensor, nn

from common import collectives
from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import GROUP_NAMES, Mesh
from step08_5d.shapes_picture import draw_shapes

MEANINGS = {
    "b": "micro-batch",
    "s": "tokens of a sequence",
    "h": "hidden width",
    "f": "width of the MLP",
    "d": "width of a head",
    "a": "heads",
    "a_kv": "K/V heads",
    "v": "entries of the vocabulary",
    "E": "experts",
    "fe": "width of an expert",
    "n": "shared experts",
    "k": "experts of a token",
    "rows": "sent here by the routers of `ep`",
    "c": "width of a latent",
    "cq": "width of a query's latent",
    "r": "width of a head that is rotated",
    "dn": "width of a head that is not",
    "dv": "width of a head's value",
}


WEIGHTS = {  # by the ends of their names
    ("embedding.weight", "head.weight"): "v/tp, h",
    ("norm.weight",): "h",
    ("eh_proj.weight",): "h, 2*h",
    ("q_proj.weight",): "a/tp*d, h",
    ("k_proj.weight", "v_proj.weight"): "a_kv/tp*d, h",
    ("o_proj.weight",): "h, a/tp*d",
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"): "f/tp, h",
    ("mlp.down_proj.weight",): "h, f/tp",
    ("router.weight",): "E, h",
    ("shared.gate_proj.weight", "shared.up_proj.weight"): "n*fe, h",
    ("shared.down_proj.weight",): "h, n*fe",
    ("experts.gate_proj", "experts.up_proj"): "E/ep, fe, h",
    ("experts.down_proj",): "E/ep, h, fe",
}
LATENT_WEIGHTS = {
    ("q_proj.weight",): "a/tp*dn+a/tp*r, h",
    ("q_a_proj.weight",): "cq, h",
    ("q_a_norm.weight",): "cq",
    ("q_b_proj.weight",): "a/tp*dn+a/tp*r, cq",
    ("kv_a_proj.weight",): "c+r, h",
    ("kv_a_norm.weight",): "c",
    ("kv_b_proj.weight",): "a/tp*dn+a/tp*dv, c",
    ("o_proj.weight",): "h, a/tp*dv",
}
HEADS = {"queries": "b, a/tp, s/cp, d", "keys": "b, a_kv/tp, s/cp, d", "values": "b, a_kv/tp, s/cp, d"}
HEADS |= {"attention": "b, a/tp, s/cp, d"}
LATENT_HEADS = {"queries": "b, a/tp, s/cp, dn+r", "latents": "b, 1, s/cp, c", "rotated keys": "b, 1, s/cp, r"}
LATENT_HEADS |= {"attention": "b, a/tp, s/cp, dv"}


@dataclass
class ShapeRow:
    """One tensor: its place in the layer, its formula and shape, and what was sent since the tensor before it."""

    place: str
    formula: str
    shape: tuple[int, ...]
    bytes: int
    calls: list[collectives.Call]

    @property
    def sent(self) -> list[tuple[str, str, int, int]]:
        """(operation, group, its size, bytes sent) of each call. Messages that travel together are one exchange.

        Before tokens travel, ranks tell each other how many have chosen each expert: these integers are its counts.
        """
        result = []
        for call in self.calls:
            op = "exchange" if call.peer is not None else call.op.replace("_", "-")
            op += " of counts" if call.dtype == "int64" else ""
            if op == "exchange" and result and result[-1][:2] == (op, call.group):
                call = replace(call, bytes=call.bytes + result.pop()[-1])
            result.append((op, call.group, call.group_size, call.bytes))
        return result


def letters(config: TrainConfig) -> dict[str, int]:
    """What the letters of the formulas stand for."""
    model = config.model_config
    names = {"b": config.micro_batch, "s": config.seq_len, "h": model.hidden, "f": model.ffn, "d": model.head_width}
    names |= {"a": model.heads, "a_kv": model.kv_heads, "E": model.experts, "k": model.top_k, "fe": model.expert_ffn}
    names |= {"v": model.vocab, "n": model.shared_experts}
    if latent := model.latent:
        names |= {"c": latent.kv_rank, "cq": latent.q_rank, "r": latent.rope_dim}
        names |= {"dn": latent.nope_dim, "dv": latent.value_dim}
    return names | {"tp": config.tp, "cp": config.cp, "ep": config.ep}


def evaluate(formula: str, names: dict[str, int]) -> tuple[int, ...]:
    """The numbers behind "b, s/cp, a/tp*d+r". A division rounds up: ranks share a K/V head if there are too few of
    them, and the vocabulary is padded."""

    def factor(text: str) -> int:
        count, *divisors = (int(each) if each.isdigit() else names[each] for each in text.split("/"))
        return -(-count // math.prod(divisors))

    sizes = (size.split("+") for size in formula.split(", "))
    return tuple(sum(math.prod(map(factor, term.split("*"))) for term in terms) for terms in sizes)


def check_weights(stages: list[Decoder], config: TrainConfig) -> list[ShapeRow]:
    """Compare each weight of this rank with its formula. Returns the rows of the first layer, and of the model's ends.

    Raises AssertionError if a shape is not what its formula says, or if a weight has no formula.
    """
    names, rows = letters(config), {}
    formulas = WEIGHTS | (LATENT_WEIGHTS if config.model_config.latent else {})
    formulas = {end: formula for ends, formula in formulas.items() for end in ends}
    for stage in stages:
        for name, weight in stage.named_parameters():
            name = name.replace("loss.", "head.")  # it may hold the head
            end = max((end for end in formulas if name.endswith(end)), key=len, default=None)
            if end is None:
                raise AssertionError(f"{name} has no formula")
            expected = evaluate(formulas[end], names)
            if tuple(weight.shape) != expected:
                raise AssertionError(f"{name}: {tuple(weight.shape)}, but ({formulas[end]}) is {expected}")
            place = re.sub(r"^layers\.\d+\.|^ends\.|\.weight$", "", name)
            rows.setdefault(place, ShapeRow(place, formulas[end], expected, weight.numel() * weight.element_size(), []))
    return list(rows.values())


class Watch:
    """Looks at the first forward of one layer, and then calls `done(rows, letters)`."""

    def __init__(self, model: Decoder, config: TrainConfig, done):
        self.layer, self.names, self.rows, self.seen = next(iter(model.layers.values())), letters(config), [], 0
        self.done, self.recording, self.call = done, collectives.record(), self.layer.attention.call
        self.heads = LATENT_HEADS if config.model_config.latent else HEADS
        attention, mlp = self.layer.attention, self.layer.mlp
        attention.call = self._call
        tokens = "s/cp/tp" if config.sequence_parallel else "s/cp"  # of a sequence, between the sublayers
        residual = f"b, {tokens}, h"
        hooks = [(self.layer, "layer input", residual, True), (self.layer.attention_norm, "norm", residual, False)]
        hooks.append((attention.o_proj, "attention, back in the residual", residual, False))
        if hasattr(mlp, "router"):
            hooks.append((mlp.router, "chosen experts of each token", f"b*{tokens}, k", False))
            hooks.append((mlp.experts, "tokens of this rank's experts", "rows, h", True))
        else:
            hooks.append((mlp.down_proj, "inside the MLP", "b, s/cp, f/tp", True))
        hooks += [(mlp, "MLP, back in the residual", residual, False), (self.layer, "layer output", residual, False)]
        self.handles = [self._hook(*each) for each in hooks]
        self.handles.append(self.layer.register_forward_hook(self._end))

    def _hook(self, module: nn.Module, place: str, formula: str, before: bool):
        """Note the module's (first) input, or else its (first) output."""
        if before:
            return module.register_forward_pre_hook(lambda _, inputs: self.note(place, formula, inputs[0]))
        return module.register_forward_hook(
            lambda _, inputs, out: self.note(place, formula, out[0] if isinstance(out, tuple) else out)
        )

    def note(self, place: str, formula: str, tensor: Tensor) -> None:
        """Add a row. Raises AssertionError if the shape is not what the formula says."""
        if not self.rows:
            self.calls = self.recording.__enter__()
        if "rows" in formula:  # only the router knows how many
            self.names["rows"] = len(tensor)
        expected = evaluate(formula, self.names)
        if tuple(tensor.shape) != expected:
            raise AssertionError(f"{place}: {tuple(tensor.shape)}, but ({formula}) is {expected}")
        new, self.seen = self.calls[self.seen :], len(self.calls)
        self.rows.append(ShapeRow(place, formula, expected, tensor.numel() * tensor.element_size(), new))

    def _call(self, core, *tensors):
        for (place, formula), tensor in zip(self.heads.items(), tensors[:3]):
            self.note(place, formula, tensor)
        out = self.call(core, *tensors)
        self.note("attention", self.heads["attention"], out)
        return out

    def _end(self, *_) -> None:
        self.recording.__exit__(None, None, None)
        self.layer.attention.call = self.call
        for handle in self.handles:
            handle.remove()
        self.done(self.rows, self.names)


def legend(rows: list[ShapeRow], names: dict[str, int]) -> list[str]:
    """What the letters in the formulas of `rows` are, with their values, in lines."""
    seen = {letter for row in rows for letter in re.findall(r"\w+", row.formula)}
    words = [f"{letter} {names[letter]} ({MEANINGS.get(letter, 'ranks')})" for letter in names if letter in seen]
    return [", ".join(words[at : at + 4]) for at in range(0, len(words), 4)]


def describe(rows: list[ShapeRow], names: dict[str, int], mesh: Mesh, weights: list[ShapeRow]) -> str:
    """The groups of this rank, its weights and its layer, as text."""
    unused = () if mesh.degrees.experts else ("ep", "edp", "expert_shard", "expert_replica")
    groups = {name: getattr(mesh, name) for name in GROUP_NAMES if name not in unused}
    lines = [f"rank {mesh.rank} talks to"]
    lines += [f"  {name:15} {', '.join(map(str, each.ranks))}" for name, each in groups.items() if each.size > 1]
    for title, some in (("its weights, of layers the first one's", weights), ("its first layer, forward", rows)):
        lines.append(title)
        for row in some:
            for op, group, size, sent in row.sent:
                lines.append(f"      {op} over {group} ({size} ranks), sends {sent:,} bytes")
            shape = " x ".join(map(str, row.shape))
            lines.append(
                f"  {row.place:32} ({row.formula}){'':{max(1, 22 - len(row.formula))}}{shape}, {row.bytes:,} bytes"
            )
    return "\n".join(lines + legend(weights + rows, names))


def show_shapes(stages: list[Decoder], config: TrainConfig, mesh: Mesh) -> None:
    """With --shapes: check those of all weights of this rank, and of its first layer's activations when that has run.

    Rank 0 prints them. With --run-dir the layer is also drawn, into RUN_DIR/shapes.png.
    """
    if not config.shapes:
        return
    weights = check_weights(stages, config)

    def show(rows: list[ShapeRow], names: dict[str, int]) -> None:
        if mesh.rank == 0:
            print(describe(rows, names, mesh, weights), flush=True)
            if config.run_dir:
                draw_shapes(rows, legend(rows, names), config, f"{config.run_dir}/shapes.png")

    Watch(stages[0], config, show)
