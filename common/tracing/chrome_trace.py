"""RUN_DIR/trace.json: what every rank recorded, in Chrome's Trace Event Format, for the report and for Perfetto.

A rank is a process of the trace, a lane a thread. Complete events ("X") on the compute lane (thread 0) have the
category `step`, `phase`, `issue` (the rank starts a collective) or `wait` (it is blocked until one has completed); on a
group's lane, or its lanes of sends and receives, `communication`.

A message that is awaited does not travel before it is sent, nor an all-reduce before its last rank has issued it. So a
communication *starts* when all of its ranks have issued it, which no rank knows alone: the ranks' events are joined by
the `id` of each collective or message. What a rank waits before that, it waits for other ranks and not for the network.
"""

import itertools
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


def chrome_events(ranks: dict[int, tuple[str, list[Event]]]) -> list[dict]:
    """Return what is known of each rank, its name and its events, in Chrome's format, in microseconds from the first.

    A `communication` event lasts from its issue on this rank to its completion; its arguments hold its `id` and the
    `link_us` that the simulated link took, or 0. It is drawn from its start, and on the lane of a group not before the
    completion of the previous one, as on an NCCL stream. `issue_us`, `start_us` and `completion_us` know no lane.
    """
    every = [event for _, events in ranks.values() for event in events]
    origin, issued_by_all = min((event.start for event in every), default=0), {}
    for event in every:
        if event.category == "communication":
            key = event.arguments["id"]
            issued_by_all[key] = max(issued_by_all.get(key, 0), event.start)
    result = []
    for rank, (name, events) in ranks.items():
        threads, free_at = {COMPUTE: 0}, {}
        for event in sorted(events, key=lambda event: (event.start, -event.end)):
            begin, end = (event.start - origin) / 1000, (event.end - origin) / 1000
            arguments = {"step": event.step} | event.arguments
            if event.category == "communication":
                ready = (issued_by_all[arguments["id"]] - origin) / 1000
                started = max(begin, min(ready, end - arguments["link_us"]))
                arguments |= {"issue_us": begin, "start_us": started, "completion_us": end}
                begin = max(started, free_at.get(event.lane, started))
                free_at[event.lane] = end = max(begin, end)
            place = {"pid": rank, "tid": threads.setdefault(event.lane, len(threads)), "ts": begin, "dur": end - begin}
            result.append({"name": event.name, "cat": event.category, "ph": "X", "args": arguments} | place)
        names = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": rank})]
        for lane, thread in threads.items():
            names += [("thread_name", thread, {"name": lane}), ("thread_sort_index", thread, {"sort_index": thread})]
        result += [{"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args} for kind, tid, args in names]
    return result


@dataclass
class Trace:
    """A trace as read: the complete events of each rank, the traced steps, and the degrees of the mesh."""

    spans: dict[int, list[dict]]
    steps: list[int]
    degrees: dict[str, int]

    @property
    def ranks(self) -> list[int]:
        return list(self.spans)

    def intervals(self, rank: int, *categories: str) -> list[tuple[float, float]]:
        """(start, end) in microseconds of all spans of these categories: `communication` from start to completion."""
        result = []
        for span in self.spans[rank]:
            if span["cat"] in categories:
                times = span["ts"], span["ts"] + span["dur"]
                if span["cat"] == "communication":
                    times = span["args"]["start_us"], span["args"]["completion_us"]
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
        content = json.loads(path.read_text(encoding="utf-8"))
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
    edges = [(start, index, 1) for index, intervals in enumerate(sets) for start, _ in intervals]
    edges += [(end, index, -1) for index, intervals in enumerate(sets) for _, end in intervals]
    depth, result = [0] * len(sets), Counter()
    for (time, index, change), (following, _, _) in itertools.pairwise(sorted(edges)):
        depth[index] += change
        result[tuple(count > 0 for count in depth)] += following - time
    return result
