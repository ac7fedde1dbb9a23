"""Weight gradients that products add to their sums: the same as autograd's, and in 16 bits without its rounding."""

from unittest import mock

import torch

from common.launching.command_line import parse
from common.process_groups import mesh_of
from step01_single_gpu.data.batches import load_batches
from step08_5d import train, weight_sums
from tests.harness.cuda_rules import cuda_rules
from tests.harness.ranks import run_ranks
from tests.parity.runs import ADAMW, SMALL, assemble, assert_parity, reference, train_case, training_of

CASES = [
    f"{ADAMW} --micro-batch 1 --zero 2",
    f"{ADAMW} --micro-batch 1 --zero 3 --recompute full",
    f"{ADAMW} --micro-batch 3 --tp 2",
    f"{ADAMW} --micro-batch 3 --pp 2 --schedule zb-h1",  # only backwards that are whole
    f"{ADAMW} --micro-batch 3 --pp 2 --experts 8 --expert-ffn 20 --shared-experts 1",
]


def train_with_sums(cases: list[str]) -> list[dict]:
    with mock.patch.object(weight_sums, "launches_kernels", lambda *_: True):
        return [train_case(8, case) for case in cases]


def test_numbers_are_the_same():
    for case, ranks in zip(CASES, zip(*run_ranks(2, train_with_sums, CASES), strict=True), strict=True):
        assert_parity(assemble(list(ranks)), reference(training_of(case), 7), case)


def test_nothing_is_rounded_between_product_and_sum():
    """Three micro-batches in bfloat16, and a sum that an earlier step has left: NaN, here."""
    config = parse(8, f"{SMALL} --global-batch 3 --micro-batch 1 --dtype bfloat16".split())
    config.resolve_and_check(1)
    mesh, exact = mesh_of(config, torch.device("cpu")), {}
    with mock.patch.object(weight_sums, "launches_kernels", lambda *_: True), cuda_rules():
        pipeline, optimizer, balancing = train.build(config, mesh)
        for name, weight in pipeline.stages[0].named_parameters():
            if hasattr(weight, "postpone"):
                exact[name] = torch.zeros(weight.shape, dtype=torch.float64)

                def noted(operands, add=weight.postpone, total=exact[name]):
                    _, dy, x, _ = operands
                    total += dy.double().flatten(0, -2).T @ x.double().flatten(0, -2)
                    add(operands)

                weight.postpone = noted
        for unit in pipeline.zero_wrappers[0].units:
            unit.make_bucket().flat.fill_(torch.nan)
        batches = load_batches(config, mesh)
        pipeline.run(lambda index: train.take_part(*batches.micro_batch(0, index, 1, 0, 1), config, mesh, None), 1)
        found = dict(zip((each.spec.name for each in optimizer.parameters), pipeline.finish(), strict=True))
    assert len(exact) == 7 * config.model_config.layers
    for name, total in exact.items():
        error = (found[name].view_as(total).double() - total).norm() / total.norm()
        assert error < 1e-6, f"{name}: {error}, where rounding to bfloat16 leaves 1e-3"
