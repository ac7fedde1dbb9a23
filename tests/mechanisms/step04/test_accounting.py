"""What tensor parallelism sends, and what it computes while it waits: no loss curve shows any of this."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import step04_tensor_parallel.train as step04
from common import collectives
from common.command_line import parse
from common.measure import tcp_bytes as wire
from common.model import rope_tables
from common.model_config import ModelConfig
from common.process_groups import Degrees, Mesh, build_mesh, environment
from step04_tensor_parallel.tensor_parallel import Split
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import BATCH, FORMS, MODEL, SEQ, Recorder, decoder, stream, tp_mesh

LARGE = ModelConfig(vocab=256, hidden=256, layers=1, heads=4, kv_heads=4, ffn=512, tie_embeddings=False)

# ---- what is sent ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """Calls over `elements` of the whole residual stream, as (op, elements of the call, bytes sent)."""

    world: int
    elements: int
    itemsize: int

    @property
    def share(self) -> int:  # (N-1)/N of the stream's bytes
        return self.elements * self.itemsize * (self.world - 1) // self.world

    @property
    def all_reduce(self) -> list[tuple]:
        return [("all_reduce", self.elements, 2 * self.share)]

    @property
    def all_gather(self) -> list[tuple]:
        return [("all_gather", self.elements // self.world, self.share)]

    @property
    def reduce_scatter(self) -> list[tuple]:
        return [("reduce_scatter", self.elements, self.share)]

    @property
    def ring(self) -> list[tuple]:  # N-1 times a part to the next rank, another one from the rank before
        part = self.elements // self.world
        return [("send", part, part * self.itemsize), ("receive", part, 0)] * (self.world - 1)

    def block(self, form: tuple, recompute: str) -> tuple[list, list]:
        """Forward and backward: q, k and v share one call, gate and up share one."""
        sequence_parallel, mode = form
        if not sequence_parallel:
            forward, backward = 2 * self.all_reduce, 2 * self.all_reduce
        else:
            forward = 2 * (2 * self.ring if mode == "chunked" else self.all_gather + self.reduce_scatter)
            again = [] if mode == "plain" else self.all_gather  # of inputs that were not kept
            backward = 2 * (self.all_gather + again + self.reduce_scatter)
        return forward, (forward if recompute == "full" else []) + backward


def ranks_blocks():
    """The log of one block's forward and of its backward in every form."""
    mesh, result = tp_mesh(), {}
    for form, recompute, dtype in itertools.product(
        FORMS, ("none", "selective", "full"), (torch.float32, torch.bfloat16)
    ):
        model, x = decoder(mesh, MODEL, form, dtype, recompute), stream(mesh, MODEL, form, dtype)
        rope = rope_tables(MODEL, torch.arange(SEQ), dtype)
        with Recorder() as forward:
            y = model.layers["0"](x, rope)
        with Recorder() as backward:
            y.sum().backward()
        result[form, recompute, str(dtype).removeprefix("torch.")] = forward.log, backward.log
    return result


def check_blocks(ranks: list[dict]) -> None:
    world = len(ranks)
    for key, found in ranks[0].items():
        form, recompute, dtype = key
        formula = Formula(world, BATCH * SEQ * MODEL.hidden, getattr(torch, dtype).itemsize)
        for log, expected, name in zip(found, formula.block(form, recompute), ("forward", "backward"), strict=True):
            assert {call[1] for call in log} == {"tp"} and {call[3] for call in log} == {dtype}
            assert [(op, elements, sent) for op, _, elements, _, sent in log] == expected, (key, name)
        assert all(rank[key] == found for rank in ranks), f"{key}: every rank issues the same in the same order"


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_of_a_block(world):
    check_blocks(run_ranks(world, ranks_blocks))


def test_sequence_parallelism_sends_as_much_as_all_reduces():
    """But for the second gather of inputs that are not kept: half as much again in the backward."""
    formula = Formula(4, BATCH * SEQ * MODEL.hidden, 4)
    sent = {form: [sum(call[2] for call in part) for part in formula.block(form, "none")] for form in FORMS}
    whole = sent[False, "plain"]
    assert sent[False, "overlap"] == sent[True, "plain"] == whole
    assert sent[True, "overlap"] == sent[True, "chunked"] == [whole[0], 1.5 * whole[1]]


def logs_of_the_ends(mesh: Mesh, form: tuple, dtype: torch.dtype) -> dict:
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    model, x = decoder(mesh, MODEL, form, dtype), stream(mesh, MODEL, form, dtype)
    logits = model.head(x).detach().requires_grad_()
    parts = {
        "embedding": lambda: model.embedding(tokens),
        "head": lambda: model.head(x),
        "loss": lambda: vocab_parallel_cross_entropy_sum(logits, tokens, MODEL.vocab, mesh.tp),
    }
    logs = {}
    for name, part in parts.items():
        with Recorder() as forward:
            y = part()
        with Recorder() as backward:
            y.sum().backward()
        logs[name] = forward.log, backward.log
    return logs


def ranks_ends():
    """The log of the embedding, the head and the loss in every form."""
    mesh = tp_mesh()
    return {
        (form, str(dtype).removeprefix("torch.")): logs_of_the_ends(mesh, form, dtype)
        for form, dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16))
    }


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_of_embedding_head_and_loss(world):
    tokens = BATCH * SEQ
    for (form, dtype), logs in run_ranks(world, ranks_ends)[0].items():
        formula = Formula(world, tokens * MODEL.hidden, getattr(torch, dtype).itemsize)
        sequence_parallel, mode = form
        again = [] if mode == "plain" else formula.all_gather
        gather = formula.ring if mode == "chunked" else formula.all_gather
        expected = {
            "embedding": (formula.reduce_scatter, formula.all_gather),
            "head": (gather, again + formula.reduce_scatter),
        }
        if not sequence_parallel:
            expected = {"embedding": (formula.all_reduce, []), "head": ([], formula.all_reduce)}
        # Three numbers a token, in at least float32: the largest logit; the sum of exponentials and the target's logit
        one, two = (("all_reduce", n * tokens, 2 * (4 * n * tokens * (world - 1) // world)) for n in (1, 2))
        expected["loss"] = [one, two], []
        for name, wanted in expected.items():
            for log, part in zip(logs[name], wanted, strict=True):
                assert [(op, elements, sent) for op, _, elements, _, sent in log] == part, (form, dtype, name)
        assert {call[3] for call in logs["loss"][0]} == {"float32"}


def ranks_wire():
    """Bytes of a block, forward and backward: the log's, and those of this rank's sockets."""
    mesh, rows = tp_mesh(), {}
    for form in FORMS:
        model, x = decoder(mesh, LARGE, form), stream(mesh, LARGE, form, seq=128)
        rope = rope_tables(LARGE, torch.arange(128), torch.float32)
        dist.barrier()
        collectives.reset_bytes()
        before = wire.sent_by_me()
        model.layers["0"](x, rope).sum().backward()
        logged = collectives.sent_bytes["tp"]
        dist.barrier()
        after = wire.sent_by_me()
        dist.barrier()  # a rank that ends closes sockets that others still read
        rows[form] = logged, None if after is None else after - before
    return rows


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_the_wire(world):
    formula = Formula(world, BATCH * 128 * LARGE.hidden, 4)
    for rank in run_ranks(world, ranks_wire):
        for form, (logged, sent) in rank.items():
            expected = sum(call[2] for part in formula.block(form, "none") for call in part)
            assert logged == expected, form
            if sent is not None:
                assert sent == pytest.approx(expected, rel=0.02), form


FLAGS = "--layers 2 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --data synthetic --device cpu --steps 2 --tp 2"
FLAGS += " --global-batch 4 --peak-tflops 1"


def ranks_optimizer_phase(cases):
    """(group, elements, bytes) of the all-reduces that two whole steps issue besides forwards and backwards."""
    found = []
    for flags in cases:
        config = parse(4, [*FLAGS.split(), *flags.split()])
        config.resolve_and_check(environment().world_size)
        mesh = build_mesh(Degrees.of(config), torch.device("cpu"), config.model_config.kv_heads)
        with Recorder() as recorder:
            step04.train(config, mesh)
        assert {call.op for call in recorder.calls if call.phase == "optimizer"} == {"all_reduce"}, flags
        found.append([(c.group, c.elements, c.bytes) for c in recorder.calls if c.phase == "optimizer"])
    return found


def test_extra_groups_are_summed_once_a_step_and_only_when_needed():
    norms, kv_heads = ("tp", 5 * 32, 5 * 32 * 4), ("kv_replica", 2 * 2 * 8 * 32, 2 * 2 * 8 * 32 * 4)
    norm_of_gradient = ("world", 1, 8)  # in float64
    expected = {
        "--kv-heads 2 --micro-batch 4": [norms, norm_of_gradient],
        "--kv-heads 2 --micro-batch 1": [norms, norm_of_gradient],  # not with every micro-batch
        "--kv-heads 2 --micro-batch 2 --no-sequence-parallel": [norm_of_gradient],
        "--kv-heads 1 --micro-batch 2": [kv_heads, norms, norm_of_gradient],
        "--kv-heads 1 --micro-batch 1 --no-sequence-parallel --zero 3": [kv_heads, norm_of_gradient],
    }
    for rank in run_ranks(2, ranks_optimizer_phase, list(expected)):
        for (case, wanted), found in zip(expected.items(), rank, strict=True):
            assert found == 2 * wanted, case


# ---- what happens while it waits -------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes every matrix product by the shape of its result."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.events.append(tuple(result.shape[-2:]))
        return result


def ranks_order():
    """Products, and where between them every call was issued and waited for, of a column- and a row-parallel layer."""
    mesh, result = tp_mesh(), {}
    for form in FORMS:
        split = Split(mesh.tp, *form)
        columns = [nn.Linear(MODEL.hidden, width // mesh.tp.size, bias=False) for width in (24, 40)]
        row = nn.Linear(64 // mesh.tp.size, MODEL.hidden, bias=False)
        wide = torch.randn(BATCH, SEQ, 64 // mesh.tp.size).requires_grad_()
        x = stream(mesh, MODEL, form)
        for name, layer in (
            ("column", lambda split=split, x=x, columns=columns: torch.cat(list(split.column(x, columns)), -1)),
            ("row", lambda split=split, wide=wide, row=row: split.row(row.weight, wide)),
        ):
            with Products() as products:
                with Recorder(products.events) as forward:
                    y = layer().sum()
                products.events.clear()
                with Recorder(products.events) as backward:
                    y.backward()
            calls = [[(c.op, c.issue, c.wait_start) for c in part.calls] for part in (forward, backward)]
            result[form, name] = *calls, products.events
    return result


def check_order(ranks: list[dict]) -> None:
    world = len(ranks)
    for rank in ranks:
        for (sequence_parallel, mode), name in rank:
            forward, backward, products = rank[(sequence_parallel, mode), name]
            case, tokens = (sequence_parallel, mode, name), BATCH * SEQ
            if name == "column":
                inputs, weights = 2 * [(tokens, MODEL.hidden)], [(w // world, MODEL.hidden) for w in (24, 40)]
            else:
                inputs, weights = [(tokens, 64 // world)], [(MODEL.hidden, 64 // world)]
            assert sorted(products) == sorted(inputs + weights), case
            if name == "column" and mode != "plain":
                assert products == inputs + weights, f"{case}: the inputs' gradient first"
            if not sequence_parallel:
                hidden = ("all_reduce", 2, 4) if mode != "plain" else ("all_reduce", 4, 4)  # behind the weights' or not
                assert backward == ([hidden] if name == "column" else []), case
                assert forward == ([] if name == "column" else [("all_reduce", 1, 1)]), case
            elif name == "column":
                again = ("all_gather", 0, 2)  # behind the inputs' gradient
                overlapped = [again, ("reduce_scatter", 2, 4)]
                assert backward == ([("reduce_scatter", 4, 4)] if mode == "plain" else overlapped), case
                ring = [(op, 2 * hop, 2 * hop + 2) for hop in range(world - 1) for op in ("send", "receive")]
                assert forward == (ring if mode == "chunked" else [("all_gather", 0, 0)]), case
            else:
                assert backward == [("all_gather", 0, 0)], f"{case}: nothing can be computed before it"
                ring = [(op, hop + 1, hop + 2) for hop in range(world - 1) for op in ("send", "receive")]
                assert forward == (ring if mode == "chunked" else [("reduce_scatter", 1, 1)]), case


@pytest.mark.parametrize("world", [2, 4])
def test_the_input_gradient_travels_while_that_of_the_weight_is_computed(world):
    check_order(run_ranks(world, ranks_order))
