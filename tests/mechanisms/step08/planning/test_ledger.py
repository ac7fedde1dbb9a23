"""The ledger of a layer's backward: it begins with what the layer has kept, and releases all of it."""

from dataclasses import replace

import pytest
import torch

from common.presets import PRESETS
from step04_tensor_parallel.cost import Way, block_activations
from step07_expert_parallel.cost import activations as expert_activations
from step08_5d.cost import Layout
from step08_5d.planning.memory import layer, second_block
from step08_5d.planning.memory.kept import tensors_of_layer
from step08_5d.planning.memory.layer import INPUT, MIDDLE, OUTPUT
from step08_5d.planning.memory.ledger import Ledger, Linear
from step08_5d.planning.memory.rank_parameters import parameters_of_rank
from step08_5d.planning.memory.walks import layer_ledger

LLAMA, MIXTRAL, DEEPSEEK = (PRESETS[name] for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v3-like"))
V3 = PRESETS["deepseek-v3"]
STATISTICS = {"attention_norm.rsqrt", "mlp_norm.rsqrt"}
LAYOUTS = [
    Layout(4096, dtype="bfloat16"),
    Layout(4096, dtype="float32", micro_batch=2),
    Layout(4096, dtype="bfloat16", tp=4, micro_batch=2),
    Layout(4096, dtype="bfloat16", tp=4, recompute="selective"),
    Layout(8192, dtype="bfloat16", cp=4),
    Layout(8192, dtype="float32", cp=4, tp=2, cp_mode="allgather"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_releases_all_that_it_has_kept(layout):
    """But for a few numbers per token. In the end there is the gradient of the layer's input."""
    ledger = layer.backward(LLAMA, layout, experts=False)
    assert set(ledger.tensors) == STATISTICS | {INPUT} and not ledger.deferred
    assert ledger.stored == 2 + 4 + 3 and ledger.in_buffers == set()
    whole = sum(ledger.begins_with.values())
    assert sum(ledger.tensors.values()) == pytest.approx(whole + ledger.held)
    for entry in ledger.entries:
        assert not entry.communication or layout.tp * layout.cp > 1
        assert whole + entry.held >= sum(entry.made.values()) + sum(entry.released.get(each, 0) for each in STATISTICS)


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(4096, dtype="bfloat16", tp=4, ep=8), Layout(4096, ep=4)])
def test_so_does_a_layer_with_experts(model, layout):
    ledger = layer.backward(model, layout, experts=True)
    assert set(ledger.tensors) == STATISTICS | {INPUT} and ledger.stored == 2 + 4 + 4 + 3 * model.shared_experts
    assert sum(ledger.tensors.values()) == pytest.approx(sum(ledger.begins_with.values()) + ledger.held)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", [Layout(4096, tp=4, micro_batch=2), Layout(8192, dtype="bfloat16", cp=4, tp=2)])
def test_so_does_latent_attention(layout, recompute):
    """With the block of multi-token prediction, whose ledger ends with the gradient of the last layer's output."""
    whole = [f"{name}.rsqrt" for name in ("attention_norm", "mlp_norm", "q_a_norm", "kv_a_norm")]
    ledger = layer.backward(V3, layout._replace(recompute=recompute), experts=True)
    assert set(ledger.tensors) - {"output", "narrow input"} == {*whole, INPUT} and ledger.stored == 2 + 7 + 4 + 3
    assert ledger.in_buffers == set()
    ledger = second_block.backward(replace(V3, mtp=1), layout._replace(recompute=recompute), shared=False)
    whole += [f"{name}.rsqrt" for name in ("enorm", "hnorm", "shared_head.norm")]
    left = {*whole, "gradient of the last layer's output"}
    assert set(ledger.tensors) - {"output", "narrow input"} == left and ledger.stored == 16 + 4 + 1


def test_shared_experts_compute_while_rows_travel():
    """So their gradients come after those of all others, and both buffers of the all-to-all are there meanwhile."""
    matrix, rows = DEEPSEEK.hidden * DEEPSEEK.expert_ffn, DEEPSEEK.top_k * 4096 * DEEPSEEK.hidden * 2
    sizes = [unit.size for unit in parameters_of_rank(DEEPSEEK, Layout(4096), 0).units]  # head, last norm, last layer
    assert sizes[2:8] == [DEEPSEEK.experts * matrix] * 3 + [DEEPSEEK.shared_experts * matrix] * 3
    for ranks, buffers in ((1, 0), (4, 2)):
        ledger = layer_ledger(DEEPSEEK, Layout(4096, dtype="bfloat16", dp=ranks, ep=ranks), True)
        order = [entry.name.split(":")[0] == "experts" for entry in ledger.entries if ", added up" in entry.name]
        assert order[:6] == [True] * 3 + [False] * 3
        sent = {entry.communication for entry in ledger.entries if entry.name.startswith("shared.")}
        assert sent == {buffers * rows}


@pytest.mark.parametrize("tp", [1, 4])
def test_a_split_backward_keeps_operands(tp):
    """Of each matrix: its input, and the gradient of its output, which with tp has been gathered."""
    layout = Layout(4096, dtype="bfloat16", tp=tp, pp=2, schedule="zb-h1", micro_batches=4)
    ledger = layer_ledger(LLAMA, layout, False)
    names = ["down", "up", "gate", "o_proj", "v", "k", "q"]
    assert [each.name for each in ledger.deferred] == names and ledger.stored == 2
    kept = {name for each in ledger.deferred for name in each.operands}
    assert set(ledger.tensors) == STATISTICS | {INPUT} | kept
    assert {"down.input", "o_proj.input", "gradient of gate", "gradient of up"} < kept
    assert ({OUTPUT, MIDDLE} < kept) == (tp == 1)
    weights = sum(each.weight for each in ledger.deferred)
    h, f, d = LLAMA.hidden, LLAMA.ffn, LLAMA.head_width
    assert weights == 2 * (2 * h * h + 2 * h * LLAMA.kv_heads * d + 3 * h * f) / tp


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_keeps_what_steps_4_and_7_say(recompute, tp, dtype):
    layout, torch_dtype = Layout(2048, dtype=dtype, tp=tp, micro_batch=2), getattr(torch, dtype)
    way = Way(sequence_parallel=tp > 1, full_recompute=recompute == "full")
    dense = block_activations(LLAMA, 2, 2048, torch_dtype, tp, way)
    if recompute == "selective":
        dense["attention"] -= 2 * 2048 * LLAMA.heads * 4 // tp
    assert sum(tensors_of_layer(LLAMA, layout, recompute, experts=False).values()) == sum(dense.values())
    if recompute == "none":
        dense = block_activations(MIXTRAL, 2, 2048, torch_dtype, tp, way)
        rest, tokens = dense["norms"] + dense["column inputs"] // 2 + dense["attention"], 2 * 2048 // tp
        of_experts = expert_activations(MIXTRAL, tokens, 2 * tokens, torch_dtype.itemsize, 1)
        found = tensors_of_layer(MIXTRAL, layout, recompute, experts=True)
        assert sum(found.values()) == rest + of_experts and min(found.values()) > 0


def test_a_ledger_refuses_what_cannot_be():
    ledger = Ledger({"x": 4.0}, in_buffers=["x"])
    with pytest.raises(ValueError, match="made twice: x"):
        ledger.event("again", {"x": 1.0})
    with pytest.raises(ValueError, match="released, and not there: y"):
        ledger.event("nothing", {}, ["y"])


def test_events_by_hand():
    """A product of x (4) makes the gradients of x and of a weight (2); then x goes, and after the sum the weight's."""
    ledger = Ledger({"x": 4.0, "gradient of y": 3.0})
    ledger.linear("product", Linear("w", 4.0, 2.0), {"gradient of x": 4.0}, ["x"], ["gradient of y"])
    ledger.add_up("product", [Linear("w", 4.0, 2.0)])
    assert [(each.name, each.held, each.stored) for each in ledger.entries] == [
        ("product", 6.0, 0),
        ("product, added up", 2.0, 1),
    ]
    assert ledger.tensors == {"gradient of y": 3.0, "gradient of x": 4.0} and ledger.held == 0.0
    assert [each.name for each in ledger.fullest] == ["product", "product, added up"] == [e.name for e in ledger.rising]
    split = Ledger({"x": 4.0, "gradient of y": 3.0}, splits=True)
    split.linear("product", Linear("w", 4.0, 2.0), {"gradient of x": 4.0}, ["x"], ["gradient of y"])
    split.event("later", {}, ["x"])
    assert split.held == 4.0 and "x" in split.tensors, "what is put off is not released"


def test_the_table_of_the_lesson():
    """Llama 3 8B, 4,096 tokens: how its backward begins, in MB; and it is fullest there."""
    ledger = layer_ledger(LLAMA, Layout(4096, dtype="bfloat16"), False)
    before = sum(ledger.begins_with.values())
    held = [round((before + entry.held) / 1e6) for entry in ledger.entries]
    assert round(before / 1e6) == 856 and held[:4] == [1091, 974, 1091, 856] and max(held) == 1091
    inner, x = 4096 * 14336 * 2, 4096 * 4096 * 2
    assert ledger.entries[0].made == {"gradient of down.input": inner, "gradient of down.weight": inner}
    kept = 4 * inner + (4 + 2 * 3) * x + 2 * x // 4 + 4096 * (32 + 2) * 4  # MLP; q, output, norms; k, v; statistics
    assert before == kept + x
