"""Schedules go from us to torch.distributed.pipelining and back: each runtime runs what the other has planned.

By default 4 ranks take a few of them; with TEST_ALL=1 worlds of 2 to 4 ranks take all, and the two validators judge the
same damaged schedules.
"""

import itertools
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from common.errors import UsageError
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.further.csv_files import read_schedule
from step05_pipeline.schedules.further.torch_files import write_torch_csv
from step05_pipeline.schedules.validator import check_schedule
from tests.harness.ranks import run_ranks
from tests.outside import pipelining
from tests.outside.pipelining import PRELOAD, THEIRS  # noqa: F401 (of the fork server)
from tests.parity.cases import ALL

TOLERANCE = 1e-12
OURS = [("1f1b", 6, None), ("interleaved", 4, 3), ("zb-h2", 5, None), ("zbv", 8, None), ("dualpipev", 9, None)]
# Files of these sizes, of which only the actions are compared: ranks, micro-batches
DUAL = [(p, m) for p in (1, 2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 5 * p)]


def exchange(cases: list[tuple], mine: list[tuple], folder: Path) -> dict[str, dict[tuple, float]]:
    """On each rank the largest error of a gradient, by who ran what.

    cases: our schedules as (name, micro-batches, stages per rank). mine: PyTorch's.
    """
    ranks, mesh, folder = dist.get_world_size(), pipelining.groups(), Path(folder, str(dist.get_rank()))
    folder.mkdir(parents=True)
    errors = {"theirs runs ours": {}, "ours runs theirs": {}, "in pairs": {}}
    for case in cases:
        name, micro_batches, stages = case
        schedule = build_schedule(name, ranks, micro_batches, stages)
        write_torch_csv(schedule, folder / "ours.csv")
        errors["theirs runs ours"][case] = pipelining.error_of_theirs(folder / "ours.csv", schedule)
    for case in mine:
        name, micro_batches, stages = case
        schedule = pipelining.theirs(name, ranks, micro_batches, stages, folder)
        check_schedule(schedule)
        errors["ours runs theirs"][case] = pipelining.error_of_ours(schedule, mesh, Pipeline)
        if schedule.overlapped:
            errors["in pairs"][case] = pipelining.error_of_ours(schedule, mesh)
    return errors


def a_few(folder: Path) -> tuple[dict, dict[tuple, tuple]]:
    """The default cases, and the rows of PyTorch's DualPipeV for several sizes."""
    errors = exchange(OURS, [(name, 8, 2) for name in THEIRS], folder)
    rows = {}
    if dist.get_rank() == 0:
        for p, m in DUAL:
            rows[p, m] = pipelining.theirs("DualPipeV", p, m, 2, folder).actions
    return errors, rows


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> list[tuple]:
    return run_ranks(4, a_few, tmp_path_factory.mktemp("files"))


def test_their_runtime_runs_our_schedules(few):
    for errors, _ in few:
        assert errors["theirs runs ours"].keys() == set(OURS)
        assert max(errors["theirs runs ours"].values()) < TOLERANCE, errors


def test_our_executor_runs_their_schedules(few):
    for errors, _ in few:
        assert len(errors["ours runs theirs"]) == len(THEIRS) and len(errors["in pairs"]) == 1
        assert max((errors["ours runs theirs"] | errors["in pairs"]).values()) < TOLERANCE, errors


def test_dualpipe_is_in_their_order(few):
    """PyTorch has the V alone. Its ranks are half of those of a whole DualPipe, which has twice as many micro-batches:
    on this half they number those of each direction by themselves.
    """
    for (p, m), rows in few[0][1].items():
        assert rows == build_schedule("dualpipev", p, m).actions, (p, m)
        near = build_schedule("dualpipe", 2 * p, 2 * m).actions[:p]
        own = [[(each.kind, each.micro_batch // 2, each.chunk) for each in row] for row in near]
        assert own == [[(each.kind, each.micro_batch, each.chunk) for each in row] for row in rows], (p, m)


# ---- with TEST_ALL=1 -------------------------------------------------------------------------------------------------


def every_schedule(ranks: int) -> list[tuple]:
    """All of the catalogue that have one copy of the model."""
    found = []
    for name, entry in SCHEDULES.items():
        for m, stages in itertools.product(range(1, 2 * ranks + 4), (entry.chunks,) if entry.chunks else (2, 3)):
            if name != "dualpipe" and (name != "interleaved" or m % ranks == 0):
                found.append((name, m, stages))
    return found


def every_schedule_of_theirs(ranks: int) -> list[tuple]:
    """All that PyTorch does not refuse."""
    found = []
    for name, m in itertools.product(THEIRS, range(1, 2 * ranks + 4)):
        rounds = max(1, m // ranks)
        if ("Interleaved" not in name or m % rounds == 0) and (name != "DualPipeV" or m >= 2 * ranks):
            found += [(name, m, stages) for stages in ((2,) if "V" in name else (1, 2, 3))]
    return found


@pytest.mark.skipif(not ALL, reason="hundreds of steps: with TEST_ALL=1")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_schedules(ranks, tmp_path):
    ours, others = every_schedule(ranks), every_schedule_of_theirs(ranks)
    for errors in run_ranks(ranks, exchange, ours, others, tmp_path, timeout=600):
        assert errors["theirs runs ours"].keys() == set(ours) and errors["ours runs theirs"].keys() == set(others)
        for who, each in errors.items():
            wrong = {case: error for case, error in each.items() if not error < TOLERANCE}
            assert not wrong, (who, wrong)


CHANGES = 600


class Cell(NamedTuple):
    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def cells_of(schedule: Schedule) -> list[list[Cell]]:
    return [
        [Cell(schedule.stage_of(rank, each.chunk)[1], each.kind, each.micro_batch) for each in row]
        for rank, row in enumerate(schedule.actions)
    ]


def damage(rows: list[list[Cell]], chance: random.Random, micro_batches: int) -> None:
    """Change one cell, or its place."""
    row = chance.choice(rows)
    at, to = chance.randrange(len(row)), chance.randrange(len(row))
    match chance.choice(["swap", "move", "drop", "repeat", "kind", "micro-batch", "stage", "rank"]):
        case "swap":
            row[at], row[to] = row[to], row[at]
        case "move":
            row.insert(to, row.pop(at))
        case "drop":
            row.pop(at)
        case "repeat":
            row.insert(to, row[at])
        case "kind":
            row[at] = row[at]._replace(kind=chance.choice("FBIW"))
        case "micro-batch":
            row[at] = row[at]._replace(micro_batch=chance.randrange(micro_batches))
        case "stage":
            row[at] = row[at]._replace(stage=row[to].stage)
        case "rank":
            chance.choice(rows).append(row.pop(at))


def accepted_by_torch(rows: list[list[Cell]], stages: int, micro_batches: int) -> bool:
    """Whether PyTorch finds nothing wrong, before and after it has placed the messages."""
    from torch.distributed.pipelining import schedules as pytorch

    order = {rank: [pytorch._Action.from_str(str(cell)) for cell in row] for rank, row in enumerate(rows)}
    try:
        ranks = pytorch._validate_schedule(order, len(rows), stages, micro_batches)
        order = pytorch._add_send_recv(order, ranks.__getitem__, stages)
        pytorch._simulate_comms_compute(order, ranks.__getitem__, stages)
    except (AssertionError, KeyError, ValueError):
        return False
    return True


def accepted_by_us(rows: list[list[Cell]], micro_batches: int, path: Path) -> bool:
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    try:
        check_schedule(read_schedule(path, len(rows), micro_batches))
    except UsageError:
        return False
    return True


@pytest.mark.skipif(not ALL, reason="imports PyTorch's pipelines: with TEST_ALL=1")
def test_the_validators_agree(tmp_path):
    """On schedules with one or two random changes. PyTorch alone accepts some in which a stage does not do F and B, or
    F, I and W, exactly once for each micro-batch: it counts them in sets, and all micro-batches of a stage together.
    """
    chance, said = random.Random(0), Counter()
    for _ in range(CHANGES):
        name, p, m = chance.choice([each for each in SCHEDULES if each != "dualpipe"]), *chance.choices((2, 3, 4), k=2)
        schedule = build_schedule(name, p, p * m)
        rows = cells_of(schedule)
        for _ in range(chance.choice((1, 1, 2))):
            damage(rows, chance, p * m)
        kinds = defaultdict(list)
        for cell in itertools.chain(*rows):
            kinds[cell.stage, cell.micro_batch].append(cell.kind)
        if any({"B", "W"} <= set(each) and "I" not in each for each in kinds.values()):
            continue  # to us this is a file of PyTorch 2.5
        complete = all(sorted(each) in (["B", "F"], ["F", "I", "W"]) for each in kinds.values())
        ours = accepted_by_us(rows, p * m, tmp_path / "damaged.csv")
        both = ours, accepted_by_torch(rows, schedule.stages, p * m)
        said[both] += 1
        assert both in ((True, True), (False, False)) or (both == (False, True) and not complete), (name, p, m, rows)
    assert min(said[True, True], said[False, False]) > CHANGES / 10 and said[False, True] > 10, said
