"""What a pipeline sends, keeps and reduces, and when: no loss curve shows any of this."""

import functools
import itertools
import weakref
from collections import Counter

import pytest
import torch

from common.experiments.traces import quietest
from common.launching.run_mesh import degrees_of
from common.model_config import ModelConfig
from common.process_groups import coordinates
from common.tracing.chrome_trace import read_trace
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.recompute import apply_recompute
from step05_pipeline import cost
from step05_pipeline import pipeline as executor
from step05_pipeline.apply_pipeline import build_stages
from step05_pipeline.config import schedule_of
from step05_pipeline.experiments.messages import PLACEMENTS
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.catalogue import SCHEDULES
from step05_pipeline.schedules.messages import place_messages
from step05_pipeline.schedules.simulator import Costs, simulate
from step05_pipeline.stages import split_layers
from step05_pipeline.weight_gradients import defer_weight_gradients
from tests.harness.communicators import replay
from tests.harness.observing import mesh_of, observe_each
from tests.harness.ranks import run_ranks
from tests.mechanisms.step05.observe import Observation, observe, prepare
from tests.parity.runs import SMALL, train_here

WORLD, LAYERS, TABLE = 4, 4, 256 * 32  # layers where two ranks divide them; elements of the embedding
PP_4 = "--pp 4 --steps 1 --hidden 256 --seq-len 32 --schedule"  # messages of 32 KiB
EVERY_SCHEDULE = [f"{PP_4} {name}" for name in SCHEDULES]
WITH_TP = [f"--pp 2 --tp 2 --layers {LAYERS} --schedule {name}" for name in ("1f1b", "zb-h1 --no-sequence-parallel")]
WITH_DP = [  # one micro-batch or four on each rank
    *("1f1b --zero 0", "1f1b --zero 1 --bucket-mb 0.01", "1f1b --zero 2", "1f1b --zero 3"),
    *("interleaved --zero 0 --bucket-mb 0.01", "breadth-first --zero 1", "zb-h2 --zero 0"),
    *("zb-h1 --zero 2 --zero-reduce step", "zbv --zero 1", "zbv --zero 2", "zbv --zero 3 --zero-reduce step"),
    *("afab --zero 3 --tie-embeddings", "dualpipe --zero 1 --tie-embeddings", "dualpipe --zero 0 --micro-batch 2"),
]
WITH_DP = [f"--pp 2 --dp 2 --layers {LAYERS} --schedule {flags}" for flags in WITH_DP]


@functools.cache
def plan(flags: str, rank: int) -> tuple:
    """(configuration, schedule, pipeline rank) of a rank."""
    config = prepare(flags, WORLD)
    return config, schedule_of(config), coordinates(rank, degrees_of(config))["pp"]


@pytest.fixture(scope="module")
def observed() -> dict[str, list[Observation]]:
    """What all ranks did, by flags."""
    cases = EVERY_SCHEDULE + WITH_TP + WITH_DP
    ranks = run_ranks(WORLD, observe_each, observe, cases, timeout=300)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


def check_order(ranks: list[Observation], flags: str) -> None:
    """The trace has a phase for each action; only the first stage and the last read tokens and targets."""
    for rank, seen in enumerate(ranks):
        _, schedule, pp = plan(flags, rank)
        stages = [schedule.stage_of(pp, chunk)[1] for chunk in range(schedule.chunks(pp))]
        reads = [each for each in seen.actions if each[0] == "F" and stages[each[2]] in (0, schedule.stages - 1)]
        assert seen.reads == reads, f"{flags}, rank {rank}: micro-batches read"
        phases = [("forward" if each.kind == "F" else "backward", str(each)) for each in schedule.actions[pp]]
        assert seen.phases == [("forward", ""), *phases, ("optimizer", "")], f"{flags}, rank {rank}: trace"


def check_memory(ranks: list[Observation], flags: str) -> None:
    for rank, seen in enumerate(ranks):
        _, schedule, pp = plan(flags, rank)
        simulated, case = simulate(schedule), f"{flags}, rank {rank}"
        assert seen.in_flight == simulated.in_flight[pp], f"{case}: graphs alive"
        assert seen.claimed == simulated.in_flight[pp], f"{case}: what the pipeline says of itself"
        assert seen.stores == simulated.stores[pp], f"{case}: operands of weight gradients kept"
        assert seen.outputs == 0, f"{case}: sent outputs kept when the next one is sent"
        assert seen.left == 0, f"{case}: sent outputs kept, or operands of weight gradients"


def test_the_trace_tells_the_bubble_from_communication(tmp_path):
    """Ranks wait as long as the simulator says, and tiny messages take little time, sent or received."""
    flags = "--pp 2 --layers 4 --layer-delay 60 --global-batch 4 --steps 3"
    run_ranks(2, train_here, 5, f"{SMALL} {flags} --trace 1:2 --run-dir {tmp_path}")
    delays = {kind: 2 * 0.06 * each for kind, each in executor.DELAYS.items()}
    assert delays["I"] + delays["W"] == delays["B"] == 2 * delays["F"]
    bubble = simulate(schedule_of(prepare(flags, 2)), Costs(**delays)).bubble
    row = quietest(read_trace(tmp_path))
    assert bubble == pytest.approx(0.36) and row.waiting_s == pytest.approx(bubble, rel=0.2)
    assert row.exposed_s <= row.communication_s < 0.25 * bubble, row


# ---- messages --------------------------------------------------------------------------------------------------------


def check_messages(ranks: list[Observation], flags: str) -> None:
    config, schedule, _ = plan(flags, 0)
    placed = schedule.chunks(0), PLACEMENTS.get(schedule.name, "looped")
    both_ways = cost.number_of_messages(config.pp, schedule.micro_batches, *placed) * WORLD // config.pp
    parts = config.tp if config.sequence_parallel else 1
    size = cost.message_bytes(config.micro_batch, config.seq_len, config.model_config.hidden, 4, parts)
    for seen in ranks if size > 2**14 else ():  # or headers would count
        logged = sum(call.bytes for call in seen.calls)
        assert seen.on_wire in (None, pytest.approx(logged, rel=0.02)), f"{flags}: on the wire"
    for direction, kinds in (("pp_forward", "F"), ("pp_backward", "BI")):
        sent = [call for seen in ranks for call in seen.of("send", direction)]
        received = [(rank, call) for rank, seen in enumerate(ranks) for call in seen.of("receive", direction)]
        assert 2 * len(sent) == 2 * len(received) == both_ways, f"{flags}: {direction} has {len(sent)} messages"
        for call in sent:
            assert 4 * call.elements == call.bytes == size, flags
        for rank, call in received:  # waited for right before the action that needs it
            assert not call.wait_start.inside, f"{flags}, rank {rank}: the trace counts the wait as part of the action"
            kind, _, _ = ranks[rank].actions[call.wait_start.actions]
            assert kind in kinds, f"{flags}: {kind} waits for {direction}"


def check_program(ranks: list[Observation], flags: str) -> None:
    """Sends and receives are issued where they were placed; nobody waits for a send before the next."""
    early = 0
    for rank, seen in enumerate(ranks):
        _, schedule, pp = plan(flags, rank)
        expected, actions = {"pp_forward": [], "pp_backward": []}, 0
        for item in place_messages(schedule)[pp]:
            if isinstance(item, Action):
                actions += 1
            else:
                expected[f"pp_{item.output.direction}"].append((item.kind, actions))
        for group, program in expected.items():
            calls = [call for call in seen.calls if call.group == group and call.peer is not None]
            found = [(call.op, call.issue.actions) for call in calls]
            assert found == program, f"{flags}, rank {rank}: order of messages"
            later = {"send": [], "receive": []}
            for call in calls:
                later[call.op].append(call.wait_start.actions > call.issue.actions)
            early += sum(later["receive"])
            assert all(later["send"][:-1]), f"{flags}: waits for its sends"
    if schedule.name != "naive" and schedule.micro_batches > 2:  # or a receiver has nothing to do meanwhile
        assert early > 0, f"{flags}: no message travels while its receiver works"


@pytest.mark.parametrize("flags", EVERY_SCHEDULE + WITH_TP + WITH_DP)
def test_a_step_is_the_schedules(observed, flags):
    for check in (check_order, check_memory, check_messages, check_program):
        check(observed[flags], flags)


# Costs under which no rank ever waits for a message to travel, but would if one direction had to wait for the other
HIDDEN_MESSAGES = {
    "zb-h1": Costs(F=1, I=1, W=0.5, communication=0.5),
    "zb-h2": Costs(F=1, I=0.75, W=1, communication=0.5),
    "dualpipev": Costs(F=1, I=0.75, W=1, communication=0.5),
    "interleaved": Costs(F=1, I=0.75, W=0.5, communication=0.25),
}


def check_communicators(ranks: list[Observation], flags: str) -> None:
    """On the communicators that torch really made for the groups."""
    schedule, programs = plan(flags, 0)[1], []
    costs = HIDDEN_MESSAGES[schedule.name]
    for seen in ranks:
        events = [((index, 0), ("work", costs.of(kind))) for index, (kind, _, _) in enumerate(seen.actions, 1)]
        for call in seen.calls:
            if call.peer is not None:
                events += [(call.issue[:2], ("issue", call)), (call.wait_start[:2], ("wait", call))]
        programs.append([event for _, event in sorted(events, key=lambda each: each[0])])
    found = replay(programs, [seen.communicators for seen in ranks], costs.communication)
    expected = simulate(schedule, costs).makespan
    assert found == pytest.approx(expected), f"{flags}: one direction waits for the other: {found}, not {expected}"


@pytest.mark.parametrize("name", HIDDEN_MESSAGES)
def test_neither_direction_waits_for_the_other(observed, name):
    check_communicators(observed[f"{PP_4} {name}"], f"{PP_4} {name}")


# ---- gradients and weights -------------------------------------------------------------------------------------------


def sizes_of(flags: str, rank: int) -> list[int]:
    """Parameters of each of the rank's chunks; all are even, so there is nothing to pad on two shards."""
    config, schedule, pp = plan(flags, rank)
    ranges = split_layers(config.model_config, schedule.stages, config.seq_len)
    numbers = [schedule.stage_of(pp, chunk)[1] for chunk in range(schedule.chunks(pp))]
    return [cost.stage_parameters(config.model_config, *ranges[number]) for number in numbers]


def check_reductions(ranks: list[Observation], flags: str) -> None:
    """Each stage's, right after its last backward (or W); or after each micro-batch."""
    for rank, seen in enumerate(ranks):
        config, _, _ = plan(flags, rank)
        each = config.zero >= 2 and config.zero_reduce == "micro-batch"
        expected, found = {}, Counter()
        for chunk, size in enumerate(sizes_of(flags, rank)):
            complete = [i for i, (kind, _, c) in enumerate(seen.actions) if kind in "BW" and c == chunk]
            expected |= dict.fromkeys(complete if each else complete[-1:], size)
        for call in seen.of("all_reduce", "replica") + seen.of("reduce_scatter", "shard"):
            assert call.op == ("reduce_scatter" if config.zero else "all_reduce"), flags
            assert call.phase == "backward", f"{flags}, rank {rank}: reduced in the {call.phase}"
            found[call.issue.actions - 1] += call.elements
        assert found == expected, f"{flags}, rank {rank}: elements reduced, by the action"


def check_gathers(ranks: list[Observation], flags: str) -> None:
    """All weights once a step, before it begins; stage 3 frees them after it."""
    for rank, seen in enumerate(ranks):
        zero, calls, size = plan(flags, rank)[0].zero, seen.of("all_gather", "shard"), sum(sizes_of(flags, rank))
        gathered = 2 * sum(call.elements for call in calls)
        assert gathered == (size if zero else 0), f"{flags}, rank {rank}: gathered {gathered}"
        assert all(call.issue.actions == 0 for call in calls), f"{flags}, rank {rank}: gathered in the middle of a step"
        after = 0 if zero == 3 else 4 * size
        assert seen.weights == (4 * size, after), f"{flags}, rank {rank}: bytes of weights at the end, and after it"


@pytest.mark.parametrize("flags", WITH_DP)
def test_reductions_and_gathers(observed, flags):
    check_reductions(observed[flags], flags)
    check_gathers(observed[flags], flags)
    if "--zero 3" in flags:  # each unit once; one more where a tied matrix has to be cut alike on both ends
        units = sum(len(observed[flags][rank].of("all_gather", "shard")) for rank in (0, 1))
        assert units == LAYERS + 2 + ("--tie" in flags), flags


@pytest.mark.parametrize("flags", WITH_TP + WITH_DP)
def test_collectives_of_the_update(observed, flags):
    """Sums of a tied matrix, or of two copies of the model; the norm; the loss."""
    two, tied = "dualpipe" in flags, "--tie" in flags
    for rank, seen in enumerate(observed[flags]):
        config = plan(flags, rank)[0]
        calls = [call for call in seen.calls if call.phase == "optimizer" and call.group != "tp"]
        assert {call.op for call in calls} == {"all_reduce"}, flags
        sums = ["embed"] * tied + ["mirror"] * two
        assert sorted(call.group for call in calls[: len(sums)]) == sums, f"{flags}, rank {rank}: copies summed"
        rest = [(call.group, call.elements) for call in calls[len(sums) :]]
        assert rest == [("world", 1), *[("dp_cp", 1)] * (config.dp > 1), ("pp_forward", 1)], flags
        if tied:  # with ZeRO this rank's shard of it
            assert seen.of("all_reduce", "embed")[0].elements == TABLE // 2, (flags, rank)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_stage_defers_every_product(mode):
    """Also of layers that are recomputed, and while hooks hand back other tensors than were saved: a weight that is
    only looked for among these has lost its attribute, and its gradient is right, but not deferred.
    """
    config = prepare("--layers 2 --schedule zb-h1", 1)
    mesh = mesh_of(config)
    (stage,) = build_stages(config, schedule_of(config), mesh)
    apply_recompute(stage, mode)
    materialise(stage, torch.float64, mesh.device, random_values(0))
    tokens, parameters = torch.arange(config.seq_len).view(1, -1), list(stage.parameters())
    stage(tokens, tokens[0]).sum().backward()
    expected = [parameter.grad for parameter in parameters]
    stage.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        loss = stage(tokens, tokens[0]).sum()
        with defer_weight_gradients(parameters) as store:
            loss.backward()
    products = [p for name, p in stage.named_parameters() if p.dim() == 2 and "embedding" not in name]
    assert sorted(id(weight) for weight, *_ in store) == sorted(map(id, products))
    assert all(weight.grad is None for weight in products), "nothing is computed yet"
    kept, found = [weakref.ref(gradient) for _, gradient, *_ in store], {each: each.grad for each in parameters}
    with torch.no_grad():
        for index, (weight, gradient) in enumerate(store.compute()):
            found[weight] = gradient
            assert not any(reference() is not None for reference in kept[:index]), "operands are released one by one"
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-12)
    assert not hasattr(products[0], "gradient_sink"), "after the context nothing is deferred"


@pytest.mark.parametrize("vocab", [16, 256, 4096])  # the head is a fiftieth of a layer, a layer, ten layers
def test_split_layers_is_the_best(vocab):
    """No other division has a faster slowest stage; by trying all."""
    layer, head = 2 * 16 * (3 * 32 * 32 + 3 * 32 * 48) + 4 * 16 * 16 * 32, 2 * 16 * 32 * vocab

    def slowest(cuts: tuple[int, ...]) -> int:
        *counts, last = (b - a for a, b in itertools.pairwise(cuts))
        return max(*(count * layer for count in counts), last * layer + head, 0)

    for layers, stages in ((n, s) for n in range(1, 9) for s in range(1, n + 1)):
        ranges = split_layers(ModelConfig(vocab, 32, layers, 4, 2, 48, tie_embeddings=False), stages, 16)
        found = (0, *(last for _, last in ranges))
        assert ranges == list(itertools.pairwise(found)) and found[-1] == layers
        every = itertools.combinations(range(1, layers), stages - 1)
        assert slowest(found) == min(slowest((0, *cuts, layers)) for cuts in every), (layers, stages)
