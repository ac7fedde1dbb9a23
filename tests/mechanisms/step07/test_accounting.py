"""What expert parallelism sends, when, and what each rank holds: no loss curve shows any of this."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from common import collectives
from common.config import TrainConfig
from step07_expert_parallel.expert_parallel import TokenDispatcher
from tests.harness import accounting
from tests.harness.observing import configure, watching
from tests.harness.ranks import run_ranks
from tests.mechanisms.step07.test_moe import layer_of

WORLD, LAYERS, HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 4, 3, 128, 32, 8, 2, 64  # TOKENS: of a sequence
WEIGHTS = 3 * EXPERTS * HIDDEN * FFN  # of the experts of a layer
SHAPE = f"--layers {LAYERS} --dense-layers 1 --hidden {HIDDEN} --heads 4 --kv-heads 4 --ffn 64 --vocab 256"
SHAPE += f" --seq-len {TOKENS} --experts {EXPERTS} --top-k {TOP_K} --expert-ffn {FFN} --shared-experts 1"
SHAPE += " --steps 1 --global-batch 8 --data synthetic --device cpu --peak-tflops 1"
CASES = [
    "--dp 4 --ep 4 --micro-batch 1 --dtype bfloat16",
    "--dp 4 --ep 2 --micro-batch 2 --zero 1",
    "--dp 4 --ep 2 --micro-batch 1 --zero 2 --recompute full --balance bias --bias-rate 0.1 --steps 2",
    "--dp 4 --ep 2 --micro-batch 1 --zero 1 --zero-replicas 2 --balance none",
    "--dp 4 --ep 1 --micro-batch 2 --zero 3",
    "--dp 2 --tp 2 --ep 4 --micro-batch 4 --recompute selective --balance bias --bias-rate 0.1",
    "--cp 2 --tp 2 --ep 2 --micro-batch 4 --zero 3 --capacity-factor 0.9",
]


def ranks_train(cases: list[str], folder: str) -> list[dict]:
    """What this rank does, sends and holds in each case."""
    found = []
    for index, case in enumerate(cases):
        counts = []
        with watching(TokenDispatcher, "__init__", lambda self, mine, *_, counts=counts: counts.append(mine.on_host)):
            log = accounting.log(7, f"{SHAPE} {case} --run-dir {folder}/{index}")
        mesh, tensors = log.mesh, log.updated[: 1 - LAYERS]  # without the biases
        calls = [(call.phase, call.group, call.op, call.dtype, call.elements, call.bytes) for call in log.calls]
        of_experts = [tensor for tensor in tensors if ".experts." in tensor.spec.name]
        held, experts = (sum(each.numel() for each in several) for several in (tensors, of_experts))
        result = {"experts": experts, "dense": held - experts, "log": calls, "sent": log.sent}
        result["owned"] = sum(each.numel() for each in of_experts if each.spec.owner)
        found.append(result | {"counts": counts, "ep": mesh.ep.ranks, "edp": mesh.edp.size, "sockets": log.sockets})
    return found


def travels(config: TrainConfig, rank: int, ranks: list[dict]) -> list[tuple]:
    """What this rank sends over `ep` in the whole run, (phase, group, op, type, elements, bytes): of every layer with
    experts the numbers, the tokens and their outputs and, in the backward, the gradients of both.
    """
    mine, size, width = ranks[rank], config.ep, config.torch_dtype.itemsize
    here, dtype = mine["ep"].index(rank), str(config.torch_dtype).removeprefix("torch.")
    rows = torch.tensor([ranks[each]["counts"] for each in mine["ep"]])  # [source, index of the forward, expert]
    rows = rows.unflatten(-1, (size, -1)).sum(-1)  # [source, index of the forward, target]

    def both_ways(phase: str, index: int) -> list[tuple]:
        found = []
        for numbers in (rows[here, index], rows[:, index, here]):
            sent = (numbers.sum() - numbers[here]).item() * HIDDEN * width
            found.append((phase, "ep", "all_to_all", dtype, numbers.sum().item() * HIDDEN, sent))
        return found

    def forward(phase: str, index: int) -> list[tuple]:
        numbers = (phase, "ep", "all_to_all", "int64", EXPERTS, 8 * EXPERTS * (size - 1) // size)
        return [numbers, *both_ways(phase, index)]

    log, places = [], itertools.count()
    for _ in range(config.steps * config.accumulation_steps if size > 1 else 0):
        layers = [next(places) for _ in range(LAYERS - 1)]
        for index in layers:
            log += forward("forward", index)
        for index in reversed(layers):
            log += forward("backward", next(places)) if config.recompute == "full" else []
            log += both_ways("backward", index)
    return log


def check_train(cases: list[str], found: list[list[dict]], folder: Path) -> None:
    for index, case in enumerate(cases):
        config, ranks = configure(7, f"{SHAPE} {case}", WORLD), [each[index] for each in found]
        tokens = config.global_batch * TOKENS // WORLD // config.accumulation_steps  # of a rank, in a micro-batch
        dropped = [json.loads(line)["dropped"] for line in (folder / str(index) / "metrics.jsonl").open()]
        assert (sum(dropped) > 0) == bool(config.capacity_factor), case
        forwards = config.steps * config.accumulation_steps * (LAYERS - 1) * (2 if config.recompute == "full" else 1)
        rows = sum(sum(counts) for rank in ranks for counts in rank["counts"])
        assert rows == forwards * WORLD * TOP_K * tokens - sum(dropped), f"{case}: tokens are lost, or come twice"
        for rank, seen in enumerate(ranks):
            where = f"rank {rank}, {case}"
            log = [call for call in seen["log"] if call[1] == "ep"]
            assert log == travels(config, rank, ranks), f"{where}: all-to-alls"
            check_router(config, seen, tokens, where)
            check_reduction(config, seen, where)
            assert seen["sockets"] in (None, pytest.approx(seen["sent"], rel=0.02)), where
        assert sum(rank["owned"] for rank in ranks) == (LAYERS - 1) * WEIGHTS, f"{case}: owners of experts"


def check_router(config: TrainConfig, seen: dict, tokens: int, where: str) -> None:
    """Of a sequence that ranks share, they add up statistics and, for the capacity, exchange choices."""
    found = [call[1:3] + call[4:5] for call in seen["log"] if call[3] == "int64" and call[1] in ("tp", "cp")]
    forward = []
    if config.capacity_factor:  # the choices of this rank, then those of its tensor ranks
        forward += [("tp", "all_gather", tokens * TOP_K), ("cp", "all_gather", config.tp * tokens * TOP_K)]
    if config.balance == "aux":
        forward += [(group, "all_reduce", config.micro_batch * EXPERTS) for group in ("tp", "cp")]
    forward = [call for call in forward if getattr(config, call[0]) > 1]
    assert found == len(seen["counts"]) * forward, f"{where}: statistics"


def check_reduction(config: TrainConfig, seen: dict, where: str) -> None:
    """Gradients of experts are summed once, over the holders of an expert alone."""
    held, dense = seen["experts"], seen["dense"]
    replicas = config.zero_replicas if config.zero else seen["edp"]
    shards = seen["edp"] // replicas if seen["edp"] > 1 else 1
    copies = seen["edp"] // shards
    assert held == (LAYERS - 1) * WEIGHTS // (config.ep * shards), f"{where}: experts are not divided by ep and edp"
    times = config.steps * (config.accumulation_steps if config.zero >= 2 else 1)  # stage 2 and 3: each micro-batch
    for group, op, size, expected in (
        ("expert_shard", "reduce_scatter", shards, times * held * shards),
        ("expert_replica", "all_reduce", copies, config.steps * held),
        ("replica", "all_reduce", 1 if config.zero and config.zero_replicas == 1 else 2, config.steps * dense),
    ):
        calls = [call for call in seen["log"] if call[1] == group and call[2] == op]
        assert sum(call[4] for call in calls) == expected * (size > 1), f"{where}: {op} over {group}"
        assert all(call[0] == "backward" and call[3] == "float32" for call in calls), f"{where}: {group}"


def test_train_sends_and_holds_what_its_experts_need(tmp_path):
    """Every all-to-all of every phase, in order, with the numbers of tokens that were really sent."""
    check_train(CASES, run_ranks(WORLD, ranks_train, CASES, str(tmp_path)), tmp_path)


def ranks_order() -> tuple[list[str], list[str]]:
    """The order of what one layer does in its forward and in its backward, as words.

    The tests of the mutants look at it before they break it.
    """
    config = configure(7, "--layers 1 --experts 4 --shared-experts 1 --dp 2 --ep 2 --seq-len 16 --global-batch 4")
    moe, clock, timeline = layer_of(config), itertools.count(), []

    def note(word: str) -> None:
        timeline.append((next(clock), word))

    def both_ways(x: torch.Tensor, word: str) -> torch.Tensor:
        """Pass x on and note when, in the forward and in the backward."""
        note(word)
        x = x.view_as(x)
        x.register_hook(lambda _: note(word))
        return x

    for name in ("shared", "experts"):
        module, real = getattr(moe, name), getattr(moe, name).forward
        module.forward = lambda x, *rest, name=name, real=real: both_ways(real(both_ways(x, name), *rest), name)

    def reading(counts: torch.Tensor) -> list[int]:
        note("read on the host")
        return counts.tolist()

    x, moe.read = torch.randn(1, 16, config.model_config.hidden, requires_grad=True), reading
    with collectives.record(lambda: next(clock)) as calls:
        y = moe(x)
        middle = next(clock)
        y.sum().backward()
    for call, name in zip(calls, ("counts", "dispatch", "combine", "combine", "dispatch"), strict=True):
        timeline += [(call.issue, f"start {name}"), (call.wait_start, f"wait for {name}")]
    words = [(when < middle, word) for when, word in sorted(timeline)]
    return tuple([word for early, word in words if early == half] for half in (True, False))


def check_order(ranks: list[tuple]) -> None:
    """Shared experts are computed while tokens, or gradients, travel. The host waits for the device once."""
    counts = ["start counts", "wait for counts", "read on the host"]
    dispatch, combine = ([f"start {name}", f"wait for {name}"] for name in ("dispatch", "combine"))
    around = [dispatch[0], "shared", "shared", dispatch[1]]
    for forward, backward in ranks:
        assert forward == [*counts, *around, "experts", "experts", *combine]
        assert backward == [*combine, "experts", "experts", *around]
