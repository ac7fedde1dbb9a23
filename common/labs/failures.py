"""Why a case has no results, from what its ranks report."""

import re
from collections.abc import Collection

from common.errors import LOST_PEER, first_line
from common.labs.notes import Notes, SeenCall
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
        of = {rank: each.calls for rank, each in hangs.items()} | {rank: each.calls for rank, each in finished.items()}
        return "it does not end. " + "; ".join(where) + "." + _first_difference(of, finished)
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


def _first_difference(of: dict[int, list[SeenCall]], finished: Collection[int]) -> str:
    """The first collective in which the ranks of a group differ, given what each has started; empty if there is none.

    Those of one rank may go on for a while with later calls of others, and hang much later than the mistake.
    """
    for members in {call.members: 0 for calls in of.values() for call in calls if call.peer is None}:
        calls = {
            rank: [each for each in mine if each.members == members and each.peer is None]
            for rank, mine in of.items()
            if rank in members
        }
        lines = {rank: {each.line for each in mine} for rank, mine in calls.items()}
        for number in range(max(map(len, calls.values()), default=0)):
            at = {rank: mine[number] for rank, mine in calls.items() if number < len(mine)}
            ended = [rank for rank in calls if rank not in at and rank in finished]
            one, *others = at.values()
            elsewhere = any(
                mine.line != their.line and mine.line in lines[other]  # and no two branches of one `if`
                for mine in at.values()
                for other, their in at.items()
            )
            if ended or elsewhere or any(_what(each) != _what(one) for each in others):
                begins: dict[str, list[int]] = {}  # what is begun -> by whom
                for rank, call in at.items():
                    begins.setdefault(f"{_what(call)} in line {call.line}", []).append(rank)
                texts = [f"{_named(who)}: {what}" for what, who in begins.items()]
                texts += [f"{_named(ended)}: none"] if ended else []
                first = f"Of what {_named(members)} begin together, number {number + 1} is the first that differs"
                return f" {first}. {'; '.join(texts)}."
    return ""


def _what(call: SeenCall) -> str:
    """What must be the same on all ranks of a group. Each may send as much as it likes in an all-to-all."""
    return str(call) if call.op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast") else call.op


def _named(ranks: Collection[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def plain_line(error: BaseException) -> str:
    """The first line of an error's message; of a lost rank, without gloo's place in its source, and its advice."""
    return re.sub(r"^\[\S+:\d+\] |\. .*", "", line) if _lost(line := first_line(error)) else line


def _lost(text: str) -> bool:
    return re.search(LOST_PEER, text) is not None
