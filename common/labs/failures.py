"""Why a case has no results, from what its ranks report."""

import re

from common.errors import LOST_PEER, first_line
from common.labs.notes import Notes
from common.labs.written import Failure

DIED = "died without a word (killed, out of memory, os._exit, or by a message of another size than it waited for)"


def describe(found: dict[int, Failure], finished: dict[int, Notes], ranks: int) -> str:
    """The first cause of a failure in a sentence: no rank that has only lost its peer, and of a hang all ranks."""
    if not found:
        return f"a rank {DIED}."
    hangs = {rank: failure for rank, failure in found.items() if failure.kind == "hangs"}
    causes = {rank: each for rank, each in found.items() if not (each.kind == "raised" and _lost(each.text))}
    if hangs and len(causes) == len(hangs):
        where = [f"rank {rank} {failure.text}" for rank, failure in sorted(hangs.items())]
        where += [_ended(rank, notes, where) for rank, notes in finished.items() if rank not in hangs]
        return "it does not end. " + "; ".join(where) + "."
    dead = [rank for rank in range(ranks) if rank not in found and rank not in finished]
    if not causes and dead:
        lost = "; ".join(f"rank {rank} {failure.text}" for rank, failure in sorted(found.items()))
        return f"rank {dead[0]} {DIED}. Others have lost it: {lost}"
    rank, cause = min((causes or found).items(), key=lambda item: (item[1].kind == "hangs", item[1].when))
    return cause.text if cause.kind in ("unwritten", "reads the reference") else f"rank {rank} {cause.text}"


def _ended(rank: int, notes: Notes, where: list[str]) -> str:
    """Of a rank that has come to its end while others wait, as `where` says of each of them."""
    ended = f"rank {rank} has come to its end"
    if notes.unwaited:
        return f"{ended}; but never waited for its {notes.unwaited[0]}, line {notes.unwaited[0].line}"
    for kind, does in (("send", "to"), "receives"), (("receive", "from"), "sends"):
        if any(re.search(rf"^rank \d+ waits .*{kind[0]} of \S+ bytes {kind[1]} rank {rank}\b", each) for each in where):
            return f"{ended} and never {does} it"
    return ended


def plain_line(error: BaseException) -> str:
    """The first line of an error's message; of a lost rank, without gloo's place in its source, and its advice."""
    return re.sub(r"^\[\S+:\d+\] |\. .*", "", line) if _lost(line := first_line(error)) else line


def _lost(text: str) -> bool:
    return re.search(LOST_PEER, text) is not None
