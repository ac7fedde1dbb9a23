"""The head and the loss: all logits at once, or some tokens at a time. Peak memory and time."""

import statistics
import time
from collections.abc import Callable

import torch

from common.collectives import barrier
from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.measure.allocator import MemoryMeter
from common.model import at_least_float32
from common.presets import PRESETS
from common.process_groups import Degrees, Group, Mesh, build_mesh
from step08_5d.kernels.linear_cross_entropy import chunk_length, linear_cross_entropy, linear_cross_entropy_reference

HIDDEN, TOKENS, VOCAB = 256, 512, 32768
VOCABS = (8192, 16384, 32768, 65536, 131072)
MANY_TOKENS = (128, 256, 512, 1024, 2048)
SMALL_VOCABS = (512, 2048, 8192)  # of two ranks
LOOKS = {"head, then loss": SERIES[5], "in chunks": SERIES[0]}
MIB, GIB = 2**20, 2**30


def all_logits_bytes(tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> int:
    """The peak of the head and step 4's loss, beside the hidden states and the head.

    The forward makes the logits and their copy in float32, in which everything else happens in place. The backward
    rounds that copy to the logits' type (if it is another one), and multiplies it with head and hidden states.
    """
    e, wide = dtype.itemsize, at_least_float32(dtype).itemsize
    gradients = e * (tokens * hidden + hidden * vocab)
    return max(tokens * vocab * (e + wide), tokens * vocab * e + gradients)


def chunked_bytes(tokens: int, vocab: int, hidden: int, dtype: torch.dtype, on_cpu: bool = True) -> int:
    """The peak of both in one function: gradients of everything, and the logits of one chunk.

    On the CPU, without kernels, the loss makes another tensor as large as those logits, in at least float32, and a
    second one if the logits are narrower. A narrow gradient of the head, of one chunk, is made wide before it is added.
    """
    e, wide = dtype.itemsize, at_least_float32(dtype).itemsize
    length = min(tokens, chunk_length(torch.empty(vocab, hidden, dtype=dtype, device="meta")))
    copies = length * vocab * wide
    if e < wide:
        copies = max(2 * copies, hidden * vocab * (e + wide))
    return tokens * hidden * e + hidden * vocab * wide + length * vocab * e + (copies if on_cpu else 0)


class Case:
    """Hidden states, a head and targets, and both ways to a loss and its gradients."""

    def __init__(self, tokens: int, vocab: int, dtype: torch.dtype, group: Group):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
        columns = vocab // group.size
        self.weight = torch.randn(columns, HIDDEN, generator=generator).mul(0.02).to(dtype).requires_grad_()
        self.targets = torch.randint(vocab, (1, tokens), generator=generator)
        self.settings = vocab, group
        self.ways = {"head, then loss": self.all_logits, "in chunks": self.chunks}

    def all_logits(self) -> torch.Tensor:
        return linear_cross_entropy_reference(self.x, self.weight, self.targets, *self.settings)

    def chunks(self, length: int | None = None) -> torch.Tensor:
        return linear_cross_entropy(self.x, self.weight, self.targets, *self.settings, False, length)

    def run(self, way: str) -> tuple[torch.Tensor, ...]:
        """The gradients of hidden states and head."""
        return torch.autograd.grad(self.ways[way](), (self.x, self.weight))


def peak(case: Case, way: str) -> int:
    """Bytes that loss and gradients allocate at most."""
    with MemoryMeter("cpu").measure() as measured:
        case.run(way)
    return measured.peak_bytes


def time_ratio(case: Case, pairs: int) -> list[float]:
    """Seconds in chunks / seconds with all logits, of pairs that are run one right after the other, in turns."""
    ratios = []
    for number in range(pairs + 1):
        seconds = {}
        for way in list(LOOKS)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            case.run(way)
            seconds[way] = time.perf_counter() - start
        ratios.append(seconds["in chunks"] / seconds["head, then loss"])
    return ratios[1:]  # the first pair warms up


def time_lengths(mesh: Mesh, done: Callable, vocabs: tuple[int, ...], rounds: int) -> list[dict[int, list[float]]]:
    """On a rank: for each vocabulary, the seconds of chunks of several lengths, in turns; 0 stands for all logits."""
    result = []
    for vocab in vocabs:
        case = Case(TOKENS, vocab, torch.float32, mesh.world)  # in the place of tp
        seconds = {length: [] for length in (0, *(HIDDEN // 4 << doublings for doublings in range(4)))}
        for turn in range(rounds + 1):  # the first warms up
            for length in sorted(seconds, key=lambda each: (each + turn) % 3):
                barrier(mesh.world)
                start = time.perf_counter()
                torch.autograd.grad(case.chunks(length) if length else case.all_logits(), (case.x, case.weight))
                seconds[length].append(time.perf_counter() - start)
        result.append({length: each[1:] for length, each in seconds.items()})
        done()
    return result


def lengths(quick: bool) -> None:
    """How long a chunk must be on two ranks of tp, where each costs two messages."""
    vocabs = SMALL_VOCABS[:2] if quick else SMALL_VOCABS
    ranks = on_ranks(2, time_lengths, vocabs, 2 if quick else 15, title="lengths", jobs=len(vocabs))
    rows = []
    for vocab, *of_ranks in zip(vocabs, *ranks, strict=True):
        slower = {length: list(map(max, *(each[length] for each in of_ranks))) for length in of_ranks[0]}
        for length in list(slower)[1:]:
            ratio = statistics.median(ours / whole for ours, whole in zip(slower[length], slower[0]))
            rows.append((f"{vocab:,}", f"{length}", f"{length * vocab // 2 * 4 / MIB:.2f}", f"{ratio:.2f}"))
    header = ("vocabulary of two ranks", "tokens of a chunk", "MiB of its logits", "time / with all logits")
    print_table(f"chunks on two ranks, {TOKENS} tokens, h {HIDDEN}, float32", header, rows)


def head(quick: bool) -> None:
    """Peak memory of head and loss over vocabulary and tokens, and what the smaller one costs in time."""
    group = build_mesh(Degrees(), torch.device("cpu")).tp
    vocabs, many_tokens = (VOCABS[:3], MANY_TOKENS[:3]) if quick else (VOCABS, MANY_TOKENS)
    points = [(TOKENS, vocab, torch.float32) for vocab in vocabs]
    points += [(tokens, VOCAB, torch.float32) for tokens in many_tokens if tokens != TOKENS]
    points += [(TOKENS, vocab, torch.bfloat16) for vocab in vocabs[:2]]
    found, ratios, rows = {}, {}, []
    for point in points:
        case, cells = Case(*point, group), []
        for way, formula in zip(LOOKS, (all_logits_bytes, chunked_bytes)):
            found[(way, *point)] = peak(case, way)
            cells += compared(formula(*point[:2], HIDDEN, point[2]), found[(way, *point)], ",.1f", MIB)
        saved = found[("head, then loss", *point)] / found[("in chunks", *point)]
        if point[0] == TOKENS and point[2] == torch.float32:
            ratios[point[1]] = time_ratio(case, 2 if quick else 5)
        name = f"{point[0]:,} tokens, {point[1]:,} columns, {str(point[2])[6:]}"
        rows.append((name, *cells, f"{saved:.2f}"))
    header = ["", *(cell for way in LOOKS for cell in (f"{way}: predicted", "measured", "ratio")), "times less"]
    print_table(f"MiB that head and loss allocate at most, h {HIDDEN}", header, rows)
    difference = max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(case.run("in chunks"), case.run("head, then loss"))
    )
    print(f"  largest relative difference of a gradient, last line: {difference:.1e}")
    rows = [
        (f"{vocab:,}", f"{statistics.median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}")
        for vocab, each in ratios.items()
    ]
    print_table(
        f"time in chunks / with all logits, {TOKENS} tokens, float32", ("columns", "median", "of all pairs"), rows
    )
    lengths(quick)
    real_models()
    if not quick:
        draw_head(found, ratios)


def real_models() -> None:
    """PREDICTED: the same for large vocabularies, with kernels."""
    rows = []
    for name in ("smollm-1.7b", "llama3-1b", "llama3-8b"):
        model = PRESETS[name]
        for tokens in (8192, 32768):
            shape = (tokens, model.vocab, model.hidden, torch.bfloat16)
            sizes = all_logits_bytes(*shape), chunked_bytes(*shape, on_cpu=False)
            rows.append(
                (f"{name}, {tokens:,} tokens", *(f"{size / GIB:.2f}" for size in sizes), f"{sizes[0] / sizes[1]:.1f}")
            )
    print_table("predicted: GiB on a GPU, bfloat16, without tp", ("", *LOOKS, "times less"), rows)


def draw_head(found: dict[tuple, int], ratios: dict[int, list[float]]) -> None:
    """Lines predicted, dots measured; right the time."""
    figure, axes = new_figure(1, 3, width=11.5, height=3.8)
    formulas: dict[str, Callable] = dict(zip(LOOKS, (all_logits_bytes, chunked_bytes)))
    for way, colour in LOOKS.items():
        for axis, values, place in ((axes[0], VOCABS, 1), (axes[1], MANY_TOKENS, 0)):
            points = [(TOKENS, each) if place else (each, VOCAB) for each in values]
            predicted = [formulas[way](*point, HIDDEN, torch.float32) / MIB for point in points]
            measured = [found[(way, *point, torch.float32)] / MIB for point in points]
            axis.plot(values, predicted, color=colour, label=f"{way}: predicted")
            axis.plot(values, measured, "o", color=colour, label="measured")
    axes[0].set(xlabel="vocabulary", ylabel="MiB at the peak", ylim=(0, None))
    axes[1].set(xlabel="tokens", ylim=(0, None))
    axes[0].set_title(f"{TOKENS} tokens", loc="left", fontsize=10, fontweight="bold")
    axes[1].set_title(f"vocabulary of {VOCAB:,}", loc="left", fontsize=10, fontweight="bold")
    axes[0].legend(frameon=False, fontsize=9)
    names = [f"{vocab // 1024}k" for vocab in VOCABS]
    axes[0].set_xticks(VOCABS[1:], names[1:])
    axes[1].set_xticks(MANY_TOKENS[2:], [f"{each:,}" for each in MANY_TOKENS[2:]])
    for place, each in enumerate(ratios.values()):
        axes[2].plot([place] * len(each), each, "o", color=COLOURS["idle"], markeredgecolor="#999999", markersize=5)
        axes[2].plot(
            [place - 0.25, place + 0.25], [statistics.median(each)] * 2, color=LOOKS["in chunks"], linewidth=2.5
        )
    axes[2].axhline(1, color="black", linewidth=1)
    axes[2].set_xticks(range(len(names)), names)
    axes[2].set(xlabel="vocabulary", ylim=(0, None))
    axes[2].set_title("time in chunks / with all logits", loc="left", fontsize=10, fontweight="bold")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    save_figure(figure, "head")
