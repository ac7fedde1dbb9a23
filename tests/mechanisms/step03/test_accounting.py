"""What each stage of ZeRO holds, sends and does, and when: no curve shows any of this."""

import pytest

from common.command_line import parse
from common.counts import count_parameters
from tests.harness.ranks import run_ranks
from tests.mechanisms.step03.checks import Plan, check, check_wire
from tests.mechanisms.step03.observe import BASE, Observation, observe_all

SMALL = "--bucket-mb 0.02"  # of 40,000 parameters: ten buckets
LARGE = "--layers 2 --hidden 128 --heads 4 --kv-heads 4 --ffn 384 --vocab 512 --bucket-mb 0.5"


def plan_of(flags: str, world: int) -> Plan:
    config = parse(3, [*BASE.split(), *flags.split()])
    config.resolve_and_check(world)
    return Plan(config, world)


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


@pytest.fixture(scope="module", params=[2, 3, 4])
def runs(request) -> tuple[int, dict[str, list[Observation]]]:
    """What every rank of a world did in every case."""
    world = request.param
    every = cases(world)
    ranks = run_ranks(world, observe_all, every, timeout=300)
    return world, dict(zip(every, zip(*ranks, strict=True), strict=True))


def test_all_of_it_is_as_the_formulas_say(runs):
    world, found = runs
    for case, ranks in found.items():
        try:
            check(ranks, plan_of(case, world))
        except AssertionError as error:
            raise AssertionError(f"{world} ranks, {case}: {error}") from error


# ---- the published formulas, on the same runs ------------------------------------------------------------------------


def psi(case: str) -> int:
    """Parameters of the model: the count of the textbook formulas."""
    return count_parameters(parse(3, [*BASE.split(), *case.split()]).model_config).total


@pytest.mark.parametrize("dtype, p, g, k", [("float32", 4, 4, 8), ("bfloat16", 2, 4, 12)])
def test_bytes_held_per_parameter(runs, dtype, p, g, k):
    """ZeRO (arXiv:1910.02054), section 3: p + g + k bytes a parameter, divided by N stage by stage. Gradients are
    summed in float32, and float32 weights are their own master copies, which are 4 of the 12 bytes of optimizer state.
    """
    n, found = runs
    divided = {0: (p, g, k), 1: (p, g, k / n), 2: (p, g / n, k / n), 3: (p / n, g / n, k / n)}
    for stage, each in divided.items():
        case = f"--zero {stage} --micro-batch {12 // n} {SMALL} --dtype {dtype}"
        for seen in found[case]:
            held = seen.held["before the update"]
            # Each unit is padded by less than N elements; and one step counter of 4 bytes goes with each piece
            slack = len(plan_of(case, n).units) * (n - 1), len(plan_of(case, n).sizes) * 4
            for kind, bytes_each in zip(("parameters", "gradients", "optimizer"), each, strict=True):
                least = bytes_each * psi(case) if kind != "optimizer" else 0  # who has the padding has less state
                assert least <= held[kind] <= bytes_each * (psi(case) + slack[0]) + slack[1], (stage, kind, held)


def test_collectives_and_bytes_of_the_textbook(runs):
    """2 psi (N-1)/N numbers per step in stages 0 to 2, and 3 psi (N-1)/N in stage 3, less what is not gathered for the
    backward: the last region, which is still there, and the embedding, whose backward reads no weights. So U = L + 2
    units take 2 U - 2 all-gathers and U reduce-scatters per micro-batch; the playbook counts 2 L - 1 and L for L layers
    alone. A recomputed forward gathers nothing of its own. More micro-batches cost stages 0 and 1 nothing.
    """
    n, found = runs
    m, units, spared = 12 // n, 5, 2 * 256 * 32 + 32  # embedding; head and norm
    once, several = f"--micro-batch {12 // n} {SMALL}", f"--micro-batch 1 {SMALL}"
    whole, tied, stage3 = psi(once), psi(f"{once} --tie-embeddings"), (2 * units - 2, units)
    every = m * (2 * units - 2), m * units
    expected = {f"--zero {stage} {once} --dtype float32": (None, 2 * whole) for stage in (0, 1, 2)}
    expected |= {f"--zero {stage} {several}": (None, 2 * whole) for stage in (0, 1)}
    expected[f"--zero 2 {several}"] = None, (1 + m) * whole
    expected[f"--zero 3 {once} --dtype float32"] = stage3, 3 * whole - spared
    expected |= {f"--zero 3 {once} --recompute {mode}": (stage3, 3 * whole - spared) for mode in ("selective", "full")}
    expected[f"--zero 3 {once} --tie-embeddings"] = (2 * units - 1, units), 3 * tied - 32  # one more gather, one spared
    expected |= {f"--zero 3 {several}{more}": (every, m * (3 * whole - spared)) for more in ("", " --recompute full")}
    narrow = (m * (2 * whole - spared)) / 2 + whole  # gathers of bfloat16, one reduce-scatter of float32
    expected[f"--zero 3 {several} --zero-reduce step --dtype bfloat16"] = (every[0], units), narrow
    for case, (counts, numbers) in expected.items():
        for seen in found[case]:
            if counts:
                assert (len(seen.of("all_gather")), len(seen.of("reduce_scatter"))) == counts, case
            sent = sum(call[4] for call in seen.calls if call[1] in ("shard", "replica"))
            assert sent == pytest.approx(4 * numbers * (n - 1) / n, rel=0.003), case  # padding, and rounding down


# ---- bytes on the wire -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_the_wire(world):
    """What the kernel counted on each rank's sockets: gloo's own reduce-scatter, say, would send twice its share."""
    every = [f"{LARGE} --zero {stage} --micro-batch {12 // world}" for stage in range(4)]
    every += [f"{LARGE} --zero {stage} --micro-batch {6 // world or 1} --dtype bfloat16" for stage in (2, 3)]
    every += [f"{LARGE} --zero {stage} --micro-batch 3 --zero-replicas 2" for stage in (1, 3) if world == 4]
    for case, ranks in zip(every, zip(*run_ranks(world, observe_all, every), strict=True), strict=True):
        for seen in ranks:
            check_wire(seen, plan_of(case, world))
