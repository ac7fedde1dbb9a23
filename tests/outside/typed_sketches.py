"""The sketches under the eyes of spmd-types: what is declared of them, and how one rank runs alone.

A type checker looks at one rank's program. So a sketch trains as rank 0 of two, in a group that sends nothing: types
count, not numbers. spmd-types infers them for each operation of torch, and has the rules of torch's own collectives. We
declare the tensors with which a training begins, because to the checker a rank's number is a plain integer: it sees
that `chunk(ranks)[rank]` divides, but not that each rank takes another part.
"""

import ast
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import P, R, S, SpmdTypeError, V, checker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 2
ROOT = Path(__file__).parents[2]


@contextmanager
def one_of_two_ranks(local: bool = False):
    """Be rank 0 of two. Yields their axis. `local`: a tensor that varies does not say along which of its dimensions."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ranks",))
        with spmd.set_current_mesh(mesh), checker.typecheck(local=local):
            yield mesh.get_group("ranks")
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Sketch:
    """A sketch, and the types that are declared of it.

    Args:
        declared: name -> type, for each function in which we declare names after they are assigned.
        weights: the types of the weights that `train` returns.
        helpers: the sketch's own functions that communicate.
        local: see `one_of_two_ranks`.
    """

    path: str
    declared: dict[str, dict]
    weights: tuple
    helpers: tuple[str, ...] = ()
    local: bool = False

    def calls(self) -> list[str]:
        """Every call that communicates, outside of helpers: `run` can silence each, by its position here."""
        return [ast.unparse(call) for call in self._calls(self._tree())]

    def run(self, silent: int | None = None) -> None:
        """Train, with or without the messages of one call. Raises SpmdTypeError where types disagree."""
        tree = self._tree()
        if silent is not None:
            call = self._calls(tree)[silent]
            call.func, call.args = ast.Name("_silently", ast.Load()), [call.func, *call.args]
        tree = ast.fix_missing_locations(_Declarations(self.declared).visit(tree))
        with one_of_two_ranks(self.local) as axis:
            rank = _Rank(axis)
            scope = {"__name__": "sketch", "_silently": rank.silently}
            scope |= {"_declare": rank.declare, "_put": rank.put, "_part": rank.part, "_read": rank.read}
            exec(compile(tree, self.path, "exec"), scope)
            scope["dist"] = SimpleNamespace(**{name: getattr(rank, name) for name in _Rank.COLLECTIVES})
            scope["dist"].get_world_size = lambda: RANKS
            scope["torch"] = _Torch(axis)
            weights = scope["train"](0, RANKS)[1]
            for weight, kind in zip(weights if isinstance(weights, list) else [weights], self.weights, strict=True):
                spmd.assert_type(weight, {axis: kind})

    def _tree(self) -> ast.Module:
        return ast.parse((ROOT / self.path).read_text(encoding="utf-8"))

    def _calls(self, tree: ast.Module) -> list[ast.Call]:
        names = {*self.helpers, *(f"dist.{name}" for name in _Rank.COLLECTIVES)}
        functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name not in self.helpers]
        nodes = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call))
        return sorted((node for node in nodes if ast.unparse(node.func) in names), key=lambda node: node.lineno)


class _Declarations(ast.NodeTransformer):
    """Declares names after they are assigned, and lets `_put`, `_part` and `_read` do what they stand for."""

    def __init__(self, declared: dict[str, dict]):
        self.declared, self.names = declared, {}

    def visit_FunctionDef(self, function):
        self.names = self.declared.get(function.name, {})
        return self.generic_visit(function)

    def visit_Assign(self, assign):
        (target,) = assign.targets
        assign.value = self.visit(assign.value)
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            buffer = ast.Name(target.value.id, ast.Load())
            return ast.Expr(ast.Call(ast.Name("_put", ast.Load()), [buffer, target.slice, assign.value], []))
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        lines = [assign]
        for name in (each.id for each in targets if isinstance(each, ast.Name) and each.id in self.names):
            line = ast.parse(f"{name} = _declare({name}, {str(self.names[name])!r})").body[0]
            lines.append(ast.copy_location(line, assign))
        return lines

    def visit_Subscript(self, node):
        name = node.value.id if isinstance(node.value, ast.Name) else None
        if self.names.get(name) is not P or not isinstance(node.slice, ast.Slice):
            return node
        limits = ast.Call(ast.Name("slice", ast.Load()), [node.slice.lower, node.slice.upper], [])
        return ast.Call(ast.Name("_part", ast.Load()), [node.value, limits], [])

    def visit_Expr(self, node):
        return ast.Pass() if ast.unparse(node).startswith("print(") else self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item":
            return ast.Call(ast.Name("_read", ast.Load()), [node.func.value], [])
        return node


class _Torch:
    """Stands for torch in a sketch, with types for two functions that have none: draws of one seed, and new buffers."""

    def __init__(self, axis):
        self.axis = axis

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def randn(self, *sizes, **options) -> torch.Tensor:
        drawn = torch.randn(*sizes, **options)
        spmd.assert_type(drawn, {self.axis: R})
        return drawn

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with spmd.no_typecheck():
            buffer = torch.empty_like(tensor)
        spmd.assert_type_like(buffer, tensor)
        return buffer


class _Rank:
    """Stands for torch.distributed in a sketch, with buffers that have the types that their collective asks for."""

    COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single")
    KINDS = {str(kind): kind for kind in (R, V, P, S(0), S(1))}

    def __init__(self, axis):
        self.axis, self.is_silent, self.summed = axis, False, {}

    def silently(self, function, *args, **options):
        """Call a function whose collectives send nothing: buffers stay as they were allocated."""
        self.is_silent = True
        try:
            return function(*args, **options)
        finally:
            self.is_silent = False

    def declare(self, value: torch.Tensor, kind: str) -> torch.Tensor:
        with spmd.no_typecheck():
            fresh = value.detach().clone()
        spmd.assert_type(fresh, {self.axis: self.KINDS[kind]})
        return fresh

    def put(self, buffer: torch.Tensor, key, value: torch.Tensor) -> None:
        """buffer[key] = value, for which spmd-types has no rule if both are partial sums: they are of one type."""
        if spmd.maybe_get_axis_local_type(buffer, self.axis) is None:  # new_empty says nothing
            spmd.assert_type(buffer, {self.axis: spmd.get_axis_local_type(value, self.axis)})
        spmd.assert_type(value, {self.axis: spmd.get_axis_local_type(buffer, self.axis)})
        with spmd.no_typecheck():
            buffer[key] = value

    def part(self, buffer: torch.Tensor, limits: slice) -> torch.Tensor:
        """buffer[limits], likewise."""
        with spmd.no_typecheck():
            view = buffer[limits]
        spmd.assert_type_like(view, buffer)
        return view

    def read(self, number: torch.Tensor) -> float:
        """number.item(), which should be the same wherever it is logged."""
        spmd.assert_type(number, {self.axis: R})
        return number.item()

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False):
        if not self.is_silent:
            if spmd.get_axis_local_type(tensor, self.axis) is V:  # what differs between ranks can be added up
                spmd.mutate_type(tensor, self.axis, src=V, dst=P)
            dist.all_reduce(tensor, group=self.axis)
            self._sum_part(tensor)
        return SimpleNamespace(wait=lambda: None)

    def _sum_part(self, view: torch.Tensor) -> None:
        """A buffer whose parts are summed one by one is a sum when the last of them is, and no part is summed twice."""
        base = view._base
        if base is None:
            return
        with spmd.no_typecheck():
            _, done = self.summed.setdefault(id(base), (base, torch.zeros(base.numel(), dtype=torch.bool)))
            part = done[view.storage_offset() :][: view.numel()]
            if part.any():
                raise SpmdTypeError("a part of this buffer is summed twice")
            part.fill_(True)
            complete = bool(done.all())
        if complete:
            spmd.mutate_type(base, self.axis, src=P, dst=R)

    def all_gather(self, parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        if not self.is_silent:
            parts[:] = [self.declare(part, str(R)) for part in parts]
            dist.all_gather(parts, mine, group=self.axis)

    def reduce_scatter(self, summed: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """spmd-types has no rule of the list form: every part is a partial sum, the result this rank's rows."""
        if not self.is_silent:
            spmd.assert_type(parts, {self.axis: P})
            spmd.mutate_type(summed, self.axis, src=P, dst=V)
            spmd.assert_type(summed, {self.axis: S(0)})

    def all_to_all_single(
        self, arrived: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        """What arrives is this rank's first part again: for counts that will do, and rows do not matter."""
        spmd.assert_type(arrived, {self.axis: V})
        if not self.is_silent:
            dist.all_to_all_single(arrived, rows, received, sent, group=self.axis)
        with spmd.no_typecheck():
            arrived.copy_(rows[torch.arange(len(arrived)) % sent[0]])


SKETCHES = {
    2: Sketch(
        "step02_data_parallel/sketch.py",
        {"train": {"weights": R, "x": S(0), "target": S(0)}, "backward": {"gradients": P}},
        weights=(R,),
    ),
    4: Sketch(
        "step04_tensor_parallel/sketch.py",
        {"train": {"x": S(0), "target": S(0), "w1": S(1), "w2": S(0), "scale": R}},
        weights=(R, S(1), S(0)),
        helpers=("gather", "reduce_scatter"),
    ),
    7: Sketch(
        "step07_expert_parallel/sketch.py",
        {"train": {"first": R, "router": R, "ups": V, "downs": V, "tokens": V, "target": V}},
        weights=(R, R, V, V),
        helpers=("exchange",),
        local=True,  # a token's way to its experts is no dimension of a tensor
    ),
}
