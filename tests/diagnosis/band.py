"""`python -m tests.diagnosis.band`: measure what rounding does to a curve, and write common/explaining/band.json.

Each training is repeated with sums in another order: other micro-batches, another attention, other layouts on two
ranks. Everything else stays the same, so what differs is rounding. It takes a quarter of an hour.
"""

import itertools
import json
from collections.abc import Iterable

from common.explaining.band import FILE
from common.explaining.differences import KEYS, drift, relative_to
from tests.diagnosis.runs import SMALL, Curve, Training, train_all

STEPS, SETTLED = 60, 8
MEASURED = 48  # steps of the band. After them, the largest of these models is so sensitive that rounding is amplified
TYPES = "float64", "float32", "bfloat16"
TRAININGS = [
    f"{SMALL} {flags} --seed {seed}"
    for flags in (
        "--optimizer adamw --lr 1e-3",
        "--optimizer adamw --lr 4e-3 --warmup 5",
        "--optimizer sgd --lr 0.3 --clip 0",
        "--optimizer adamw --lr 1e-3 --layers 4 --hidden 64 --seq-len 64",
    )
    for seed in (11, 12)
] + ["--seed 11"]  # the default model of all steps, on its text
LAYOUTS = (  # step, ranks and flags; the first is the reference of the others
    (1, 1, "--micro-batch 8"),
    (1, 1, "--micro-batch 1"),
    (1, 1, "--micro-batch 2 --attention naive"),
    (2, 2, "--dp 2 --micro-batch 2"),
    (4, 2, "--tp 2 --micro-batch 8"),
    (5, 2, "--pp 2 --micro-batch 2"),
    (6, 2, "--cp 2 --micro-batch 4"),
)


def trainings(dtype: str) -> list[list[Training]]:
    """Groups of the same training, of which the first one is the reference."""
    each = [f"{flags} --dtype {dtype} --steps {STEPS}" for flags in TRAININGS]
    return [[Training(step, ranks, f"{flags} {layout}") for step, ranks, layout in LAYOUTS] for flags in each]


def differences(groups: Iterable[list[Curve]], column: int) -> list[list[float]]:
    """Of each pair, the relative differences of one column by step."""
    pairs = [(first, other) for first, *others in groups for other in others]
    return [[relative_to(x[column], y[column]) for x, y in zip(*pair, strict=True)] for pair in pairs]


def band_of(groups: list[list[Curve]]) -> dict:
    """What `common.explaining.band.Band` holds of one type."""
    largest, jump, one_sided = {}, {}, {}
    for column, key in enumerate(KEYS):
        signed = differences(groups, column)
        one_sided[key] = max(abs(drift(pair[:MEASURED])) for pair in signed)
        pairs = [[*map(abs, pair)] for pair in signed]
        largest[key] = [*itertools.accumulate(map(max, zip(*pairs)), max)]
        before = [[*itertools.accumulate(pair, max, initial=largest[key][0])] for pair in pairs]
        jump[key] = max(y / x for was, now in zip(before, pairs) for x, y in [*zip(was, now)][SETTLED:])
    return {
        "largest": {key: [float(f"{value:.3g}") for value in values[:MEASURED]] for key, values in largest.items()},
        "jump": {key: round(value, 2) for key, value in jump.items()},
        "settled": SETTLED,
        "drift": {key: round(value, 2) for key, value in one_sided.items()},
    }


def write(types: dict[str, dict]) -> None:
    """Write band.json, a line for each type."""
    lines = ",\n".join(f'  "{name}": {json.dumps(each)}' for name, each in types.items())
    made = f'"command": "python -m tests.diagnosis.band", "steps": {STEPS}'
    FILE.write_text(f'{{{made}, "types": {{\n{lines}\n}}}}\n')


def main() -> None:
    every = {dtype: trainings(dtype) for dtype in TYPES}
    curves = train_all(run for groups in every.values() for group in groups for run in group)
    write({name: band_of([[curves[run] for run in group] for group in groups]) for name, groups in every.items()})
    print(f"{len(curves)} trainings: {FILE}")


if __name__ == "__main__":
    main()
