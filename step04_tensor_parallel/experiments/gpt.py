"""The block of the papers, a GPT with dropout: what it keeps under tensor parallelism, and the seeds of its masks."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.measure.saved_tensors import SavedTensors
from common.process_groups import Mesh
from step04_tensor_parallel import cost
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, apply_column_parallel

BATCH, SEQ, HIDDEN, HEADS, RATE = 2, 128, 256, 8, 0.1


class Dropout(nn.Module):
    """Dropout with a seed, so that we choose which ranks draw the same mask. It keeps one byte per element."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.mask = seed, None

    def forward(self, x):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            x, self.mask = torch.native_dropout(x, RATE, train=True)
        return x


class GptBlock(nn.Module):
    """LayerNorm, attention with its scores, GELU over 4h, three dropouts (Korthikanti et al., section 4), divided.

    Args:
        seeds: of the dropouts on the residual stream, and of the one on the attention's probabilities.
    """

    def __init__(self, split: Split, seeds: tuple[int, int]):
        super().__init__()
        ranks = split.group.size

        def column(out: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(nn.Parameter(torch.randn(out // ranks, HIDDEN) / 16), split)

        def row(inside: int) -> RowParallelLinear:
            return RowParallelLinear(nn.Parameter(torch.randn(HIDDEN, inside // ranks) / 16), split)

        self.heads = HEADS // ranks
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.ModuleList([column(HIDDEN) for _ in range(3)]), row(HIDDEN)
        self.up, self.down = column(4 * HIDDEN), row(4 * HIDDEN)
        self.after_attention, self.after_mlp, self.on_scores = map(Dropout, (seeds[0], seeds[0] + 1, seeds[1]))

    def forward(self, x):  # (batch, seq/tp, hidden), without sequence parallelism (batch, seq, hidden)
        normed = self.norms[0](x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in apply_column_parallel(normed, self.qkv))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (batch, heads/tp, seq, seq)
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)  # an addition keeps nothing
        mixed = self.on_scores(scores.softmax(-1)) @ v
        x = x + self.after_attention(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.after_mlp(self.down(F.gelu(self.up(self.norms[1](x)))))


def gpt(quick: bool) -> None:
    """A GPT block with dropout: bytes it keeps against 10 + 24/tp and 34/tp; which ranks must draw the same mask."""
    rows, stream = [], BATCH * SEQ * HIDDEN
    for ranks in (1, 2) if quick else (1, 2, 4):
        found = on_ranks(ranks, look_into, title="gpt")[0]
        for sequence_parallel, kept in found["kept"].items():
            scores = 5 * HEADS * SEQ**2 * BATCH / ranks
            predicted = cost.gpt_block_activations(ranks, sequence_parallel) * stream + scores
            rows.append((f"tp {ranks}{' + SP' if sequence_parallel else ''}", predicted, kept))
        if ranks == 2:
            seeds = found["seeds"]
    print_comparison("bytes that a GPT block keeps: s b h (10 + 24/tp), with SP 34/tp, and 5 a s^2 b / tp", "", rows)
    header = ("2 ranks", "seeds: residual", "attention", "equal mask: residual", "attention", "outputs differ by")
    print_table(f"dropout of {RATE}: by chance {(1 - RATE) ** 2 + RATE**2:.0%} of two masks are equal", header, seeds)


def look_into(mesh: Mesh, done: Callable) -> dict:
    """On a rank: bytes kept with and without sequence parallelism; what equal and different seeds do to the masks."""
    kept, seeds = {}, []
    for sequence_parallel in (False, True):
        split = Split(mesh.world, sequence_parallel, "overlap")
        block = GptBlock(split, (0, 0)).to(torch.bfloat16)
        with SavedTensors(block) as saved:
            y = block(stream_of(split, torch.bfloat16))
        kept[sequence_parallel] = saved.bytes
        del y
        for words in (("equal", "equal"), ("own", "own"), ("equal", "own")) if mesh.world.size > 1 else ():
            block = GptBlock(split, tuple(10 * mesh.rank if word == "own" else 0 for word in words))
            y = block(stream_of(split, torch.float32)).detach()
            others = [of_all(each, mesh) for each in (block.after_attention.mask, block.on_scores.mask, y)]
            equal = [f"{(first == last).float().mean().item():.0%}" for first, *_, last in others[:2]]
            first, *_, last = others[2]
            apart = "-" if sequence_parallel else f"{((last - first).norm() / first.norm()).item():.0%}"
            seeds.append(("tp + SP" if sequence_parallel else "tp", *words, *equal, apart))
    return {"kept": kept, "seeds": seeds}


def of_all(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The tensors of all ranks, by rank."""
    everybody = torch.empty(mesh.world.size, *tensor.shape)
    collectives.all_gather(everybody, tensor.float().contiguous(), mesh.world)
    return everybody


def stream_of(split: Split, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of the residual stream."""
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.chunk(split.group.size, 1)[split.group.rank].contiguous() if split.sequence_parallel else x
