"""How long several things happened at the same time, from intervals (start, end) of each."""

from collections import Counter


def time_by_state(*sets: list[tuple[float, float]]) -> dict[tuple[bool, ...], float]:
    """Return for how long each state lasted; a state says for each set whether one of its intervals is in progress.

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
