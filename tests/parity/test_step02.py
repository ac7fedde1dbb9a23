"""Step 2 trains exactly what step 1 trains: float64, every step's loss and gradient norm, every final parameter."""

import itertools

import pytest

from tests.parity.pairwise import thin
from tests.parity.runs import ADAMW, SGD, TIED, UNTIED, assert_equal_to_one_process

FACTORS = {
    "embeddings": [TIED, UNTIED],
    "optimizer": [SGD, ADAMW],
    "mode": [*(f"--dp-mode {mode}" for mode in ("naive", "overlap", "bucket")), "--dp-mode bucket --bucket-mb 0.02"],
}
HARD = [
    "--recompute full --dp-mode bucket --bucket-mb 0.02",
    "--recompute selective --attention naive --dp-mode overlap",
    "--kv-heads 1 --dp-mode bucket",
    "--kv-heads 4 --dp-mode naive",
    "--global-batch 24 --micro-batch 2 --dp-mode bucket",
]
WORLDS = [2, 3, 4]


def every_combination(world: int) -> list[dict]:
    """With 12 / world micro-batches of one sequence on each rank or with a single micro-batch."""
    factors = FACTORS | {"accumulation": ["--micro-batch 1", f"--micro-batch {12 // world}"]}
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


@pytest.mark.parametrize("world", WORLDS)
def test_step02_equals_step01(world):
    cases = [" ".join(case.values()) for case in thin({world: every_combination(world) for world in WORLDS})[world]]
    trainings = itertools.product(FACTORS["embeddings"], FACTORS["optimizer"])
    cases += [f"{' '.join(training)} {hard}" for training, hard in zip(itertools.cycle(trainings), HARD) if world != 3]
    assert_equal_to_one_process(2, world, cases)
