"""What context parallelism sends, when, and how much each rank computes: no loss curve shows any of this."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import step06_context_parallel.train as step06
from common import collectives
from common.config import CP_MODES, CP_SPLITS, TrainConfig
from step06_context_parallel import attention_block, cost
from step06_context_parallel.context_parallel import attention
from tests.harness.observing import configure, mesh_of, sent_so_far
from tests.harness.ranks import run_ranks

# ---- what train() issues and computes --------------------------------------------------------------------------------

LAYERS, HEADS, WIDTH, TOKENS = 2, 8, 16, 256  # TOKENS: of a sequence
SHAPE = f"--layers {LAYERS} --hidden {HEADS * WIDTH} --heads {HEADS} --ffn 64 --vocab 256 --seq-len {TOKENS}"
SHAPE += " --steps 1 --global-batch 2 --data synthetic --device cpu --peak-tflops 1"
RECOMPUTE = "none", "full", "selective --attention naive"
CASES = []  # every mode under every split, in turn with everything else; the last ones have data parallelism, too
for index, (mode, split) in enumerate(itertools.product(CP_MODES, CP_SPLITS)):
    flags = f"--cp 4 --cp-mode {mode} --cp-split {split} --micro-batch {1 + index % 2}"
    flags += f" --kv-heads {(8, 4, 1)[(index + index // 3) % 3]} --recompute {RECOMPUTE[(index + 1) % 3]}"
    CASES.append(flags + " --dtype bfloat16" * (index % 4 == 0))
CASES = CASES[:4] + CASES[-1:]  # in the other modes, the split only says who has which tokens
CASES += ["--cp 2 --dp 2 --micro-batch 1 --kv-heads 4 --zero 1 --steps 2", "--cp 2 --dp 2 --micro-batch 1 --kv-heads 4"]


def exchanges(rank: int, ranks: int, split: str, elements: int, width: int, wide: int) -> tuple[list, list]:
    """The messages of a ring layer, forward and backward: (op, elements, bytes, index of the peer).

    Two tensors at a time: keys and values, `width` bytes an element, or the sums of their gradients, `wide` bytes.
    """

    def travel(source: int, hop: int) -> bool:
        """Whether K/V of `source` go on from the rank that has them in this hop. Not if all later ranks are earlier in
        the sequence."""
        return hop < ranks - 1 and (split != "contiguous" or source + hop < ranks - 1)

    def messages(op: str, peer: int, width: int) -> list[tuple]:
        return 2 * [(op, elements, elements * width * (op == "send"), peer % ranks)]

    forward, backward = [], []
    for hop in range(ranks):
        source, coming = (rank - hop) % ranks, (rank - hop - 1) % ranks
        arrives = travel(coming, hop)
        goes_on, is_here = travel(source, hop), hop == 0 or travel(source, hop - 1)
        keys = messages("send", rank + 1, width) * goes_on + messages("receive", rank - 1, width) * arrives
        home = hop > 0 and travel(rank, hop - 1) and not travel(rank, hop)  # this rank's own sums come back
        sums = messages("send", rank + 1 if goes_on else source, wide) * (is_here and (goes_on or source != rank))
        sums += messages("receive", rank - 1, wide) * arrives + messages("receive", rank + hop, wide) * home
        forward += keys
        backward += keys + sums
    return forward, backward


def layer_calls(config: TrainConfig, rank: int) -> tuple[list[tuple], list[tuple]]:
    """(op, elements, bytes, peer) of all that one micro-batch issues in a layer, in its forward and its backward."""
    cp, kv_heads, width = config.cp, config.model_config.kv_heads, config.torch_dtype.itemsize
    head = config.micro_batch * TOKENS // cp * WIDTH  # elements of a head: K/V travel as they are, not repeated
    if config.cp_mode == "ring":
        return exchanges(rank, cp, config.cp_split, kv_heads * head, width, 4)
    if config.cp_mode == "allgather":
        elements = kv_heads * head
        gather = 2 * [("all_gather", elements, (cp - 1) * elements * width, None)]
        return gather, gather + 2 * [("reduce_scatter", cp * elements, (cp - 1) * elements * 4, None)]

    def all_to_all(heads: int) -> list[tuple]:
        return [("all_to_all", heads * head, heads * head * width * (cp - 1) // cp, None)]

    queries, keys = all_to_all(HEADS), all_to_all(max(kv_heads, cp))  # a head for each rank
    return queries + 2 * keys + queries, queries + 2 * keys + queries


def pairs_of_rank(config: TrainConfig, rank: int) -> int:
    """(Query, key) pairs of a sequence that a rank computes, summed over heads."""
    cp, part = config.cp, TOKENS // config.cp
    everything = TOKENS * (TOKENS + 1) // 2
    if config.cp_mode == "ulysses" or config.cp_split == "zigzag":
        return HEADS * everything // cp
    if config.cp_split == "contiguous":
        return HEADS * (rank * part**2 + part * (part + 1) // 2)
    return HEADS * (cp * part * (part - 1) // 2 + (rank + 1) * part)  # the diagonal with itself and ranks before it


def expected(config: TrainConfig, cp_rank: int, held: int) -> dict:
    """What a rank that updates `held` elements does in the whole run."""
    forward, backward = layer_calls(config, cp_rank)
    again = 1 if config.recompute == "none" else 2  # the attention is computed again, and communicates again
    micro_batch = [("forward", "cp", *call) for call in LAYERS * forward]
    micro_batch += [("backward", "cp", *call) for call in LAYERS * ((again - 1) * forward + backward)]
    step, replicas, width = config.accumulation_steps * micro_batch, config.cp * config.dp, 4
    if config.zero:
        sent = (replicas - 1) * held * width
        step = [("forward", "shard", "all_gather", held, sent, None), *step]
        step += [("backward", "shard", "reduce_scatter", replicas * held, sent, None)]
    else:  # over all ranks that see other tokens, also where --dp is 1
        step += [("backward", "replica", "all_reduce", held, 2 * (held * width * (replicas - 1) // replicas), None)]
    for group in "world", "dp_cp":  # the norm; the loss
        step += [("optimizer", group, "all_reduce", 1, 2 * (8 * (replicas - 1) // replicas), None)]
    pairs = config.steps * LAYERS * config.accumulation_steps * config.micro_batch * pairs_of_rank(config, cp_rank)
    return {"log": config.steps * step, "forward": again * pairs, "backward": pairs}


@contextmanager
def counted_blocks() -> Iterator[Counter]:
    """Counts the blocks of attention that this rank computes ("blocks"), and the pairs in them, by direction."""
    counts = Counter()

    def counted(name: str, direction: str, first: int):
        def function(*args, real=getattr(attention_block, name)):  # noqa: B008
            q, k, causal = args[first], args[first + 1], args[-2]
            rows, columns = q.shape[2], k.shape[2]
            counts[direction] += q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * columns)
            counts["blocks"] += 1
            return real(*args)

        return mock.patch.object(attention_block, name, function)

    with counted("attend", "forward", 0), counted("attend_backward", "backward", 1):
        yield counts


def ranks_train(flags: list[str]) -> list[tuple]:
    """Of each case: what was expected of this rank, what it did, and what its sockets have sent."""
    found = []
    for case in flags:
        config = configure(6, f"{SHAPE} {case}")
        mesh = mesh_of(config)
        before = sent_so_far(mesh)
        with counted_blocks() as counts, collectives.record() as calls:
            held = sum(tensor.numel() for tensor in step06.train(config, mesh))
        sockets = None if before is None else sent_so_far(mesh) - before
        log = []
        for call in calls:
            peer = None if call.peer is None else mesh.cp.ranks.index(call.peer)
            log.append((call.phase, call.group, call.op, call.elements, call.bytes, peer))
        found.append((expected(config, mesh.cp.rank, held), counts | {"log": log}, sockets))
    return found


def check_train(ranks: list[list], flags: list[str]) -> None:
    for rank, cases_of_rank in enumerate(ranks):
        for case, (should, did, sockets) in zip(flags, cases_of_rank, strict=True):
            for name, value in should.items():
                assert did[name] == value, f"rank {rank}, {case}: {name}"
            sent = sum(call[4] for call in should["log"])
            assert sockets in (None, pytest.approx(sent, rel=0.02)), f"rank {rank}, {case}"


def test_train_issues_and_computes_what_its_layers_need():
    """Every call of every phase, in order, with its size and peer; the same on the sockets; pairs of attention."""
    check_train(run_ranks(4, ranks_train, CASES), CASES)


def test_predictions_are_what_was_counted():
    """Bytes, messages and pairs of the formulas are those of `layer_calls`, which train() was held to above."""
    for mode, split, cp in itertools.product(CP_MODES, CP_SPLITS, (2, 4)):
        for dtype, width in (("float32", 4), ("bfloat16", 2)):
            flags = f"--kv-heads 4 --micro-batch 2 --cp {cp} --cp-mode {mode} --cp-split {split} --dtype {dtype}"
            config = configure(6, f"{SHAPE} {flags}", cp)
            forward, backward = zip(*(layer_calls(config, rank) for rank in range(cp)), strict=True)
            found = {"forward": forward, "backward": backward}
            found = {phase: sum(call[2] for calls in ranks for call in calls) / cp for phase, ranks in found.items()}
            widths = HEADS * WIDTH, 4 * WIDTH, width, 4
            assert cost.layer_bytes(mode, split, cp, 2 * TOKENS, *widths) == found, flags
        if mode == "ring":
            sends = [sum(call[0] == "send" for calls in ranks for call in calls) for ranks in (forward, backward)]
            keys, again, sums = cost.ring_sends(split, cp).values()
            assert [keys, again + sums] == sends and keys == again, flags
            pairs = cost.all_pairs(split, TOKENS, cp)
            assert [HEADS * sum(hops) for hops in pairs] == [pairs_of_rank(config, rank) for rank in range(cp)], flags


# ---- what happens while it waits -------------------------------------------------------------------------------------


def ranks_order() -> dict[str, tuple[list[tuple], list[tuple]]]:
    """Of a layer in each mode: (op, blocks computed before its issue, blocks before its wait), forward and backward."""
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


def test_keys_and_values_travel_while_a_block_is_computed():
    """On two ranks; on four, the tests of the mutants ask for it before they break it."""
    check_order(run_ranks(2, ranks_order))
