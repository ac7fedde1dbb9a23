"""RUN_DIR/trace.json: made from what every rank recorded; the report and Perfetto read it.

It is in Chrome's Trace Event Format (JSON object form). Complete events ("X") have one of these categories:
`step`, `phase`, `span`, `issue` and `wait` on the compute lane (thread 0), `communication` on the lane of a
group. The top-level `metadata` holds what else the report needs: ranks, steps, degrees, groups, clock.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError

COMPUTE = "compute"


def merge(parts: list[dict]) -> dict:
    """One trace from the parts that the ranks recorded. Times become microseconds since the first event."""
    everything = [event for part in parts for event in part["events"]]
    start = min((event["start"] for event in everything), default=0)
    lanes = dict.fromkeys([COMPUTE] + [event["lane"] for event in everything])  # in order of appearance
    threads = {lane: number for number, lane in enumerate(lanes)}

    def microseconds(nanoseconds: int) -> float:
        return (nanoseconds - start) / 1000

    result = []
    for part in parts:
        rank = part["rank"]
        used = dict.fromkeys([COMPUTE] + [event["lane"] for event in part["events"]])
        result += _names(rank, part["place"], {lane: threads[lane] for lane in used})
        for event in sorted(part["events"], key=lambda event: (event["start"], -event["end"])):
            made = {
                "name": event["name"],
                "cat": event["cat"],
                "ph": "X",
                "pid": rank,
                "tid": threads[event["lane"]],
            }
            begin, end = event["start"], event["end"]
            arguments = dict(event["args"])
            if event["cat"] == "communication":
                arguments |= {"issue_us": microseconds(begin), "completion_us": microseconds(end)}
                begin = max(begin, used[event["lane"]] or begin)  # until now the lane shows the one issued before
                used[event["lane"]] = end = max(begin, end)
            made |= {"ts": microseconds(begin), "dur": (end - begin) / 1000, "args": arguments}
            result.append(made)
    arrows, unpaired = _arrows(parts, microseconds)
    metadata = {
        "ranks": [part["rank"] for part in parts],
        "steps": sorted({event["args"]["step"] for event in everything}),
        "clock": parts[0]["clock"],
        "degrees": parts[0]["degrees"],
        "groups": {str(part["rank"]): part["groups"] for part in parts},
        "start_ns": start,
        "unpaired_messages": unpaired,
    }
    return {"traceEvents": result + arrows, "displayTimeUnit": "ms", "metadata": metadata}


def _names(rank: int, place: dict[str, int], threads: dict[str, int]) -> list[dict]:
    """Names and order of a rank's process and of its lanes."""
    where = ", ".join(f"{axis} {index}" for axis, index in place.items())
    values = [("process_name", 0, {"name": f"rank {rank} ({where})" if where else f"rank {rank}"})]
    values += [("process_sort_index", 0, {"sort_index": rank})]
    for lane, thread in threads.items():
        values += [
            ("thread_name", thread, {"name": lane}),
            ("thread_sort_index", thread, {"sort_index": thread}),
        ]
    return [{"name": name, "ph": "M", "pid": rank, "tid": thread, "args": value} for name, thread, value in values]


def _arrows(parts: list[dict], microseconds) -> tuple[list[dict], int]:
    """Flow events, and how many messages lack one end (it lies outside the traced steps).

    The n-th message that a rank sent to another over a group in a step is the n-th that the other received.
    An arrow leads from the sender's compute lane at the issue to the receiver's at the end of its wait.
    """
    sent, received = defaultdict(list), defaultdict(list)
    for part in parts:
        rank = part["rank"]
        for event in sorted(part["events"], key=lambda event: event["start"]):
            arguments = event["args"]
            if event["cat"] == "communication" and "peer" in arguments:
                step, group, peer = arguments["step"], arguments["group"], arguments["peer"]
                if arguments["op"] == "send":
                    sent[step, group, rank, peer].append(event["start"])
                else:
                    received[step, group, peer, rank].append(event["ready"])
    result, unpaired = [], 0
    for key in sent | received:
        step, group, source, target = key
        unpaired += abs(len(sent[key]) - len(received[key]))
        for begin, end in zip(sent[key], received[key]):
            shared = {"name": f"{group} message", "cat": "message", "id": len(result) // 2 + 1, "tid": 0}
            begin, end = (
                microseconds(begin),
                microseconds(end) - 0.001,
            )  # a nanosecond before: still within the wait
            result.append(shared | {"ph": "s", "pid": source, "ts": begin, "args": {"step": step}})
            result.append(shared | {"ph": "f", "pid": target, "ts": end, "bp": "e", "args": {"step": step}})
    return result, unpaired


@dataclass
class Trace:
    """A trace as read: `spans` are the complete events by rank, `metadata` is as `merge` wrote it."""

    spans: dict[int, list[dict]]
    metadata: dict

    @property
    def steps(self) -> list[int]:
        """Numbers of the traced steps."""
        return self.metadata["steps"]

    @property
    def ranks(self) -> list[int]:
        """The ranks that it holds."""
        return self.metadata["ranks"]

    def intervals(self, rank: int, *categories: str) -> list[tuple[float, float]]:
        """(start, end) in microseconds of all spans of these categories on the compute lane.

        `communication`, on the lanes of the groups, counts from issue to completion.
        """
        result = []
        for span in self.spans[rank]:
            if span["cat"] == "communication" and "communication" in categories:
                result.append((span["args"]["issue_us"], span["args"]["completion_us"]))
            elif span["cat"] in categories and span["tid"] == 0:
                result.append((span["ts"], span["ts"] + span["dur"]))
        return result

    def window(self, rank: int, step: int) -> tuple[float, float]:
        """Start and end of a step in microseconds. Raises UsageError when it was not traced."""
        for span in self.spans[rank]:
            if span["cat"] == "step" and span["args"]["step"] == step:
                return span["ts"], span["ts"] + span["dur"]
        raise UsageError(f"step {step} is not in the trace, which has {', '.join(map(str, self.steps)) or 'no steps'}")


def read_trace(run_dir: str | Path) -> Trace:
    """The trace of a run. Raises UsageError when RUN_DIR/trace.json is missing or something else."""
    path = Path(run_dir) / "trace.json"
    try:
        content = json.loads(path.read_text())
        metadata = content["metadata"]
        spans = {rank: [] for rank in metadata["ranks"]}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                spans[event["pid"]].append(event)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; --trace FIRST:LAST with --run-dir writes it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (RecursionError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a trace of this project: {type(error).__name__}: {error}") from None
    return Trace(spans, metadata)
