"""Head and loss in chunks: how long must a chunk be on two ranks of tp, where each chunk costs two messages?"""

import statistics
import time
from collections.abc import Callable

import torch

from common.collectives import barrier
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step08_5d.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

HIDDEN, TOKENS, VOCABS = 256, 512, (512, 2048, 8192, 49152)
LENGTHS = [HIDDEN // 4 << doublings for doublings in range(4)]


def head(quick: bool) -> None:
    """Time of head and loss in chunks of several lengths, beside that with all logits at once, on two ranks of tp."""
    vocabs = VOCABS[:2] if quick else VOCABS
    ranks = on_ranks(2, time_lengths, vocabs, 2 if quick else 15, title="head", jobs=len(vocabs))
    rows = []
    for vocab, *of_ranks in zip(vocabs, *ranks, strict=True):
        slower = {length: list(map(max, *(each[length] for each in of_ranks))) for length in of_ranks[0]}
        for length in LENGTHS:
            ratio = statistics.median(ours / whole for ours, whole in zip(slower[length], slower[0]))
            rows.append((f"{vocab:,}", length, f"{length * vocab // 2 * 4 / 2**20:.2f}", f"{ratio:.2f}"))
    header = ("vocabulary of two ranks", "tokens of a chunk", "MiB of its logits", "time / with all logits")
    print_table(f"chunks on two ranks, {TOKENS} tokens, h {HIDDEN}, float32", header, rows)


def time_lengths(mesh: Mesh, done: Callable, vocabs: tuple[int, ...], rounds: int) -> list[dict[int, list[float]]]:
    """On a rank: for each vocabulary, the seconds of chunks of several lengths, in turns; 0 stands for all logits."""
    result, generator = [], torch.Generator().manual_seed(0)
    for vocab in vocabs:
        x = torch.randn(1, TOKENS, HIDDEN, generator=generator).requires_grad_()
        weight = torch.randn(vocab // 2, HIDDEN, generator=generator).mul(0.02).requires_grad_()
        targets = torch.randint(vocab, (1, TOKENS), generator=generator)
        seconds = {length: [] for length in (0, *LENGTHS)}
        for turn in range(rounds + 1):  # the first warms up
            for length in sorted(seconds, key=lambda each: (each + turn) % 3):
                barrier(mesh.world)
                start = time.perf_counter()
                if length:
                    loss = linear_cross_entropy(x, weight, targets, vocab, mesh.world, False, length)
                else:
                    loss = linear_cross_entropy_reference(x, weight, targets, vocab, mesh.world)
                torch.autograd.grad(loss, (x, weight))
                seconds[length].append(time.perf_counter() - start)
        result.append({length: each[1:] for length, each in seconds.items()})
        done()
    return result
