"""What ranks returned, sent and held in a case that went wrong: as lines, and as a picture in the student's folder."""

import contextlib
import textwrap
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from common.drawing.figures import COLOURS, new_figure
from common.labs.graded import Graded
from common.labs.notes import Notes, SeenCall

NAME = "check.png"
RANKS = 4  # that are shown
FEW = 16  # whole numbers of each rank, in lines
MESSAGES = 6  # of each rank, in lines
NUMBERS = 48  # of each rank, in the picture
LEAST = 8  # numbers for which the picture has room: beside fewer, the words on them would not fit
TENSORS = 5  # of each rank's peak, in the picture
LABELLED = 0.06  # of the peak: smaller tensors have no label


def in_words(graded: Graded, notes: list[Notes]) -> list[str]:
    """A table of the first wrong value by rank, if one is, and otherwise the messages of each rank in their order."""
    ranks = range(min(RANKS, graded.case.ranks))
    if graded.wrong:
        name = graded.wrong[0]
        if not graded.expected[0].values[name].is_floating_point():
            return [f"`{name}`: as it should be, and as it is", *(_whole_numbers(graded, name, each) for each in ranks)]
        lines = [f"`{name}`: its norm as it should be, as it is, and the norm of the difference"]
        for rank in ranks:
            right, found = graded.expected[rank].values[name].double(), graded.found[rank].get(name)
            lines.append(f"  {_of(rank, graded)}{right.norm():>11.6g}  {_norms(right, found)}")
        return lines
    if not any(each.calls for each in notes):
        return []
    return ["What each rank sends, in this order:", *(f"  rank {rank}  {_calls(notes[rank].calls)}" for rank in ranks)]


def _whole_numbers(graded: Graded, name: str, rank: int) -> str:
    right, found = graded.expected[rank].values[name], graded.found[rank].get(name)
    return f"  {_of(rank, graded)}{_listed(right)}  {_listed(found) if isinstance(found, Tensor) else found}"


def _listed(numbers: Tensor) -> str:
    """All of them, or so many as a line has room for."""
    more = f"{', '.join(map(str, numbers[:FEW].tolist()))}, and {len(numbers) - FEW} more" if numbers.dim() == 1 else ""
    return f"[{more}]" if more and len(numbers) > FEW else str(numbers.tolist())


def _of(rank: int, graded: Graded) -> str:
    """Whose row of a table this is; of one process alone there is nothing to say."""
    return f"rank {rank}  " if graded.case.ranks > 1 else ""


def _norms(right: Tensor, found: Tensor | None) -> str:
    if not isinstance(found, Tensor):
        return f"{found!r:>11}"
    if found.shape != right.shape:
        return f"{found.double().norm():>11.6g}  of another shape"
    return f"{found.double().norm():>11.6g}  {(found.double() - right).norm():>11.3g}"


def _calls(calls: list[SeenCall]) -> str:
    runs = [(call, len(list(same))) for call, same in groupby(calls, key=lambda call: (str(call), call.line))]
    texts = [f"{'' if times == 1 else f'{times} x '}{what} (line {line})" for (what, line), times in runs]
    more = [f"{len(texts) - MESSAGES} more"] if len(texts) > MESSAGES else []
    return ", ".join([*texts[:MESSAGES], *more]) or "nothing"


def draw(graded: Graded, notes: list[Notes], path: Path) -> bool:
    """Draw what should be and what is, or else the memory at its peak; and what is sent. False if it cannot."""
    ranks = range(min(RANKS, graded.case.ranks))
    sent = any(each.calls for each in notes)
    figure, axes = new_figure(1 + sent, 1, width=7.5, height=5.5 if sent else 3.0)
    first = axes[0] if sent else axes
    if graded.wrong:
        _draw_numbers(first, graded, ranks)
    else:
        _draw_memory(first, notes, ranks)
    if sent:
        _draw_messages(axes[1], notes, ranks)
    figure.suptitle(f"With {graded.case}", fontsize=9)
    try:
        figure.savefig(path)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # a part of it
        return False
    return True


def _draw_numbers(axis, graded: Graded, ranks: range) -> None:
    name, first, _ = graded.wrong
    start = 0
    for rank in ranks:
        right, found = graded.expected[rank].values[name].double(), graded.found[rank].get(name)
        right = right.flatten()[:NUMBERS]
        places = torch.arange(start, start + len(right))
        label = ("as it should be", "as it is") if rank == 0 else (None, None)
        axis.plot(places, right, "o", markersize=5, fillstyle="none", color=COLOURS["predicted"], label=label[0])
        if isinstance(found, Tensor):
            found = found.double().flatten()[:NUMBERS]
            axis.plot(places[: len(found)], found[: len(right)], ".", color=COLOURS["measured"], label=label[1])
            if rank == first and len(found) == len(right) and (off := ~torch.isclose(found, right)).any():
                place = int(off.nonzero()[0])
                axis.axvline(start + place, linestyle=":", color=COLOURS["measured"], linewidth=1)
                where = axis.get_xaxis_transform()
                axis.text(start + place + 0.4, 0.02, "differs first", fontsize=7, transform=where)
        axis.text(start, 1.01, _of(rank, graded), transform=axis.get_xaxis_transform(), fontsize=8, va="bottom")
        start += len(right) + 2
    axis.set(xlim=(-1, max(start, LEAST)), xticks=[])
    axis.set_ylabel(f"{textwrap.fill(name, 30)}\n(first numbers of each rank)", fontsize=8)
    axis.legend(fontsize=8)


def _draw_messages(axis, notes: list[Notes], ranks: range) -> None:
    largest = max((call.bytes for rank in ranks for call in notes[rank].calls), default=0) or 1
    for rank in ranks:
        for number, call in enumerate(notes[rank].calls):
            size = 3 + 8 * (call.bytes / largest) ** 0.5  # its area grows with the bytes
            axis.plot(number, rank, "s", markersize=size, color=COLOURS.get(call.op, COLOURS["other"]))
            axis.annotate(
                f"{call.op}\n{call.bytes:,} bytes\nline {call.line}",
                (number, rank + 0.18),
                fontsize=5,
                ha="center",
                va="top",
            )
    most = max(len(notes[rank].calls) for rank in ranks)
    axis.set(yticks=list(ranks), yticklabels=[f"rank {rank}" for rank in ranks], ylim=(len(ranks) - 0.3, -0.5))
    axis.set(xlim=(-0.7, max(most, 6) - 0.3), xticks=[])
    axis.set_xlabel("messages and collectives, in the order in which each rank begins them", fontsize=8)


def _draw_memory(axis, notes: list[Notes], ranks: range) -> None:
    for rank in ranks:
        left = 0
        for held in notes[rank].largest[:TENSORS]:
            axis.barh(rank, held.bytes, left=left, color=COLOURS["activations"], edgecolor="white", height=0.6)
            if held.bytes > LABELLED * notes[rank].peak:
                where = f"line {held.line}" if held.line else "given"
                axis.text(left + held.bytes / 2, rank, where, fontsize=6, ha="center", va="center")
            left += held.bytes
        axis.barh(rank, max(0, notes[rank].peak - left), left=left, color=COLOURS["idle"], height=0.6)
        if notes[rank].allowed:
            label = "enough" if rank == 0 else None
            axis.plot(
                [notes[rank].allowed] * 2, [rank - 0.45, rank + 0.45], "--", color=COLOURS["predicted"], label=label
            )
    if notes[0].allowed:
        axis.legend(fontsize=8)
    axis.set(yticks=list(ranks), yticklabels=[f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set_xlabel("bytes of tensors that live when most do: the largest, by the line that made them", fontsize=8)
