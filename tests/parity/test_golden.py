"""The curve of step 1 is frozen: float64, a generated token stream, so nothing but the training itself can change it.

`python -m tests.parity.test_golden` writes the file anew; do so only for a change of the training that is meant.
"""

import json
from pathlib import Path

import numpy as np

from tests.parity.runs import reference

FILE = Path(__file__).with_name("golden.json")
CASES = [
    "--optimizer sgd --lr 1e-2 --clip 0 --no-tie-embeddings",
    "--optimizer adamw --lr 1e-3 --clip 0.5 --tie-embeddings",
    "--optimizer adamw --lr 1e-3 --clip 0.5 --no-tie-embeddings --attention naive --recompute full --micro-batch 4",
]


def curves() -> dict[str, dict[str, list[float]]]:
    results = {case: reference(f"{case} --steps 10") for case in CASES}
    return {case: {"loss": result.losses, "grad_norm": result.norms} for case, result in results.items()}


def test_losses_and_gradient_norms_are_those_on_file():
    golden = json.loads(FILE.read_text())
    assert list(golden) == CASES
    for case, found in curves().items():
        np.testing.assert_allclose(found["loss"], golden[case]["loss"], rtol=1e-11)
        np.testing.assert_allclose(found["grad_norm"], golden[case]["grad_norm"], rtol=1e-10)


if __name__ == "__main__":
    FILE.write_text(json.dumps(curves(), indent=1) + "\n")
