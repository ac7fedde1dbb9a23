"""What labs ask of the way to the numbers: sentences about what a rank sent, held or did not hide."""

from collections.abc import Iterator

from common.labs.notes import Notes

SLACK = 1.02
NAMED = 3  # tensors in a sentence about memory


def sends_at_most(notes: Notes, most: float, why: dict[str, str]) -> Iterator[str]:
    """One sentence if a rank sent more bytes; `why` explains by what: a collective -> what is wrong with it there."""
    if notes.sent > SLACK * most + 64:
        text = f"it sends {notes.sent:,.0f} bytes, and {most:,.0f} are enough."
        op = max(why, key=lambda op: round(sum(call.sent for call in notes.of(op))))
        if calls := notes.of(op):
            largest, lines = max(calls, key=lambda call: call.bytes), sorted({call.line for call in calls})
            where = f"the {op} of {largest.bytes:,} bytes in line {largest.line}"
            if lines[1:]:  # any of them may be the one too many
                where = f"each {op}, in lines {', '.join(map(str, lines[:-1]))} and {lines[-1]}"
            text += f" Look at {where}: {why[op]}"
        yield text


def works_at_most(notes: Notes, most: float, what: str) -> Iterator[str]:
    """One sentence if matrix products take more multiplications: something is computed twice, or for nothing."""
    if notes.multiplied > SLACK * most:
        yield f"its matrix products take {notes.multiplied:,} multiplications, and {most:,.0f} are enough. {what}"


def works_at_least(notes: Notes, least: float) -> Iterator[str]:
    """One sentence if matrix products take fewer multiplications: then others, which nobody counts, did their work."""
    if notes.multiplied * SLACK < least:
        yield (
            f"its matrix products take {notes.multiplied:,} multiplications, and {least:,.0f} are needed: write each "
            "product as one (@), because products and sums of single numbers are not counted."
        )


def holds_at_most(notes: Notes, most: float, what: str) -> Iterator[str]:
    """One sentence if more bytes of new tensors lived at once."""
    notes.allowed = most
    if notes.peak > SLACK * most:
        text = f"up to {notes.peak:,} bytes of tensors live at once, and {most:,.0f} are enough. {what}"
        if notes.largest:
            text += f" The largest at that moment: {'; '.join(map(str, notes.largest[:NAMED]))}."
        yield text


def multiplies_at_most(notes: Notes, most: int) -> Iterator[str]:
    """One sentence if more matrix products were computed: with those, messages that nothing hides seem hidden."""
    if notes.products > most:
        yield f"it computes {notes.products} matrix products, and {most} are enough: others hide nothing."


def waits_for_messages(notes: Notes) -> Iterator[str]:
    """One sentence if messages were started that nothing waits for."""
    for call in notes.unwaited[:1]:
        more = f" (nor are {len(notes.unwaited) - 1} others)" if len(notes.unwaited) > 1 else ""
        yield f"the {call} in line {call.line} is never waited for{more}: it may not have happened yet."


def leaves_inputs(notes: Notes) -> Iterator[str]:
    """One sentence if something was changed that the caller still needs."""
    for name, line in notes.changed[:1]:
        where = f"in line {line}, your file" if line else "your file"
        yield f"{where} writes into `{name}`, which the caller still needs: make a new tensor."


def hides(notes: Notes, op: str, but: int = 1) -> Iterator[str]:
    """One sentence if a call is waited for before anything else is computed; not for the last `but` calls."""
    calls = notes.of(op)
    waits = iter(notes.waits)
    for call in calls[: len(calls) - but]:
        line, products = next(waits, (0, notes.products))
        if products <= call.products:
            yield f"line {line} waits for the {op} of line {call.line} at once: compute something in between."
            return
