"""What tensor parallelism sends, when, and what it computes while it waits: no loss curve shows any of this."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common import collectives
from common.config import TrainConfig
from common.costs.vocabulary import Message, added
from step04_tensor_parallel.cost import Way, messages
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, apply_column_parallel
from tests.harness import accounting
from tests.harness.observing import configure
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.test_activations import BATCH, FORMS, MODEL, SEQ, stream, tp_mesh

# ---- what train() issues, and when -----------------------------------------------------------------------------------

LAYERS, HIDDEN, TOKENS = 2, 256, 128  # TOKENS: of a sequence
SHAPE = f"--layers {LAYERS} --hidden {HIDDEN} --heads 8 --ffn 128 --vocab 257 --seq-len {TOKENS} --steps 1"
SHAPE += " --global-batch 2 --data synthetic --device cpu --peak-tflops 1"


def cases(world: int) -> list[str]:
    """Every form with every kind of recomputation; by turns in both types, with K/V heads that ranks share, and in
    several micro-batches. The last one adds data parallelism, and a step."""
    found = []
    recomputations = ("none", "full") if world == 2 else ("selective --attention naive",)
    for index, (form, recompute) in enumerate(itertools.product(FORMS, recomputations)):
        flags = f"--tp {world} --tp-mode {form[1]} --recompute {recompute} --micro-batch {(2, 2, 1, 2)[index % 4]}"
        flags += "" if form[0] else " --no-sequence-parallel"
        flags += (" --dtype bfloat16" if index % 2 else "") + (" --kv-heads 1" if index % 3 == 1 else " --kv-heads 4")
        found.append(flags)
    last = f"--tp {world // 2} --dp 2 --zero 1 --global-batch 4 --micro-batch 1 --steps 2"
    return [*found, last] if world == 4 else found


def all_reduce(group: str, size: int, elements: int, width: int) -> list[tuple]:
    """Of a group of `size` ranks, each element `width` bytes; none where there is nothing to add up."""
    sent = 2 * (elements * width * (size - 1) // size)
    return [(group, "all_reduce", elements, sent)] if sent else []


def forward_and_backward(config: TrainConfig) -> list[tuple]:
    """(phase, group, op, elements, bytes) of everything that one micro-batch issues, in order.

    q, k and v share one call, gate and up share one; the embedding ends like a sublayer, the head begins like one.
    """
    tp, mode, width = config.tp, config.tp_mode, config.torch_dtype.itemsize
    tokens = config.micro_batch * TOKENS
    stream, part = tokens * HIDDEN, tokens * HIDDEN // tp
    share = (tp - 1) * part * width
    reduce, gather = [("tp", "all_reduce", stream, 2 * share)], [("tp", "all_gather", part, share)]
    scatter = [("tp", "reduce_scatter", stream, share)]
    ring = [("tp", "send", part, part * width), ("tp", "receive", part, 0)] * (tp - 1)
    if config.sequence_parallel:  # in mode plain the inputs are kept, else they are gathered again
        begin, end = (ring, ring) if mode == "chunked" else (gather, scatter)
        embedding, end_backward, begin_backward = scatter, gather, ([] if mode == "plain" else gather) + scatter
    else:
        begin, end, embedding, end_backward, begin_backward = [], reduce, reduce, [], reduce
    # Three numbers a token, in at least float32: the largest logit; the sum of exponentials and the target's logit
    loss = all_reduce("tp", tp, tokens, 4) + all_reduce("tp", tp, 2 * tokens, 4)
    again = 2 * (begin + end) if config.recompute == "full" else []
    forward = embedding + LAYERS * 2 * (begin + end) + begin + loss
    backward = begin_backward + LAYERS * (again + 2 * (end_backward + begin_backward)) + end_backward
    return [("forward", *call) for call in forward] + [("backward", *call) for call in backward]


def expected_log(config: TrainConfig, held: dict[str, int]) -> list[tuple]:
    """The same for the whole run of a rank that updates `held` elements of each parameter; without the groups of dp."""
    norms = sum(count for name, count in held.items() if name.endswith("norm.weight"))
    kv_heads = sum(count for name, count in held.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    optimizer = []
    if config.model_config.kv_heads < config.tp:
        optimizer += all_reduce("kv_replica", config.tp // config.model_config.kv_heads, kv_heads, 4)
    if config.sequence_parallel:
        optimizer += all_reduce("tp", config.tp, norms, 4)
    optimizer += all_reduce("world", config.tp * config.dp, 1, 8)
    step = config.accumulation_steps * forward_and_backward(config)
    return config.steps * (step + [("optimizer", *call) for call in optimizer])


def ranks_train(flags: list[str]) -> list[dict]:
    """What this rank sees of train() in each case."""
    found = []
    for case in flags:
        log, held = accounting.log(4, f"{SHAPE} {case}"), {}
        for tensor in log.updated:
            held[tensor.spec.name] = held.get(tensor.spec.name, 0) + tensor.numel()
        result = {"case": case, "sockets": log.sockets, "sent": log.sent, "expected": expected_log(log.config, held)}
        result["log"] = [row for row in log.rows if row[1] in ("tp", "kv_replica", "world")]
        result["types"] = {call.dtype for call in log.calls if call.group == "tp"}
        found.append(result)
    return found


def check_train(ranks: list[list[dict]]) -> None:
    for found in itertools.chain(*ranks):
        assert found["log"] == found["expected"], found["case"]
        assert found["sockets"] in (None, pytest.approx(found["sent"], rel=0.02)), found["case"]


def check_predictions(world: int, found: list[dict]) -> None:
    """What cost.py says of a step in float32, in all forms: how many calls, and their bytes, by group and operation."""
    compared = 0
    for case, seen in zip(cases(world), found, strict=True):
        config = configure(4, f"{SHAPE} {case}", world)
        if config.dp == 1 and config.dtype == "float32":
            way = Way(config.sequence_parallel, config.tp_mode, config.recompute == "full")
            shape = config.model_config, config.micro_batch, TOKENS, config.accumulation_steps
            calls = [Message(group, op, size, 1) for _, group, op, _, size in seen["log"] if op != "receive"]
            assert added(calls) == added(messages(way, world, *shape)), case
            compared += 1
    assert compared >= 2, "too few cases are in float32"


@pytest.mark.parametrize("world", [2, 4])
def test_train_issues_what_its_layers_need(world):
    """Every call of every phase, in order, with its size; the same on the sockets."""
    ranks = run_ranks(world, ranks_train, cases(world))
    check_train(ranks)
    check_predictions(world, ranks[0])
    for found in ranks[0]:
        assert found["types"] == {"float32"} | ({"bfloat16"} if "bfloat16" in found["case"] else set()), found["case"]


# ---- what happens while it waits -------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes every matrix product by the shape of its result."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.shapes.append(tuple(result.shape[-2:]))
        return result


def calls_among_products(function) -> tuple[list[tuple], list[tuple], bool, object]:
    """(op, products before its issue, products before its wait) of every call, shapes of the products, whether all
    calls are issued before any is waited for, and the result."""
    ticks = itertools.count()
    with Products() as products, collectives.record(clock=lambda: (len(products.shapes), next(ticks))) as calls:
        result = function()
    together = bool(calls) and max(call.issue[1] for call in calls) < min(call.wait_start[1] for call in calls)
    return [(call.op, call.issue[0], call.wait_start[0]) for call in calls], products.shapes, together, result


def ranks_order():
    """Of a column- and a row-parallel layer: calls and products, forward and backward."""
    mesh, result = tp_mesh(), {}

    def weight(out: int, inside: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(out, inside))

    for form in FORMS:
        split, parts = Split(mesh.tp, *form), mesh.tp.size
        columns = [ColumnParallelLinear(weight(width // parts, MODEL.hidden), split) for width in (24, 40)]
        row, x = RowParallelLinear(weight(MODEL.hidden, 64 // parts), split), stream(mesh, form)
        wide = torch.randn(BATCH, SEQ, 64 // parts).requires_grad_()
        for name, layer in (
            ("column", lambda x=x, columns=columns: torch.cat(list(apply_column_parallel(x, columns)), -1).sum()),
            ("row", lambda row=row, wide=wide: row(wide).sum()),
        ):
            forward, *_, y = calls_among_products(layer)
            result[form, name] = forward, *calls_among_products(y.backward)[:3]
    return result


def check_order(ranks: list[dict]) -> None:
    """A column layer's backward has two products for the input's gradient, then two for the weights'; a row layer's has
    one of each, and nothing can be computed before its gather."""
    world, tokens = len(ranks), BATCH * SEQ
    hops = [(hop, op) for hop in range(world - 1) for op in ("send", "receive")]
    behind_all, behind_inputs = ("reduce_scatter", 4, 4), [("all_gather", 0, 2), ("reduce_scatter", 2, 4)]
    row_backward = [("all_gather", 0, 0)]
    expected = {  # (sequence parallel, mode): forward and backward of the column layers, then of the row layer
        (True, "plain"): ([("all_gather", 0, 0)], [behind_all], [("reduce_scatter", 1, 1)], row_backward),
        (True, "overlap"): ([("all_gather", 0, 0)], behind_inputs, [("reduce_scatter", 1, 1)], row_backward),
        (True, "chunked"): (
            [(op, 2 * hop, 2 * hop + 2) for hop, op in hops],
            behind_inputs,
            [(op, hop + 1, hop + 2) for hop, op in hops],
            row_backward,
        ),
        (False, "plain"): ([], [("all_reduce", 4, 4)], [("all_reduce", 1, 1)], []),
        (False, "overlap"): ([], [("all_reduce", 2, 4)], [("all_reduce", 1, 1)], []),
    }
    for rank, form in itertools.product(ranks, FORMS):
        column, row = rank[form, "column"], rank[form, "row"]
        assert (*column[:2], *row[:2]) == expected[form], form
        inputs, weights = 2 * [(tokens, MODEL.hidden)], [(width // world, MODEL.hidden) for width in (24, 40)]
        assert sorted(column[2]) == sorted(inputs + weights), form
        assert column[2] == inputs + weights or form[1] == "plain", f"{form}: the input's gradient first"
        assert column[3] or form[1] == "plain", f"{form}: the input's gradient leaves before the gather is waited for"
        assert sorted(row[2]) == sorted([(tokens, 64 // world), (MODEL.hidden, 64 // world)]), form


def test_the_input_gradient_travels_while_that_of_the_weight_is_computed():
    """On four ranks; on two, the tests of the mutants ask for it before they break it."""
    check_order(run_ranks(4, ranks_order))
