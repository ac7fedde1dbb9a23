"""The block of the papers, a GPT with dropout: what it keeps under tensor parallelism, and the seeds of its masks."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.measure.saved_tensors import SavedTensors
from common.process_groups import Mesh
from step01_single_gpu.memory_model.gpt import GptShape, layer_activations, text_activations
from step01_single_gpu.recompute import recompute
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
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def attention(self, normed):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in apply_column_parallel(normed, self.qkv))
        return self.after_attention(self.out(self.core(q, k, v).transpose(1, 2).flatten(-2)))

    def core(self, q, k, v):  # what selective recomputation computes again
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (batch, heads/tp, seq, seq)
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)  # an addition keeps nothing
        return self.on_scores(scores.softmax(-1)) @ v

    def mlp(self, normed):
        return self.after_mlp(self.down(F.gelu(self.up(normed))))


def gpt(quick: bool) -> None:
    """A GPT block with dropout: bytes it keeps against 10 + 24/tp and 34/tp; which ranks must draw the same mask."""
    rows, stream, square = [], BATCH * SEQ * HIDDEN, HEADS * SEQ**2 * BATCH
    for ranks in (1, 2) if quick else (1, 2, 4):
        found = on_ranks(ranks, look_into, title="gpt")[0]
        for sequence_parallel, kept in found["kept"].items():
            scores = 5 * square / ranks
            predicted = cost.gpt_block_activations(ranks, sequence_parallel) * stream + scores
            rows.append((f"tp {ranks}{' + SP' if sequence_parallel else ''}", predicted, kept))
        if ranks == 1:
            whole = found["whole"]
        if ranks == 2:
            seeds = found["seeds"]
    print_comparison("bytes that a GPT block keeps: s b h (10 + 24/tp), with SP 34/tp, and 5 a s^2 b / tp", "", rows)
    shape = GptShape(0, HIDDEN, 1, HEADS)
    predicted = layer_activations(shape, BATCH, SEQ)
    predicted |= {mode: text_activations(shape, BATCH, SEQ, mode) for mode in ("none", "selective", "full")}
    units = {"scores": ("a s² b", square)}
    cells = []
    for name, kept in whole.items():
        unit, size = units.get(name, ("s b h", stream))
        cells.append((name, unit, f"{predicted[name] / size:g}", f"{kept / size:.3f}"))
    title = "undivided: what its parts keep, and all of it in the modes of recomputation"
    print_table(title, ("", "unit", "formula", "counted"), cells)
    header = ("2 ranks", "seeds: residual", "attention", "equal mask: residual", "attention", "outputs differ by")
    print_table(f"dropout of {RATE}: by chance {(1 - RATE) ** 2 + RATE**2:.0%} of two masks are equal", header, seeds)


def look_into(mesh: Mesh, done: Callable) -> dict:
    """On a rank: bytes kept with and without sequence parallelism; what equal and different seeds do to the masks; and
    bytes kept by the parts of a block that is not divided."""
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
    return {"kept": kept, "seeds": seeds, "whole": parts_of(GptBlock(Split(mesh.tp, False, "plain"), (0, 0)))}


def parts_of(block: GptBlock) -> dict[str, int]:
    """Bytes that parts of a block keep in half precision, and the whole of it in the modes of recomputation."""
    block.bfloat16()
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def kept_by(function: Callable) -> int:
        with SavedTensors(block) as saved:
            result = function(x)
        del result
        return saved.bytes

    of_attention, whole, full = kept_by(block.attention), kept_by(block), kept_by(partial(recompute, block.forward))
    block.core = partial(recompute, block.core)
    found = {"attention": kept_by(block.attention)}  # without its scores
    found |= {"scores": of_attention - found["attention"], "mlp": kept_by(block.mlp)}
    found["norms"] = kept_by(lambda x: [norm(each) for norm, each in zip(block.norms, (x, x.clone()))])
    return found | {"none": whole, "selective": kept_by(block), "full": full}


def of_all(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The tensors of all ranks, by rank."""
    everybody = torch.empty(mesh.world.size, *tensor.shape)
    collectives.all_gather(everybody, tensor.float().contiguous(), mesh.world)
    return everybody


def stream_of(split: Split, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of the residual stream."""
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.chunk(split.group.size, 1)[split.group.rank].contiguous() if split.sequence_parallel else x
