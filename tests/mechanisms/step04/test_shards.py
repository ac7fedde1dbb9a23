"""Who holds what: parts that differ, and copies that stay equal to the bit; training in the narrow types."""

import pytest
import torch

import step04_tensor_parallel.train as step04
from common.launching.command_line import parse
from common.model import Decoder
from common.model_config import ModelConfig
from common.process_groups import Degrees, build_mesh, mesh_of
from common.start import environment
from common.weights.initialisation import materialise, random_values
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import decoder
from tests.parity.runs import ADAMW, SMALL, TIED, UNTIED, differences, reference, run_cases, training_of
from tests.parity.test_step03_precision import overflow_case
from tests.parity.test_step04 import ONE, WHOLE_SEQUENCE

# ---- before the first step -------------------------------------------------------------------------------------------

MODELS = {  # heads 12, so that 2, 3 and 4 ranks divide them
    "as many K/V heads as ranks or more": ModelConfig(50, 24, 2, 12, 12, 36, False),
    "one K/V head": ModelConfig(50, 24, 2, 12, 1, 36, True),
    "more rows of padding than of tokens": ModelConfig(5, 24, 1, 12, 12, 12, False),
}


def ranks_initial():
    """(name, box, owner, values) of every parameter, for every model."""
    found = {}
    for name, model_config in MODELS.items():
        mesh = build_mesh(Degrees(tp=environment().world_size), torch.device("cpu"), model_config.kv_heads)
        model = decoder(mesh, model_config, (True, "overlap"))
        found[name] = [(p.spec.name, p.spec.box, p.spec.owner, p.detach()) for p in model.parameters()]
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_holds_its_own_part_of_the_one_model(world):
    ranks = run_ranks(world, ranks_initial)
    for name, model_config in MODELS.items():
        whole = Decoder(model_config)
        materialise(whole, torch.float32, torch.device("cpu"), random_values(0))
        for index, parameter in enumerate(whole.parameters()):
            owned, parts = torch.zeros(parameter.shape), [rank[name][index] for rank in ranks]
            for same, box, owner, values in parts:
                case, inside = (name, same, box), tuple(slice(start, stop) for start, stop in box)
                expected = parameter.detach()[inside]
                assert same == parameter.spec.name
                assert torch.equal(values[: len(expected)], expected), case
                assert not values[len(expected) :].any(), f"{case}: padding is zero"
                owned[inside] += owner
            assert (owned == 1).all(), f"{name}, {parameter.spec.name}: every element has one owner"
            if parameter.dim() > 1:  # norms are whole
                ways = min(model_config.kv_heads, world) if "k_proj" in same or "v_proj" in same else world
                cut = 1 if same.endswith(("o_proj.weight", "down_proj.weight")) else 0
                share = -(-parameter.shape[cut] // ways) * parameter.shape[1 - cut]
                assert {values.numel() for *_, values in parts} == {share}, f"{name}, {same}"


# ---- after training --------------------------------------------------------------------------------------------------


def ranks_trained(cases):
    """Every tensor that this rank updates, owned or not, as (name, box, flat range) -> values."""
    found = []
    for flags in cases:
        config = parse(4, [*SMALL.split(), *flags.split()])
        config.resolve_and_check(environment().world_size)
        mesh = mesh_of(config, torch.device("cpu"))
        tensors = step04.train(config, mesh)
        found.append({(t.spec.name, t.spec.box, t.spec.flat_range): t.detach().clone() for t in tensors})
    return found


def test_replicas_stay_equal_to_the_bit():
    """In every type and layout, norms and shared K/V heads are the same on all ranks after two steps."""
    base = f"{UNTIED} {ADAMW} --micro-batch 6"
    cases = [f"{base} --tp 4 --kv-heads 1", f"{base} --tp 4 --dtype float32 {WHOLE_SEQUENCE}"]
    cases += [f"{base} --tp 4 --kv-heads 2 --dtype bfloat16", f"{base} --tp 2 --kv-heads 1 --zero 3 --dtype float32"]
    cases += [f"{base} --tp 2 --kv-heads 1 {WHOLE_SEQUENCE} --tp-mode plain --zero 1"]
    for case, *ranks in zip(cases, *run_ranks(4, ranks_trained, cases, timeout=300), strict=True):
        holders = {}
        for key, values in (item for rank in ranks for item in rank.items()):
            holders.setdefault(key, []).append(values)
        for key, copies in holders.items():
            assert all(torch.equal(copies[0], other) for other in copies[1:]), f"{case}: {key}"
        shared = {key[0].split(".", 2)[-1] for key, copies in holders.items() if len(copies) > 1}
        kv_heads = {"attention.k_proj.weight", "attention.v_proj.weight"} if "--kv-heads" in case else set()
        assert {"attention_norm.weight", "mlp_norm.weight"} | kv_heads <= shared, case
        assert not {"attention.q_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"} & shared, case


# ---- narrow types ----------------------------------------------------------------------------------------------------


def test_bfloat16_agrees_with_one_process():
    """Row-parallel layers add up what every rank has rounded to 8 bits, so it is not equal: but tensor parallelism adds
    less to the losses, gradient norms and weights than bfloat16 itself does."""
    narrow = "--dtype bfloat16"
    cases = [f"{UNTIED} {ADAMW} {narrow} --tp 2 {ONE} {form}" for form in ("", WHOLE_SEQUENCE)]
    cases += [f"{UNTIED} {ADAMW} {narrow} --tp 2 {ONE} --tp-mode chunked --kv-heads 1"]
    cases += [f"{TIED} {ADAMW} {narrow} --tp 2 {ONE} --tp-mode plain --vocab 257 --recompute full"]
    for case, result in zip(cases, run_cases(2, 4, cases), strict=True):
        one_process = reference(training_of(case))
        found = differences(result, one_process)
        rounding = differences(one_process, reference(training_of(case).replace(narrow, "")))
        for name in ("loss", "grad_norm"):
            assert found.pop(name) < rounding.pop(name), (case, name)
        assert 0 < max(found.values()) < max(rounding.values()) < 2**-8, case


def overflow_cases(cases):
    return [overflow_case(4, flags) for flags in cases]


def test_all_ranks_skip_a_step_in_which_one_of_them_overflowed():
    """In float16, though only one rank, which holds other parts than its peers, has seen it."""
    training = f"{UNTIED} {ADAMW} --dtype float16 --steps 6"
    known, states = overflow_case(1, f"{training} {ONE}")
    for cases in run_ranks(2, overflow_cases, [f"{training} --tp 2 {ONE} {form}" for form in ("", WHOLE_SEQUENCE)]):
        for part, seen in cases:
            assert seen == states
            for ours, theirs in zip(part["curve"], known["curve"] if part["curve"] else []):
                assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
