"""Small trainings whose curves are compared: of any step and layout, right or with a mutant, perhaps resumed."""

import contextlib
import io
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from common.start import environment
from tests.harness.ranks import run_ranks
from tests.mutants.patches import assert_applies, patched
from tests.parity.runs import curve_of, train_here

SMALL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 32 --data synthetic"
SMALL += " --global-batch 8 --no-tie-embeddings"
Curve = list[tuple[float, float]]  # loss and gradient norm of every step


@dataclass(frozen=True)
class Training:
    """One training: train.py of `step` on so many ranks. `mutant` is applied from the step `since` on, before which the
    run saves a checkpoint, ends, and goes on from it (0: from the first step, in one piece).
    """

    step: int
    ranks: int
    flags: str
    mutant: str | None = None
    since: int = 0


def train(training: Training) -> Curve:
    """Train on this rank together with the others. Rank 0 alone knows the curve."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{training.flags} --device cpu --peak-tflops 1 --run-dir {folder}"
        if training.since:
            train_here(training.step, f"{flags} --steps {training.since} --save-every {training.since}")
            flags += " --resume auto"
        with patched(training.mutant):
            train_here(training.step, flags)
        return curve_of(folder) if environment().rank == 0 else []


def train_each(trainings: list[Training]) -> list[Curve]:
    return [train(training) for training in trainings]


def train_all(trainings: Iterable[Training]) -> dict[Training, Curve]:
    """The curves of all trainings; those on equally many ranks share one start of these."""
    trainings, found = list(dict.fromkeys(trainings)), {}
    assert_applies(*(training.mutant for training in trainings if training.mutant))
    for ranks in sorted({training.ranks for training in trainings}):
        mine = [training for training in trainings if training.ranks == ranks]
        with contextlib.redirect_stdout(io.StringIO()):  # what ranks print of each step
            curves = run_ranks(ranks, train_each, mine, timeout=3000)[0]
        found |= dict(zip(mine, curves, strict=True))
    return found
