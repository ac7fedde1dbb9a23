"""What context parallelism sends, when, how much each rank computes, and what it keeps: no loss curve shows it."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from common import collectives
from common.config import CP_MODES, CP_SPLITS
from common.measure.saved_tensors import SavedTensors
from common.model import Decoder, rope_tables
from common.process_groups import Degrees, Mesh, build_mesh
from common.weights.initialisation import materialise, random_values
from step06_context_parallel import cost, sequence_layouts
from step06_context_parallel.attention_block import FusedKernels, NaiveKernels
from step06_context_parallel.context_parallel import apply_context_parallel, attention
from step06_context_parallel.experiments.memory import peaks
from step06_context_parallel.experiments.tools import SHAPE as LAYER
from tests.harness import accounting
from tests.harness.observing import configure, mesh_of, watching
from tests.harness.ranks import run_ranks

LAYERS, HEADS, WIDTH, TOKENS = 2, 8, 16, 256  # TOKENS: of a sequence
SHAPE = f"--layers {LAYERS} --hidden {HEADS * WIDTH} --heads {HEADS} --ffn 64 --vocab 256 --seq-len {TOKENS}"
SHAPE += " --steps 1 --global-batch 2 --data synthetic --device cpu --peak-tflops 1"
RECOMPUTE = "none", "full", "selective --attention naive"
CASES = []  # every mode under every split, in turn with everything else; the last ones have data parallelism, too
for index, (mode, split) in enumerate(itertools.product(CP_MODES, CP_SPLITS)):
    flags = f"--cp 4 --cp-mode {mode} --cp-split {split} --micro-batch {1 + index % 2}"
    flags += f" --kv-heads {(8, 4, 1)[(index + index // 3) % 3]} --recompute {RECOMPUTE[(index + 1) % 3]}"
    CASES.append(flags + " --dtype bfloat16" * (index % 5 in (0, 3)))
CASES = CASES[:4] + CASES[-1:]  # in the other modes, the split only says who has which tokens
CASES += ["--cp 2 --dp 2 --micro-batch 1 --kv-heads 4 --zero 1 --steps 2", "--cp 2 --dp 2 --micro-batch 1 --kv-heads 4"]


def messages_of_a_layer(mode: str, split: str, cp: int) -> dict[str, Counter]:
    """How many tensors all `cp` ranks together send, by phase and operation."""
    forward, again, sums = cost.ring_sends(split, cp).values()
    gather, scatter, exchange = {"all_gather": 2 * cp}, {"reduce_scatter": 2 * cp}, {"all_to_all": 4 * cp}
    return {
        "ring": {"forward": Counter(send=forward), "backward": Counter(send=again + sums)},
        "allgather": {"forward": Counter(gather), "backward": Counter(gather | scatter)},
        "ulysses": {"forward": Counter(exchange), "backward": Counter(exchange)},
    }[mode]


@contextmanager
def counted_blocks() -> Iterator[Counter]:
    """Counts the blocks of attention that this rank computes ("blocks"), the pairs in them, by direction, and the plans
    that it makes.
    """
    counts = Counter()

    def counted(kind: type, name: str, direction: str, first: int):
        def function(*args, real=getattr(kind, name)):  # noqa: B008
            q, k, causal = args[first], args[first + 1], args[-1]
            rows, columns = q.shape[2], k.shape[2]
            counts[direction] += q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * columns)
            counts["blocks"] += 1
            return real(*args)

        return mock.patch.object(kind, name, function)

    with ExitStack() as stack:
        for kind in (NaiveKernels, FusedKernels):
            stack.enter_context(counted(kind, "attend", "forward", 1))
            stack.enter_context(counted(kind, "attend_backward", "backward", 2))
        stack.enter_context(watching(sequence_layouts, "AttentionPlan", lambda *_: counts.update(["plans"])))
        yield counts


def ranks_train(flags: list[str]) -> list[dict]:
    """Of each case: what this rank did, and what its sockets have sent."""
    found = []
    for case in flags:
        with counted_blocks() as counts:
            log = accounting.log(6, f"{SHAPE} {case}")
        found.append({**counts, "cp": log.mesh.cp.rank, "log": log.rows, "sent": log.sent, "sockets": log.sockets})
    return found


def check_train(ranks: list[list[dict]], flags: list[str]) -> None:
    """Messages, bytes and pairs are those of the formulas."""
    for case, seen in zip(flags, zip(*ranks, strict=True), strict=True):
        config = configure(6, f"{SHAPE} {case}", len(ranks))
        mode, split, cp, model = config.cp_mode, config.cp_split, config.cp, config.model_config
        times, tokens = config.steps * config.accumulation_steps * LAYERS, config.micro_batch * TOKENS
        kv_heads = max(model.kv_heads, cp) if mode == "ulysses" else model.kv_heads  # a head for each rank
        widths = HEADS * WIDTH, kv_heads * WIDTH, config.torch_dtype.itemsize, 4
        size, number = cost.layer_bytes(mode, split, cp, tokens, *widths), messages_of_a_layer(mode, split, cp)
        if config.recompute != "none":  # the attention is computed again, and communicates again
            size["backward"] += size["forward"]
            number["backward"] += number["forward"]
        for phase in size:
            calls = [call for rank in seen for call in rank["log"] if call[:2] == (phase, "cp")]
            assert sum(call[4] for call in calls) == times * len(ranks) * size[phase], f"{case}: bytes, {phase}"
            found = Counter(call[2] for call in calls)
            assert found.pop("receive", 0) == found["send"], f"{case}: receives, {phase}"
            all_layers = {op: times * config.dp * each for op, each in number[phase].items()}
            assert +found == all_layers, f"{case}: number of messages, {phase}"
        for rank, did in enumerate(seen):
            every, rows = TOKENS * (TOKENS + 1) // 2, cost.all_pairs(split, TOKENS, cp)
            pairs = times * config.micro_batch * HEADS * (every // cp if mode == "ulysses" else sum(rows[did["cp"]]))
            assert did["backward"] == pairs, f"rank {rank}, {case}: pairs"
            assert did["forward"] == (1 if config.recompute == "none" else 2) * pairs, f"rank {rank}, {case}: pairs"
            assert did.get("plans", 0) <= 1, f"rank {rank}, {case}: each layer makes a plan anew"
            assert did["sockets"] in (None, pytest.approx(did["sent"], rel=0.02)), f"rank {rank}, {case}: sockets"


def test_train_issues_and_computes_what_its_layers_need():
    check_train(run_ranks(4, ranks_train, CASES), CASES)


def ranks_order() -> dict[str, tuple[list[tuple], list[tuple]]]:
    """Of a layer in each mode: (op, blocks computed before its issue, blocks before its wait), forward and backward.

    The tests of the mutants look at it on four ranks, before they break it.
    """
    world, result = torch.distributed.get_world_size(), {}
    for mode in CP_MODES:
        config = configure(6, f"--seq-len {8 * world} --cp {world} --cp-mode {mode}")
        mesh = mesh_of(config)
        q, k, v = (torch.randn(1, 4, 8, 8, requires_grad=True) for _ in range(3))
        with counted_blocks() as counts, collectives.record(lambda counts=counts: counts["blocks"]) as calls:
            out = attention(q, k, v, config=config, cp=mesh.cp)
            issued, counts["blocks"] = len(calls), 0
            out.sum().backward()
        marks = [(call.op, call.issue, call.wait_start) for call in calls]
        result[mode] = marks[:issued], marks[issued:]
    return result


def check_order(ranks: list[dict]) -> None:
    """In every hop of the ring a rank sends and receives, then computes, then waits. The sums of a hop have the next
    one to travel, and reach their owner when all is done. An all-gather has only the first block to hide behind.
    """
    cp = len(ranks)

    def messages(issue: int, wait: int) -> list[tuple]:
        return [(op, issue, wait) for op in ("send", "send", "receive", "receive")]

    forward, backward = [], []
    for hop in range(cp):
        keys = messages(hop, hop + 1) if hop < cp - 1 else []
        forward += keys
        backward += keys + messages(hop + 1, min(hop + 2, cp))
    gather, scatter = 2 * [("all_gather", 0, 1)], 2 * [("reduce_scatter", cp, cp)]
    around = 3 * [("all_to_all", 0, 0)], [("all_to_all", 1, 1)]  # q, k and v; the output
    for rank in ranks:
        assert rank["ring"] == (forward, backward)
        assert rank["allgather"] == (gather, gather + scatter)
        assert rank["ulysses"] == (around[0] + around[1], [("all_to_all", 0, 0), *3 * around[1]])


# ---- what a rank keeps for the backward, and what it holds of other ranks --------------------------------------------

BATCH, SEQ = 3, 48
ONE_LAYER = f"--hidden 64 --layers 1 --heads 8 --kv-heads 4 --ffn 48 --vocab 256 --seq-len {SEQ} --device cpu"
TYPES = torch.float32, torch.bfloat16


def ranks_measure() -> tuple[dict, dict]:
    return ranks_saved(), ranks_peak()


@pytest.fixture(scope="module", params=[2, 4])
def measured(request) -> list[tuple[dict, dict]]:
    return run_ranks(request.param, ranks_measure)


def ranks_saved() -> dict[tuple, int]:
    """Bytes that a layer keeps, in every mode, split and type."""
    world, result = torch.distributed.get_world_size(), {}
    for mode, split, dtype in itertools.product(CP_MODES, CP_SPLITS, TYPES):
        config = configure(6, f"{ONE_LAYER} --cp {world} --cp-mode {mode} --cp-split {split}")
        mesh, model = mesh_of(config), Decoder(config.model_config)
        apply_context_parallel(model, config, mesh)
        materialise(model, dtype, mesh.device, random_values(0))
        x = torch.randn(BATCH, SEQ // world, 64).to(dtype).requires_grad_()
        rope = rope_tables(config.model_config, torch.arange(SEQ // world), dtype)
        with SavedTensors(model) as layer:
            y = model.layers["0"](x, rope)
        assert y.requires_grad, "the graph is alive"
        result[mode, split, dtype] = layer.bytes - sum(table.untyped_storage().nbytes() for table in rope)
    return result


def test_activations_are_divided(measured):
    """Of a part of the tokens all that step 1 keeps, to the byte: keys and values of others are fetched again."""
    world, model = len(measured), configure(6, ONE_LAYER, 1).model_config
    for found, _ in measured:
        for (mode, split, dtype), kept in found.items():
            whole = SEQ if mode == "ulysses" else 0
            predicted = cost.kept(model, BATCH, SEQ // world, dtype, whole)
            assert kept == predicted + 8 * whole, (mode, split, dtype)


MODES = "ring", "allgather"


def ranks_peak() -> dict[str, dict[str, int]]:
    world = torch.distributed.get_world_size()
    return {mode: peaks_of(mode, build_mesh(Degrees(cp=world), torch.device("cpu"))) for mode in MODES}


def peaks_of(mode: str, mesh: Mesh) -> dict[str, int]:
    """Bytes that the forward and the backward of a layer allocate at most, with 64 tokens on each rank."""
    world = mesh.world.size
    flags = {"micro_batch": 1, "global_batch": 1, "seq_len": 64 * world, "cp": world, "cp_mode": mode}
    return peaks(mesh, LAYER | flags)


def check_peak(ranks: list[dict]) -> None:
    """What the fullest rank allocates beyond one rank alone with as many tokens."""
    world, part, queries = len(ranks), 64 * 4 * 32, 64 * 8 * 32  # tokens, heads, width
    alone = peaks_of("ring", build_mesh(Degrees(), torch.device("cpu")))
    for mode in MODES:
        for phase, predicted in cost.buffers(mode, world, part, 4, 4).items():
            if (mode, phase) == ("allgather", "backward"):
                scattering = cost.while_scattering(world, part, queries, 4, 4)
                predicted = max(predicted, scattering - alone[phase])
            found = max(rank[mode][phase] for rank in ranks) - alone[phase]
            assert found == pytest.approx(predicted, rel=0.01), (mode, phase)


def test_the_ring_holds_two_parts_at_a_time(measured):
    check_peak([peak for _, peak in measured])
