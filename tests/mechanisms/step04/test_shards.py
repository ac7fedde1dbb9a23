"""Copies that stay equal to the bit, and training in the narrow types."""

import torch

import step04_tensor_parallel.train as step04
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks
from tests.parity.cases import ONE, WHOLE
from tests.parity.runs import ADAMW, SMALL, TIED, UNTIED, differences, reference, run_cases, training_of


def ranks_trained(cases):
    """Every tensor that this rank updates, owned or not, as (name, box, flat range) -> values."""
    found = []
    for flags in cases:
        config = configure(4, f"{SMALL} {flags}")
        tensors = step04.train(config, mesh_of(config))
        found.append({(t.spec.name, t.spec.box, t.spec.flat_range): t.detach().clone() for t in tensors})
    return found


def test_replicas_stay_equal_to_the_bit():
    """In every type and layout, norms and shared K/V heads are the same on all ranks after two steps."""
    base = f"{UNTIED} {ADAMW} --micro-batch 6"
    cases = [f"{base} --tp 4 --kv-heads 1", f"{base} --tp 4 --dtype float32 {WHOLE}"]
    cases += [f"{base} --tp 4 --kv-heads 2 --dtype bfloat16", f"{base} --tp 2 --kv-heads 1 --zero 3 --dtype float32"]
    cases += [f"{base} --tp 2 --kv-heads 1 {WHOLE} --tp-mode plain --zero 1"]
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


def test_bfloat16_agrees_with_one_process():
    """Row-parallel layers add up what every rank has rounded to 8 bits, so it is not equal: but tensor parallelism adds
    less to the losses, gradient norms and weights than bfloat16 itself does."""
    narrow = "--dtype bfloat16"
    cases = [f"{UNTIED} {ADAMW} {narrow} --tp 2 {ONE} {form}" for form in ("", WHOLE)]
    cases += [f"{UNTIED} {ADAMW} {narrow} --tp 2 {ONE} --tp-mode chunked --kv-heads 1"]
    cases += [f"{TIED} {ADAMW} {narrow} --tp 2 {ONE} --tp-mode plain --vocab 257 --recompute full"]
    for case, result in zip(cases, run_cases(2, 4, cases), strict=True):
        one_process = reference(training_of(case))
        found = differences(result, one_process)
        rounding = differences(one_process, reference(training_of(case).replace(narrow, "")))
        for name in ("loss", "grad_norm"):
            assert found.pop(name) < rounding.pop(name), (case, name)
        assert 0 < max(found.values()) < max(rounding.values()) < 2**-8, case
