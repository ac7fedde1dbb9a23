"""How many collectives, how many bytes, and whether the result is the same."""

from collections import Counter
from collections.abc import Callable

from common.collectives import barrier, record
from common.config import TrainConfig
from common.drawing.tables import print_comparison, print_table
from common.experiments import tcp_bytes
from common.experiments.gradients import compare_gradients, worst_difference
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import overlay, reference_gradients
from common.process_groups import Mesh
from step04_tensor_parallel.experiments import predictions
from step04_tensor_parallel.experiments.tools import RECOMPUTED, SHAPE, WAYS, Run, on_every_case, way_of
from step04_tensor_parallel.train import train

SHARED = {"SP, overlap, 1 K/V head": WAYS["SP, overlap"] | {"kv_heads": 1}}


def collectives(quick: bool) -> None:
    """Collectives and bytes of a block and of a step: by formula, by the log of calls, by what the TCP sockets sent."""
    ways = WAYS | RECOMPUTED | SHARED
    for ranks in (2,) if quick else (2, 4):
        cases = [SHAPE | {"tp": ranks, "layers": layers} | flags for flags in ways.values() for layers in (1, 2)]
        found = on_ranks(ranks, count_calls, cases, title="collectives", jobs=len(cases))[0]
        numbers, blocks, steps = [], [], []
        for index, (name, flags) in enumerate(ways.items()):
            way, (one, two) = way_of(flags), found[2 * index : 2 * index + 2]
            of_step, stream = dimensions(flags)
            expected = predictions.block_collectives(way, ranks)
            sizes = predictions.block_bytes(way, ranks, stream)
            for phase, ops in expected.items():
                counted = two[phase] - one[phase]  # one block more
                numbers.append((name, phase, words(ops), words(counted)))
                blocks.append((f"{name}: {phase}", sizes[phase], two["bytes"][phase] - one["bytes"][phase]))
            total = sum(predictions.step_bytes(way, ranks, *of_step).values())
            cells = (f"{total:,.0f}", f"{two['bytes'].total():,.0f}", f"{two['bytes'].total() / total:.4f}")
            steps.append((name, *cells, f"{two['sockets']:,.0f}", f"{two['sockets'] / total:.4f}"))
        header = ("way", "phase", "predicted", "log of calls")
        print_table(
            f"{ranks} ranks: collectives of one block (a model of 2 blocks, less a model of 1)", header, numbers
        )
        title = f"{ranks} ranks: bytes that a rank sends for one block; b s h is {stream:,} bytes"
        print_comparison(title, "way, phase", blocks)
        header = ("way", "predicted", "log of calls", "ratio", "TCP sockets", "ratio")
        print_table(f"{ranks} ranks: bytes that a rank sends in a step of 2 blocks, everything included", header, steps)
        for name in ("SP, overlap", *SHARED):
            parts = predictions.step_bytes(way_of(ways[name]), ranks, *dimensions(ways[name])[0])
            print(f"  {name}, by part: " + ", ".join(f"{part} {size:,.0f}" for part, size in parts.items() if size))


def dimensions(flags: dict) -> tuple[tuple, int]:
    """Model, batch and sequence length of `SHAPE` with these flags, and the bytes of its residual stream."""
    config = TrainConfig(**SHAPE | flags)
    tokens = config.micro_batch * config.seq_len
    return (config.model_config, config.micro_batch, config.seq_len), 4 * tokens * config.model_config.hidden


def words(ops: Counter) -> str:
    """2 all_gather, 2 reduce_scatter"""
    return ", ".join(f"{number} {op}" for op, number in sorted(ops.items()) if number) or "none"


def count_calls(mesh: Mesh, done: Callable, cases: list[dict]) -> list[dict]:
    """On a rank: for each case, the collectives of a step by phase, their bytes, and what the sockets sent."""
    result = []
    for flags in cases:
        run = Run(mesh, **flags)
        barrier(mesh.world)
        before = tcp_bytes.sent_by_me() or 0
        barrier(mesh.world)  # every rank has read its counter before any rank sends
        with record() as calls:
            run.gradients()
        counted = {"sockets": (tcp_bytes.sent_by_me() or 0) - before, "bytes": Counter()}
        for phase in ("forward", "backward"):
            counted[phase] = Counter(call.op for call in calls if call.phase == phase and call.op != "receive")
        for call in calls:
            counted["bytes"][call.phase] += call.bytes
        result.append(counted)
        done()
    return result


# ---- the same result -------------------------------------------------------------------------------------------------

FLOAT64 = SHAPE | {"hidden": 64, "ffn": 96, "seq_len": 32, "global_batch": 4, "vocab": 387, "dtype": "float64"}


def gradients(quick: bool) -> None:
    """Gradients of every way against one process that takes the whole global batch at once, in float64."""
    cases = [(2, name, {"tp": 2} | flags) for name, flags in WAYS.items()]
    if not quick:
        cases += [(4, name, {"tp": 4} | flags) for name, flags in WAYS.items()]
        for kv_heads, kind in ((8, "MHA"), (2, "GQA, 2 K/V heads"), (1, "MQA")):
            cases.append((4, f"SP, overlap, {kind}", {"tp": 4, "kv_heads": kv_heads}))
        cases.append((4, "no SP, plain, MQA", {"tp": 4, "kv_heads": 1} | WAYS["no SP, plain"]))
        cases.append((4, "SP, overlap, tied", {"tp": 4, "tie_embeddings": True}))
        cases.append((4, "SP, overlap, full recomputation", {"tp": 4, "recompute": "full"}))
        cases.append((4, "dp 2 x tp 2, ZeRO 3", {"tp": 2, "zero": 3, "micro_batch": 1}))
    compare_gradients(
        on_every_case, gradient_difference, [(size, name, FLOAT64 | flags) for size, name, flags in cases]
    )


def gradient_difference(run: Run) -> float:
    """The largest relative difference between a gradient of this rank and its part of one process's gradient."""
    return worst_difference(run.shards, run.gradients(), reference_gradients(run.config, run.batches))


def curves(quick: bool) -> None:
    """The default run with tensor parallelism beside step 1's: the same loss and gradient norm, up to rounding."""
    variants = {"one": (1, {}), "tp 2": (2, {"tp": 2}), "tp 4": (4, {"tp": 4}), "dp 2 tp 2": (4, {"tp": 2})}
    overlay(train, variants, quick)
