"""Measures the attention kernels with other tiles than those of their table: what to write into it for a card.

    python -m step08_5d.kernels.tune --width 128

The compiler can tell what spills and how many programs live at once (`kernels.compiled`), but not which of two sound
tiles is faster. The table stays in the source, where a reader sees it: this command prints, and changes nothing.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import common.entry  # noqa: F401

# isort: split
import torch

from common.drawing.tables import print_table
from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.measure.gpu_time import seconds_of
from step08_5d.kernels import flash_attention
from step08_5d.kernels.flash_attention_backward import attend_backward
from step08_5d.kernels.launching import HAS_TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = ("forward", "dq", "dk, dv")
HEADS, TOKENS = 32, 4096  # of a sequence


class Trial(NamedTuple):
    """Tiles that were tried: queries and keys, warps, loads in flight; and what became of them."""

    tile: tuple[int, int, int, int]
    seconds: float | None  # of the forward, or of the whole backward
    why: str = ""  # there are none


def candidates() -> list[tuple[int, int, int, int]]:
    """All tiles worth a trial; those that a card has no room for fail in theirs."""
    return list(itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)))


@contextmanager
def taking(table: dict, width: int, kernel: int, tile: tuple) -> Iterator[None]:
    """Let a kernel take this tile instead of its entry in the table."""
    before = table[width]
    table[width] = tuple(tile if index == kernel else entry for index, entry in enumerate(before))
    try:
        yield
    finally:
        table[width] = before


def trials(width: int, kernel: int, tiles: list[tuple], clock: Callable = seconds_of, tokens: int = TOKENS) -> list:
    """Try every tile for one kernel, in bfloat16 and causal. Returns a list of `Trial`, the fastest first."""
    shape = 1, HEADS, tokens, width
    q, k, v, gradient = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    out, lse = flash_attention.attend(q, k, v, True)
    found, table = [], flash_attention.table_of(q)
    for tile in tiles:
        try:
            with taking(table, min(each for each in table if each >= width), kernel, tile):
                if kernel:
                    seconds = clock(lambda: attend_backward(gradient, q, k, v, out, lse, True))
                else:
                    seconds = clock(lambda: flash_attention.attend(q, k, v, True))
            found.append(Trial(tile, seconds))
        except Exception as error:  # Triton's, of many kinds: no room for it, or no way to compile it
            found.append(Trial(tile, None, f"{type(error).__name__}: {error}".splitlines()[0][:60]))
    return sorted(found, key=lambda trial: trial.seconds or float("inf"))


@one_line_errors
def main() -> None:
    """Print the fastest tiles of each kernel."""
    parser = OneLineParser(description=summary(__doc__))
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--shown", type=int, default=5, help="rows of a table")
    options = parser.parse_args()
    if DEVICE.type != "cuda" or not HAS_TRITON:
        raise UsageError("only a GPU with Triton can tell; python -m step08_5d.kernels.compiled needs none")
    for kernel, name in enumerate(KERNELS):
        tried = trials(options.width, kernel, candidates())
        q = torch.empty(1, HEADS, 1, options.width, device=DEVICE, dtype=torch.bfloat16)
        chosen = tuple(flash_attention.tile_sizes(q, kernel).values())
        shown = [*tried[: options.shown], *(trial for trial in tried[options.shown :] if trial.tile == chosen)]
        rows = []
        for tile, seconds, why in shown:
            label = ", ".join(map(str, tile)) + " (the table's)" * (tile == chosen)
            rows.append((label, f"{1e6 * seconds:.0f}" if seconds else why))
        title = f"{name}: {HEADS} heads of {options.width}, {TOKENS:,} tokens, {torch.cuda.get_device_name()}"
        print_table(title, ("queries, keys, warps, loads in flight", "µs" + " of the backward" * (kernel > 0)), rows)


if __name__ == "__main__":
    sys.exit(main())
