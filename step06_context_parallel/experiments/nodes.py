"""Attention across two nodes: what ring, all-gather and Ulysses send over the cable, and what hides behind attention.

The cable is one of `python -m common.nodes`. On two cores four ranks cannot compute side by side, so each (query, key)
pair takes as long as in the experiment `overlap`.
"""

import statistics
from collections import Counter

from common import collectives
from common.drawing.tables import print_table
from common.errors import UsageError
from common.experiments.on_nodes import HEADER, NODES, RANKS, compared_cells, crosses, on_nodes, seconds_on, timed
from common.process_groups import Mesh
from step06_context_parallel.experiments.overlap import BACKWARD, FLAGS, delayed, hops, part_bytes
from step06_context_parallel.experiments.ring_on_cable import ring_seconds
from step06_context_parallel.experiments.tools import MODES, AttentionLayer

CABLES = ("32mbit", "8mbit")  # a hop's keys and values take 0.7 hops, and 2.8
HOP = 0.05  # seconds that the forward of a later hop computes
BATCH = 2
PHASES = {"forward": 1.0, "backward": BACKWARD}


def nodes(quick: bool) -> None:
    """Two nodes, cables of two speeds: bytes that cross them and the time of a layer, of each mode."""
    repeats = 1 if quick else 7
    try:
        alone = on_nodes(NODES, RANKS, layers, repeats)[0]
        found = {cable: on_nodes(NODES, RANKS, layers, repeats, bandwidth=cable) for cable in CABLES}
    except UsageError as error:
        print(f"  left out: {error}")
        return
    for cable, ranks in found.items():
        rows = []
        for key, free in alone.items():
            sent, slow = sum((each[key]["crossing"] for each in ranks[:RANKS]), Counter()), ranks[0][key]
            whole, exposed = sum(sent.values()), predict(*key, sent, cable)
            cells = compared_cells(whole, free["seconds"] + exposed, cable, free, slow)
            waits = exposed, slow["seconds"] - free["seconds"]
            rows.append((", ".join(key), *cells, *(f"{each:.2f}" for each in waits)))
        title = f"{NODES} nodes of {RANKS} ranks, a cable of {cable}, {1e3 * HOP:g} ms a hop in the forward, "
        title += f"{1e3 * BACKWARD * HOP:g} in the backward: sent by a node in one layer, and its time"
        print_table(title, (*HEADER, "s waited: predicted", "measured"), rows)


def predict(mode: str, phase: str, sent: Counter, cable: str) -> float:
    """Predicted seconds that ranks wait for the cable.

    Args:
        sent: bytes of a node, by collective.
    """
    computes = [PHASES[phase] * seconds for seconds in hops(HOP)]
    if mode == "ring":
        seconds = ring_seconds(phase, computes, BATCH * part_bytes(), seconds_on(cable, 1), RANKS)
        return seconds - sum(computes)
    on_cable = {op: seconds_on(cable, number) for op, number in sent.items()}
    behind = computes[0] if mode == "allgather" else 0  # its own block: all that can be computed without the others'
    return max(0, on_cable.pop("all_gather", 0) - behind) + sum(on_cable.values())


def layers(mesh: Mesh, repeats: int) -> dict[tuple[str, str], dict]:
    """On a rank: for each (mode, phase) of one layer its time, and the bytes that its node sent.

    `crossing` counts what theory says that this rank's part of the bytes is, by collective.
    """
    found = {}
    for mode, flags in MODES.items():
        layer = AttentionLayer(mesh, **FLAGS | flags | {"micro_batch": BATCH, "global_batch": BATCH})
        with delayed(None, HOP):
            for phase in PHASES:
                with collectives.record() as calls:
                    getattr(layer, phase)()
                crossing = Counter()
                for call in calls:
                    crossing[call.op] += crosses(call, layer.mesh)
                found[mode, phase] = {"crossing": crossing}
            times = timed(mesh, [layer.forward, layer.backward], repeats, statistics.median)  # a ring has two outcomes
            for phase, result in zip(PHASES, times):
                found[mode, phase] |= result
    return found
