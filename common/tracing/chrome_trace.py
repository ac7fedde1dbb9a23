"""RUN_DIR/trace.json: what every rank recorded, in Chrome's Trace Event Format, for the report and for Perfetto.

A rank is a process of the trace, a lane a thread. Complete events ("X") on the compute lane (thread 0) have the
category `step`, `phase`, `issue` or `wait`; on a group's lane, or its lanes of sends and receives, `communication`.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError

COMPUTE = "compute"


class Event(NamedTuple):
    """A span of one rank. `start` and `end` are marks of the tracer's clock at first, then nanoseconds."""

    step: int
    name: str
    category: str
    lane: str
    start: int
    end: int
    arguments: dict


def chrome_events(rank: int, name: str, events: list[Event], origin: int) -> list[dict]:
    """Return one rank's events (in order of issue) in Chrome's format, in microseconds since `origin`.

    On the lane of a group collectives follow each other as on an NCCL stream: each is drawn from the completion of the
    previous one. `issue_us` and `completion_us` in its arguments are the measured times.
    """
    events = [event._replace(start=(event.start - origin) / 1000, end=(event.end - origin) / 1000) for event in events]
    result, threads, free_at = _arrow_ends(rank, events), {COMPUTE: 0}, {}
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        begin, end, arguments = event.start, event.end, {"step": event.step} | event.arguments
        if event.category == "communication":
            arguments |= {"issue_us": begin, "completion_us": end}
            begin = max(begin, free_at.get(event.lane, begin))
            free_at[event.lane] = end = max(begin, end)
        place = {"pid": rank, "tid": threads.setdefault(event.lane, len(threads)), "ts": begin, "dur": end - begin}
        result.append({"name": event.name, "cat": event.category, "ph": "X", "args": arguments} | place)
    names = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": rank})]
    for lane, thread in threads.items():
        names += [("thread_name", thread, {"name": lane}), ("thread_sort_index", thread, {"sort_index": thread})]
    return result + [{"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args} for kind, tid, args in names]


def _arrow_ends(rank: int, events: list[Event]) -> list[dict]:
    """This rank's ends of the arrows (flow events) that lead from each sent message to where it was received.

    An arrow begins on the sender's compute lane at the issue, and ends on the receiver's at the completion, which on
    gloo is the end of its wait. Messages between two ranks over a group keep their order, so the n-th one sent in a
    step is the n-th one received: both ranks compute the same id without asking each other.
    """
    result, count = [], Counter()
    for event in events:
        if "peer" in event.arguments:
            group, peer, sends = event.arguments["group"], event.arguments["peer"], event.arguments["op"] == "send"
            key = (event.step, group, *((rank, peer) if sends else (peer, rank)))
            count[key] += 1
            digest = hashlib.blake2b(repr((key, count[key])).encode(), digest_size=6).digest()
            arrow = {"name": f"{group} message", "cat": "message", "id": int.from_bytes(digest, "big")}
            if sends:
                arrow |= {"ph": "s", "ts": event.start}
            else:  # Perfetto attaches an end to the span around it: a nanosecond earlier this is still the wait
                arrow |= {"ph": "f", "ts": event.end - 0.001, "bp": "e"}
            result.append(arrow | {"pid": rank, "tid": 0})
    return result


@dataclass
class Trace:
    """A trace as read: the complete events of each rank, the traced steps, and the degrees of the mesh."""

    spans: dict[int, list[dict]]
    steps: list[int]
    degrees: dict[str, int]

    @property
    def ranks(self) -> list[int]:
        """The ranks in the trace."""
        return list(self.spans)

    def intervals(self, rank: int, *categories: str) -> list[tuple[float, float]]:
        """(start, end) in microseconds of all spans of these categories: `communication` from issue to completion."""
        result = []
        for span in self.spans[rank]:
            if span["cat"] in categories:
                times = span["ts"], span["ts"] + span["dur"]
                if span["cat"] == "communication":
                    times = span["args"]["issue_us"], span["args"]["completion_us"]
                result.append(times)
        return result

    def calls(self, rank: int) -> list[dict]:
        """The arguments of every collective and message of a rank: op, group, elements, bytes, step and so on."""
        return [span["args"] for span in self.spans[rank] if span["cat"] == "communication"]

    def window(self, rank: int, step: int) -> tuple[float, float]:
        """Start and end of a step in microseconds. Raises UsageError if the step was not traced."""
        for span in self.spans[rank]:
            if span["cat"] == "step" and span["args"]["step"] == step:
                return span["ts"], span["ts"] + span["dur"]
        raise UsageError(f"step {step} is not in the trace, which has {', '.join(map(str, self.steps)) or 'no steps'}")


def read_trace(run_dir: str | Path) -> Trace:
    """Read the trace of a run. Raises UsageError if RUN_DIR/trace.json is missing or is no trace of this project."""
    path = Path(run_dir) / "trace.json"
    try:
        content = json.loads(path.read_text())
        metadata = content["metadata"]
        spans = {rank: [] for rank in metadata["ranks"]}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                spans[event["pid"]].append(event)
        return Trace(spans, metadata["steps"], metadata["degrees"])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; --trace FIRST:LAST with --run-dir writes it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a trace of this project: {type(error).__name__}: {error}") from None


def time_by_state(*sets: list[tuple[float, float]]) -> dict[tuple[bool, ...], float]:
    """Return for how long each state lasted. A state says for each set of intervals whether one is in progress.

    `time_by_state([(0, 5)], [(3, 9)])` is {(True, False): 3, (True, True): 2, (False, True): 4}.
    """
    edges = sorted(
        (time, index, change)
        for index, intervals in enumerate(sets)
        for start, end in intervals
        for time, change in ((start, 1), (end, -1))
    )
    depth, result = [0] * len(sets), Counter()
    for (time, index, change), (following, _, _) in zip(edges, edges[1:]):
        depth[index] += change
        result[tuple(count > 0 for count in depth)] += following - time
    return result
