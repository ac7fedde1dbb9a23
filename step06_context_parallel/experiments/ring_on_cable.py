"""A ring over two nodes, played with gloo's rule: a message begins when its receiver has asked for it.

The question crosses the same cable, and waits there behind the data that other ranks of its node are sending. Ranks
never start at the very same moment, so in most rings one direction of the cable falls a message behind the other.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Iterator

LATE = 2e-3  # seconds by which ranks may differ
TRIALS = 100


def ring_seconds(phase: str, hops: list[float], part: float, per_byte: float, per_node: int) -> float:
    """Median seconds of a layer whose ranks start up to `LATE` apart.

    Args:
        hops: seconds that each hop computes; there are as many ranks.
        part: bytes of a rank's keys, of its values, and of the sums of the gradients of either.
        per_byte: seconds of the cable.
    """
    draw = random.Random(0)
    starts = [[LATE * draw.random() for _ in hops] for _ in range(TRIALS)]
    return statistics.median(Ring(phase, hops, part, per_byte, per_node).play(start) for start in starts)


class Ring:
    """The ranks and the two directions of the cable, event by event. A message is (sender, receiver, name)."""

    def __init__(self, phase: str, hops: list[float], part: float, per_byte: float, per_node: int):
        self.phase, self.hops, self.part, self.per_byte, self.per_node = phase, hops, part, per_byte, per_node
        self.events, self.order = [], itertools.count()  # of events of the same time, the earlier one first
        self.free = {}  # (node, node) -> when that direction of the cable is idle again
        self.sent, self.asked, self.arrived = set(), set(), set()
        self.ranks = [self.rank(index) for index in range(len(hops))]
        self.waits_for = [set() for _ in hops]

    def play(self, starts: list[float]) -> float:
        """Seconds until the last rank has finished."""
        for index, start in enumerate(starts):
            next(self.ranks[index])
            self.at(start, self.go_on, index)
        while self.events:
            now, _, function, argument = heapq.heappop(self.events)
            function(now, argument)
        return now

    def rank(self, index: int) -> Iterator:
        """What a rank does: it yields seconds of computation, or a set of messages to wait for; `now` is sent in."""
        before, after = ((index + step) % len(self.hops) for step in (-1, 1))
        now, sums = (yield set()), set()
        for hop, seconds in enumerate(self.hops):
            keys = self.pass_on(now, before, index, after, ("kv", hop)) if hop < len(self.hops) - 1 else set()
            now = yield seconds
            if self.phase == "backward":
                now = yield sums
                sums = self.pass_on(now, before, index, after, ("sums", hop))
            now = yield keys
        yield sums

    def pass_on(self, now: float, before: int, rank: int, after: int, name: tuple) -> set:
        """Ask for two messages, then send two. Returns those to wait for."""
        messages = {(before, rank, (*name, each)) for each in "kv"}
        for message in sorted(messages):
            self.at(self.cross(now, rank, before, 0), self.ask, message)
        for each in "kv":
            self.sent.add((rank, after, (*name, each)))
            self.begin(now, (rank, after, (*name, each)))
        return messages

    def ask(self, now: float, message: tuple) -> None:
        self.asked.add(message)
        self.begin(now, message)

    def begin(self, now: float, message: tuple) -> None:
        if message in self.sent and message in self.asked:
            self.at(self.cross(now, *message[:2], self.part), self.arrive, message)

    def arrive(self, now: float, message: tuple) -> None:
        self.arrived.add(message)
        receiver = message[1]
        if message in self.waits_for[receiver] and self.waits_for[receiver] <= self.arrived:
            self.go_on(now, receiver)

    def go_on(self, now: float, index: int) -> None:
        """Let a rank run on to its next computation, or to a wait that is not over."""
        self.waits_for[index] = set()
        for wanted in iter(lambda: self.ranks[index].send(now), None):
            if isinstance(wanted, float):
                return self.at(now + wanted, self.go_on, index)
            if not wanted <= self.arrived:
                self.waits_for[index] = wanted
                return None

    def cross(self, now: float, source: int, target: int, size: float) -> float:
        """When something that leaves now will be there: within a node at once."""
        direction = source // self.per_node, target // self.per_node
        if direction[0] == direction[1]:
            return now
        self.free[direction] = max(now, self.free.get(direction, 0.0)) + size * self.per_byte
        return self.free[direction]

    def at(self, time: float, function, argument) -> None:
        heapq.heappush(self.events, (time, next(self.order), function, argument))
