"""How evenly the three splits divide the attention: pairs, time, and what the ring makes of them."""

import time
from collections.abc import Callable
from functools import partial

import torch

from common.collectives import barrier
from common.drawing.tables import compared, print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.process_groups import Mesh
from step06_context_parallel.attention_block import KERNELS, FusedKernels
from step06_context_parallel.cost import SPLITS, all_pairs, critical_path
from step06_context_parallel.experiments.tools import AttentionLayer
from step06_context_parallel.sequence_layouts import SequenceLayout

TOY = {"seq_len": 16, "layers": 1, "hidden": 64, "heads": 1, "kv_heads": 1, "micro_batch": 1, "global_batch": 1}
LONG = TOY | {"hidden": 256, "heads": 4, "kv_heads": 2}
RANKS = 4


def balance(quick: bool) -> None:
    """(query, key) pairs of every rank and hop in three splits: by formula, in the running ring, and their time."""
    tokens = 2048 if quick else 8192
    cases = [
        flags | {"cp_split": split, "cp": RANKS} for flags in (TOY, LONG | {"seq_len": tokens}) for split in SPLITS
    ]
    found = on_ranks(RANKS, on_every_case, watch, cases, title="balance", jobs=len(cases))
    rows, paths = [], []
    for index, split in enumerate(SPLITS):
        formula = all_pairs(split, 16, RANKS)
        seen = [[pairs for pairs, _ in part[index]["forward"]] for part in found]
        rows += [(f"{split}, rank {rank}", sum(formula[rank]), sum(seen[rank])) for rank in range(RANKS)]
        paths.append((split, critical_path(formula), critical_path(seen)))
    print_comparison("16 tokens on 4 ranks: pairs that `attend` was called with in a forward", "split", rows)
    print_comparison("critical path: the sum over the ring's hops of the busiest rank's pairs", "split", paths)
    compare_time(tokens, [part[len(SPLITS) :] for part in found])
    if not quick:
        compare_triangles()
        compare_wall_clock(tokens)


def watch(mesh: Mesh, flags: dict, repetitions: int = 6) -> dict[str, list]:
    """On a rank: pairs and seconds of its own processor time in each hop, (pairs, seconds) by phase.

    The least of several times: ranks that share a core slow each other down even in processor time.
    """
    blocks = []  # of the phase that runs: (pairs, seconds), in order

    class Counting(FusedKernels):
        def attend(self, q, k, v, causal):
            return self.count(partial(super().attend, q, k, v, causal), q, k, causal)

        def attend_backward(self, gradient, q, k, v, out, lse, causal):
            return self.count(partial(super().attend_backward, gradient, q, k, v, out, lse, causal), q, k, causal)

        def count(self, compute: Callable, q, k, causal: bool) -> tuple:
            start, result = time.thread_time(), compute()
            rows, columns = q.shape[2], k.shape[2]
            pairs = rows * (rows + 1) // 2 if causal else rows * columns
            blocks.append((pairs, time.thread_time() - start))
            return result

    layer, result = AttentionLayer(mesh, Counting(), **flags), {}
    layout, ranks = SequenceLayout(layer.config.cp_split, layer.config.seq_len, layer.mesh.cp.size), layer.mesh.cp.size
    plan = layout.plan(layer.mesh.cp.rank)
    counts = [len(plan.blocks[(layer.mesh.cp.rank - hop) % ranks]) for hop in range(ranks)]
    for _ in range(repetitions):
        for phase in ("forward", "backward"):
            barrier(mesh.world)
            blocks.clear()
            getattr(layer, phase)()
            hops = [[sum(each) for each in zip((0, 0.0), *(blocks.pop(0) for _ in range(count)))] for count in counts]
            before = result.get(phase, hops)
            result[phase] = [(pairs, min(seconds, old[1])) for (pairs, seconds), old in zip(hops, before)]
    return result


def compare_time(tokens: int, found: list[list[dict]]) -> None:
    """Processor time of each rank and of the critical path, predicted from the pairs and one process's time a pair."""
    alone = on_ranks(1, on_every_case, watch, [LONG | {"seq_len": tokens}], title="one process")[0][0]
    rows, paths = [], []
    for phase in ("forward", "backward"):
        ((pairs, seconds),) = alone[phase]
        for index, split in enumerate(SPLITS):
            name, formula = f"{phase}, {split}", all_pairs(split, tokens, RANKS)
            predicted = [[1e3 * seconds / pairs * each for each in hops] for hops in formula]
            measured = [[1e3 * part[1] for part in each[index][phase]] for each in found]
            rows.append((name, *(f"{sum(a):.0f} / {sum(b):.0f}" for a, b in zip(predicted, measured))))
            paths.append((name, critical_path(predicted), critical_path(measured)))
    title = f"{tokens:,} tokens on {RANKS} ranks: ms of processor time, predicted / measured"
    print_table(title, ("", *(f"rank {rank}" for rank in range(RANKS))), rows)
    print_comparison("critical path, ms", "", paths, ".0f")


def compare_triangles() -> None:
    """Why striped is slower than its pairs say: the kernel computes the tiles that a diagonal crosses as a whole."""
    sizes = (512, 1024, 2048, 4096)
    shares = zip(sizes, on_ranks(1, time_triangles, sizes)[0])
    rows = [(f"{n:,} x {n:,}", (n + 1) / (2 * n), share) for n, share in shares]
    print_comparison("processor time of a causal block over that of a full one", "block", rows, ".3f")


def time_triangles(mesh: Mesh, done: Callable, sizes: tuple[int, ...]) -> list[float]:
    """On a rank: the least time of a causal block over the least time of a full one, for each size."""
    shares = []
    for n in sizes:
        q, k, v = (torch.randn(1, heads, n, 64) for heads in (4, 2, 2))
        best = {True: float("inf"), False: float("inf")}
        for causal in (True, False) * 8:
            start = time.thread_time()
            KERNELS["fused"].attend(q, k, v, causal)
            best[causal] = min(best[causal], time.thread_time() - start)
        shares.append(best[True] / best[False])
    return shares


def compare_wall_clock(tokens: int) -> None:
    """Two ranks that really run side by side: the splits against each other by the clock on the wall."""
    cases = [LONG | {"seq_len": tokens, "cp_split": split, "cp": 2} for split in SPLITS]
    found = on_ranks(2, time_layers, cases, 6, title="wall clock")
    best = {split: max(part[index] for part in found) for index, split in enumerate(SPLITS)}
    rows, paths = [], {split: critical_path(all_pairs(split, tokens, 2)) for split in SPLITS}
    for split in SPLITS:
        cells = compared(paths[split] / paths["zigzag"], best[split] / best["zigzag"], ".3f")
        rows.append((split, f"{1e3 * best[split]:.0f}", *cells))
    header = ("split", "ms", "over zigzag: predicted", "measured", "ratio")
    print_table(f"{tokens:,} tokens on 2 ranks: forward and backward of the attention, on the clock", header, rows)


def time_layers(mesh: Mesh, done: Callable, cases: list[dict], rounds: int) -> list[float]:
    """On a rank: the least seconds of forward and backward in each case. The cases take turns."""
    layers, best = [AttentionLayer(mesh, **flags) for flags in cases], [float("inf")] * len(cases)
    for _ in range(rounds):
        for index, layer in enumerate(layers):
            barrier(mesh.world)
            start = time.perf_counter()
            layer.both()
            barrier(mesh.world)
            best[index] = min(best[index], time.perf_counter() - start)
    return best
