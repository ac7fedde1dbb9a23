"""Step 3 trains exactly what step 1 trains, in every stage of ZeRO."""

import pytest

from tests.parity.runs import assert_parity, reference, run_cases


@pytest.mark.parametrize("world", [2, 3])
def test_step03_equals_step01(world):
    training = "--optimizer adamw --lr 1e-3 --clip 0.5 --no-tie-embeddings"
    cases = [f"{training} --bucket-mb 0.02 --zero {stage}" for stage in range(4)]
    for case, result in zip(cases, run_cases(world, 3, cases), strict=True):
        assert_parity(result, reference(training), f"{world} ranks, {case}")
