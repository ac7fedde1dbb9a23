"""What a pipeline sends, keeps and reduces, and when: no loss curve shows any of this."""

import functools
import itertools

import pytest

from common.model_config import ModelConfig
from common.process_groups import Degrees, coordinates
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.messages import place_messages
from step05_pipeline.schedules.simulator import simulate
from step05_pipeline.schedules.standard import SCHEDULES
from step05_pipeline.stages import relative_costs, schedule_of, split_layers
from tests.harness.ranks import run_ranks
from tests.mechanisms.step05.observe import BASE, Observation, observe_all, prepare
from tests.parity.runs import reference, run_cases
from tests.parity.test_step05 import SGD, UNTIED, training_of

WORLD, LAYERS, HIDDEN, FFN, VOCAB, SEQ, MICRO_BATCHES = 4, 8, 32, 48, 256, 16, 8  # BASE, on 4 ranks
EVERY_SCHEDULE = [f"--pp 4 --schedule {name}" for name in SCHEDULES]
WIDE = "--hidden 256 --heads 4 --seq-len 128 --global-batch 4"  # messages of 128 KiB
WIRE = [f"--pp 4 --schedule {name} {WIDE}" for name in ("1f1b", "interleaved", "zbv", "dualpipe")]
WITH_TP = [f"--pp 2 --tp 2 {flags}" for flags in ("--schedule 1f1b", "--schedule zb-h1 --no-sequence-parallel")]
WITH_DP = [  # one micro-batch or four on each rank
    "--schedule 1f1b --zero 0",
    "--schedule 1f1b --zero 1 --bucket-mb 0.01",
    "--schedule 1f1b --zero 2",
    "--schedule 1f1b --zero 3",
    "--schedule interleaved --zero 0 --bucket-mb 0.01",
    "--schedule breadth-first --zero 1",
    "--schedule zb-h2 --zero 0",
    "--schedule zb-h1 --zero 2 --zero-reduce step",
    "--schedule zbv --zero 1",
    "--schedule zbv --zero 2",
    "--schedule zbv --zero 3 --zero-reduce step",
    "--schedule afab --zero 3 --tie-embeddings",
    "--schedule dualpipe --zero 1 --tie-embeddings",
    "--schedule dualpipe --zero 0 --micro-batch 2",
]
WITH_DP = [f"--pp 2 --dp 2 {flags}" for flags in WITH_DP]


@functools.cache
def plan(flags: str, rank: int) -> tuple:
    """(configuration, schedule, pipeline rank, coordinates) of a rank."""
    config = prepare(flags, WORLD)
    mine = coordinates(rank, Degrees.of(config))
    return config, schedule_of(config), mine["pp"], mine


@pytest.fixture(scope="module")
def observed() -> dict[str, list[Observation]]:
    """What all ranks did, by flags."""
    cases = EVERY_SCHEDULE + WIRE + WITH_TP + WITH_DP
    ranks = run_ranks(WORLD, observe_all, cases)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


# ---- what is done, and what is kept meanwhile ------------------------------------------------------------------------


def check_order(ranks: list[Observation], flags: str) -> None:
    for rank, seen in enumerate(ranks):
        _, schedule, pp, _ = plan(flags, rank)
        expected = [(action.kind, action.micro_batch, action.chunk) for action in schedule.actions[pp]]
        assert seen.actions == expected, f"{flags}, rank {rank}: order"


def check_memory(ranks: list[Observation], flags: str) -> None:
    for rank, seen in enumerate(ranks):
        _, schedule, pp, _ = plan(flags, rank)
        simulated, case = simulate(schedule), f"{flags}, rank {rank}"
        assert seen.in_flight == simulated.in_flight[pp], f"{case}: graphs alive"
        assert seen.claimed == simulated.in_flight[pp], f"{case}: what the pipeline says of itself"
        assert seen.stores == simulated.stores[pp], f"{case}: put off"
        assert seen.left == 0, f"{case}: sent outputs kept"
        last_sent = None
        for kind, micro_batch, chunk in seen.actions:
            copy, stage = schedule.stage_of(pp, chunk)
            if stage == schedule.stages - 1 or schedule.placement[copy][stage + 1] == pp:
                continue  # this output is not sent
            if kind == "F":
                last_sent = micro_batch, chunk
            elif (micro_batch, chunk) != last_sent:
                assert (micro_batch, chunk) not in seen.unfreed, f"{case}: {micro_batch}.{chunk} has been sent and kept"


@pytest.mark.parametrize("flags", EVERY_SCHEDULE + WITH_TP + WITH_DP)
def test_the_order_and_the_memory_are_the_schedules(observed, flags):
    check_order(observed[flags], flags)
    check_memory(observed[flags], flags)


# ---- messages --------------------------------------------------------------------------------------------------------


def hops(schedule: Schedule) -> int:
    """Messages of a micro-batch on its way through all stages."""
    stages = schedule.stages
    if schedule.placement[0][stages // 2 - 1] == schedule.placement[0][stages // 2]:
        return stages - 2  # V: the turning point is within a rank
    return stages - 1  # looped: v p - 1; also with two copies, of which it sees one


def check_messages(ranks: list[Observation], flags: str) -> None:
    config, schedule, _, _ = plan(flags, 0)
    elements = config.micro_batch * config.seq_len * config.model_config.hidden
    elements //= config.tp if config.sequence_parallel else 1
    pipelines = WORLD // config.pp
    for direction, kinds, way in (("pp_forward", "F", 1), ("pp_backward", "BI", -1)):
        sent = [(rank, call) for rank, seen in enumerate(ranks) for call in seen.of("send", direction)]
        received = [(rank, call) for rank, seen in enumerate(ranks) for call in seen.of("receive", direction)]
        number = schedule.micro_batches * hops(schedule) * pipelines
        assert len(sent) == len(received) == number, f"{flags}: {direction} has {len(sent)} messages, not {number}"
        for _, call in sent + received:
            assert call.elements == elements, flags
            assert call.bytes == (4 * elements if call.op == "send" else 0), flags
        for rank, call in sent:  # right after the action that made it, to the rank of the next stage
            kind, _, chunk = ranks[rank].actions[call.issue - 1]
            assert kind in kinds, f"{flags}: {direction} carries what {kind} made"
            assert call.peer == _neighbour(flags, rank, chunk, way), flags
        for rank, call in received:  # waited for by the action that needs it, from the rank of the stage before
            kind, _, chunk = ranks[rank].actions[call.wait]
            assert kind in kinds, f"{flags}: {kind} waits for {direction}"
            assert call.peer == _neighbour(flags, rank, chunk, -way), flags


def _neighbour(flags: str, rank: int, chunk: int, way: int) -> int:
    """Global rank that holds the next stage of the same model (way 1), or the one before (-1)."""
    config, schedule, pp, mine = plan(flags, rank)
    copy, stage = schedule.stage_of(pp, chunk)
    return (mine["dp"] * config.pp + schedule.placement[copy][stage + way]) * config.tp + mine["tp"]


@pytest.mark.parametrize("flags", EVERY_SCHEDULE + WIRE + WITH_TP + WITH_DP)
def test_messages(observed, flags):
    check_messages(observed[flags], flags)


def test_interleaving_multiplies_messages():
    """By v, but for the ends: (v p - 1) / (p - 1). A V saves one hop."""
    found = {}
    for name in ("1f1b", "interleaved", "zbv", "dualpipe"):
        found[name] = hops(plan(f"--pp 4 --schedule {name}", 0)[1])
    assert found == {"1f1b": 3, "interleaved": 7, "zbv": 6, "dualpipe": 3}


@pytest.mark.parametrize("flags", WIRE)
def test_bytes_on_the_wire(observed, flags):
    _, schedule, _, _ = plan(flags, 0)
    assert sum(seen.logged for seen in observed[flags]) == 2 * schedule.micro_batches * hops(schedule) * 128 * 256 * 4
    for seen in observed[flags]:
        if seen.on_wire is not None:
            assert seen.on_wire == pytest.approx(seen.logged, rel=0.02)


def check_program(ranks: list[Observation], flags: str) -> None:
    """Sends and receives are issued where `place_messages` has put them; nobody waits for a send before the next."""
    early = 0
    for rank, seen in enumerate(ranks):
        _, schedule, pp, _ = plan(flags, rank)
        expected, actions = {"pp_forward": [], "pp_backward": []}, 0
        for item in place_messages(schedule)[pp]:
            if isinstance(item, Action):
                actions += 1
            else:
                expected[f"pp_{item.message.direction}"].append((type(item).__name__.lower(), actions))
        for group, program in expected.items():
            calls = [call for call in seen.calls if call.group == group and call.op in ("send", "receive")]
            assert [(call.op, call.issue) for call in calls] == program, f"{flags}, rank {rank}: order of messages"
            early += sum(call.wait > call.issue for call in calls if call.op == "receive")
            waits = [call.wait > call.issue for call in calls if call.op == "send"]
            assert all(waits[:-1]), f"{flags}, rank {rank}: waits for its sends"
    if "--schedule naive" not in flags:  # there a receiver has nothing to do meanwhile
        assert early > 0, f"{flags}: no message travels while its receiver works"


@pytest.mark.parametrize("flags", EVERY_SCHEDULE + WITH_TP)
def test_messages_travel_while_ranks_work(observed, flags):
    check_program(observed[flags], flags)


# ---- gradients and weights -------------------------------------------------------------------------------------------


def sizes_of(flags: str, rank: int) -> list[int]:
    """Parameters of each of the rank's chunks, each unit of stage 3 (embedding, layer, end) padded to two shards."""
    config, schedule, pp, _ = plan(flags, rank)
    attention, kv = 2 * HIDDEN * HIDDEN, 2 * HIDDEN * HIDDEN // 2  # half as many K/V heads
    layer = attention + kv + 3 * HIDDEN * FFN + 2 * HIDDEN
    ranges, sizes = split_layers(config.model_config, schedule.stages, SEQ), []
    for chunk in range(schedule.chunks(pp)):
        _, stage = schedule.stage_of(pp, chunk)
        first, last = ranges[stage]
        ends = VOCAB * HIDDEN * ((first == 0) + (last == LAYERS)) + HIDDEN * (last == LAYERS)
        sizes.append((last - first) * layer + ends)  # all even: nothing to pad
    return sizes


def check_reductions(ranks: list[Observation], flags: str) -> None:
    """Each stage's, right after its last backward (or W), whatever the rank does next; or after each micro-batch."""
    for rank, seen in enumerate(ranks):
        config, _, _, _ = plan(flags, rank)
        each = config.zero >= 2 and config.zero_reduce == "micro-batch"
        expected = {}
        for chunk, size in enumerate(sizes_of(flags, rank)):
            complete = [i for i, (kind, _, c) in enumerate(seen.actions) if kind in "BW" and c == chunk]
            expected |= dict.fromkeys(complete if each else complete[-1:], size)
        found = {}
        for call in seen.of("all_reduce", "replica") + seen.of("reduce_scatter", "shard"):
            assert call.op == ("reduce_scatter" if config.zero else "all_reduce"), flags
            assert call.phase == "backward", f"{flags}, rank {rank}: reduced in the {call.phase}"
            found[call.issue - 1] = found.get(call.issue - 1, 0) + call.elements
        assert found == expected, f"{flags}, rank {rank}: elements reduced, by the action"


def check_gathers(ranks: list[Observation], flags: str) -> None:
    """All weights once a step, before it begins, whatever the number of micro-batches."""
    for rank, seen in enumerate(ranks):
        zero, calls = plan(flags, rank)[0].zero, seen.of("all_gather", "shard")
        gathered = 2 * sum(call.elements for call in calls)
        assert gathered == (sum(sizes_of(flags, rank)) if zero else 0), f"{flags}, rank {rank}: gathered {gathered}"
        assert all(call.issue == 0 for call in calls), f"{flags}, rank {rank}: gathered in the middle of a step"


@pytest.mark.parametrize("flags", WITH_DP)
def test_reductions_and_gathers(observed, flags):
    check_reductions(observed[flags], flags)
    check_gathers(observed[flags], flags)


def test_stage_3_gathers_each_unit_once(observed):
    """L + 2 units over the whole pipeline; one more where a tied matrix has to be cut alike on both ends."""
    for flags in WITH_DP:
        if "--zero 3" in flags:
            units = sum(len(observed[flags][rank].of("all_gather", "shard")) for rank in (0, 1))
            assert units == LAYERS + 2 + ("--tie" in flags), flags


def test_copies_are_summed_once_a_step(observed):
    """Of a tied matrix on both ends, and of everything else with two copies of the model; else nothing."""
    for flags in WITH_DP:
        two, tied = "dualpipe" in flags, "--tie" in flags
        for rank, seen in enumerate(observed[flags]):
            for group, wanted in (("embed", tied), ("mirror", two)):
                calls = seen.of("all_reduce", group)
                assert [call.phase for call in calls] == ["optimizer"] * wanted, (flags, group)
            if tied:  # with ZeRO this rank's shard of it
                assert seen.of("all_reduce", "embed")[0].elements == VOCAB * HIDDEN // 2, (flags, rank)


@pytest.mark.parametrize("dp", [1, 2])
def test_the_gradient_norm_is_step_1s(dp):
    """With any number of micro-batches: not that many times it."""
    layout = f"{UNTIED} {SGD} --steps 2 --pp 2 --dp {dp}"
    cases = [f"{layout} --micro-batch {4 // dp} --global-batch {4 * micro_batches}" for micro_batches in (1, 4)]
    for case, result in zip(cases, run_cases(2 * dp, 5, cases), strict=True):
        assert result.norms == pytest.approx(reference(training_of(case).replace(f"--dp {dp}", "")).norms, rel=1e-12)


# ---- which layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [16, 256, 4096])  # the head is a fiftieth of a layer, a layer, ten layers
def test_split_layers_is_the_best(vocab):
    """No other division has a faster slowest stage; by trying all."""
    for layers, stages in [(n, s) for n in range(1, 9) for s in range(1, n + 1)]:
        config = ModelConfig(vocab, 32, layers, 4, 2, 48, tie_embeddings=False)
        layer = 2 * SEQ * (3 * 32 * 32 + 3 * 32 * 48) + 4 * SEQ * SEQ * 32
        head = 2 * SEQ * vocab * 32
        ranges = split_layers(config, stages, SEQ)
        assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])] and ranges[-1][1] == layers

        def slowest(cuts: tuple[int, ...], layers=layers, layer=layer, head=head) -> int:
            bounds = (0, *cuts, layers)
            *others, last = [stop - start for start, stop in itertools.pairwise(bounds)]
            return max(*(count * layer for count in others), last * layer + head, 0)

        best = min(map(slowest, itertools.combinations(range(1, layers), stages - 1)))
        assert slowest(tuple(last for _, last in ranges[:-1])) == best, (layers, stages)
        costs = relative_costs(config, stages, SEQ)
        assert sum(costs) == pytest.approx(stages)
        assert max(costs) == pytest.approx(best * stages / (layers * layer + head))


def test_the_first_stage_is_the_last_to_get_one_more():
    config = ModelConfig(16, 32, 6, 4, 2, 48, tie_embeddings=False)
    assert [last - first for first, last in split_layers(config, 4, SEQ)] == [1, 2, 2, 1]


assert f"--hidden {HIDDEN}" in BASE and f"--ffn {FFN}" in BASE and f"--seq-len {SEQ}" in BASE
