"""What each stage of ZeRO holds, sends and does, and when: no curve shows any of this."""

import pytest

from common.costs.vocabulary import WIDTHS, added
from step03_zero import cost
from tests.harness.observing import configure, observe_each
from tests.harness.ranks import run_ranks
from tests.mechanisms.step03.checks import Plan, check, check_wire
from tests.mechanisms.step03.observe import BASE, Observation, observe
from tests.parity.cases import ALL

WORLDS = [2, 3, 4] if ALL else [4]  # copies of two ranks are among those of four
SMALL = "--bucket-mb 0.02"  # of 40,000 parameters: ten buckets
LARGE = "--layers 2 --hidden 128 --heads 4 --kv-heads 4 --ffn 384 --vocab 512 --bucket-mb 0.5"


def plan_of(flags: str, world: int) -> Plan:
    return Plan(configure(3, f"{BASE} {flags}", world), world)


def cases(world: int) -> list[str]:
    once, several = f"--micro-batch {12 // world} {SMALL}", f"--micro-batch 1 {SMALL}"  # 1 or 12/world micro-batches
    found = [f"--zero {stage} {once} --dtype {dtype}" for stage in range(4) for dtype in ("float32", "bfloat16")]
    found += [f"--zero {stage} {several}" for stage in range(4)]
    found += [f"--zero {stage} {several} --zero-reduce step --dtype bfloat16" for stage in (2, 3)]
    found += [f"--zero {stage} {once} --tie-embeddings" for stage in (1, 3)]
    found += [f"--zero 3 {several} --tie-embeddings", f"--zero 3 {once} --layers 1"]
    found += [f"--zero 3 {once} --recompute {mode}" for mode in ("selective", "full")]
    found += [f"--zero 3 {several} --recompute full"]
    if world == 4:
        found += [f"--zero {stage} {once} --zero-replicas 2" for stage in (1, 2, 3)]
        found += [f"--zero {stage} {several} --zero-replicas 2 --dtype bfloat16" for stage in (1, 2, 3)]
        found += [f"--zero 3 {once} --zero-replicas 4"]
    return found


@pytest.fixture(scope="module", params=WORLDS)
def runs(request) -> tuple[int, dict[str, list[Observation]]]:
    """What every rank of a world did in every case."""
    world = request.param
    every = cases(world)
    ranks = run_ranks(world, observe_each, observe, every, timeout=300)
    return world, dict(zip(every, zip(*ranks, strict=True), strict=True))


def test_all_of_it_is_as_the_formulas_say(runs):
    world, found = runs
    for case, ranks in found.items():
        try:
            check(ranks, plan_of(case, world))
        except AssertionError as error:
            raise AssertionError(f"{world} ranks, {case}: {error}") from error


def test_predictions_are_what_was_counted(runs):
    """The textbook's formulas: bytes sent in each group and bytes held; of stage 3 the gathers, and its most."""
    world, found = runs
    for case, ranks in found.items():
        plan = plan_of(case, world)
        sizes = [sum(plan.sizes[name] for name in region if name in plan.sizes) for region in plan.regions]
        tied = plan.config.model_config.tie_embeddings
        units, widths = (*sizes[:-1], sizes[-1] - tied * sizes[0]), WIDTHS[plan.config.dtype]
        shape = plan.stage, plan.ranks, plan.micro_batches, plan.replicas, plan.config.zero_reduce == "micro-batch"
        sent = added(cost.messages(units, *shape, widths, tied))
        held = cost.held(sum(units), plan.stage, plan.ranks, widths)
        for seen in ranks:
            for group in ("shard", "replica"):
                expected = sum(size for (name, _), (_, size) in sent.items() if name == group)
                counted = sum(call.bytes for call in seen.calls if call.group == group)
                assert counted == pytest.approx(expected, rel=0.003), (case, group)  # padding, and rounding down
            counted = list(seen.held["before the update"].values())[:2]
            expected = [held["parameters"], held["gradients"]]
            assert counted == pytest.approx(expected, rel=0.003), (case, "parameters, gradients")
            optimizer = seen.held["after the step"]["optimizer"]  # and counters
            assert optimizer == pytest.approx(held["optimizer state"], rel=0.02), case
            if plan.stage == 3 and plan.ranks > 1:
                assert len(seen.of("all_gather")) == sent["shard", "all_gather"][0], case
                most = max(sample.resident for sample in seen.samples) + sum(units) / plan.ranks * widths[0]
                assert most == pytest.approx(cost.resident(units, plan.ranks, widths[0]), rel=0.003), case


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_on_the_wire(world):
    """What the kernel counted on each rank's sockets: gloo's own reduce-scatter, say, would send twice its share."""
    every = [f"{LARGE} --zero {stage} --micro-batch {12 // world}" for stage in range(4)]
    every += [f"{LARGE} --zero {stage} --micro-batch {6 // world or 1} --dtype bfloat16" for stage in (2, 3)]
    every += [f"{LARGE} --zero {stage} --micro-batch 3 --zero-replicas 2" for stage in (1, 3) if world == 4]
    for case, ranks in zip(every, zip(*run_ranks(world, observe_each, observe, every), strict=True), strict=True):
        for seen in ranks:
            check_wire(seen, plan_of(case, world))
