"""A schedule for --schedule-file: 1F1B with twice the forwards at first, so that messages can take time."""

from step05_pipeline.schedules.standard import expand_pattern, schedule


@schedule("eager-1f1b", in_flight=lambda p, m, v, rank: min(m, 2 * (p - 1 - rank) + 1))
def eager(p, m, v):
    rows = []
    for rank in range(p):
        ahead = min(m, 2 * (p - 1 - rank))
        rows.append(expand_pattern((ahead, "F"), (m - ahead, "F B"), (ahead, "B"), micro_batches=m))
    return rows
