"""Attention across two nodes: what ring, all-gather and Ulysses send over the cable, and what hides behind attention.

On two cores four ranks cannot compute side by side, so each (query, key) pair takes as long as in the experiment
`overlap`.
"""

import statistics

from common.experiments.on_nodes import Found, Workload, two_nodes
from common.process_groups import Mesh
from step06_context_parallel.experiments.overlap import BACKWARD, FLAGS, SlowKernels, hops
from step06_context_parallel.experiments.tools import MODES, AttentionLayer

CABLES = ("32mbit", "8mbit")  # a hop's keys and values take 0.7 hops, and 2.8
HOP = 0.05  # seconds that the forward of a later hop computes
BATCH = 2
PHASES = {"forward": 1.0, "backward": BACKWARD}


def nodes(quick: bool) -> None:
    """Two nodes, cables of two speeds: bytes that cross them and the time of a layer, of each mode."""
    cases = {f"{mode}, {phase}": (mode, phase) for mode in MODES for phase in PHASES}
    for cable in CABLES:  # medians: a ring has two outcomes
        two_nodes("one layer", layer, cases, predict, cable, repeats=1 if quick else 7, of=statistics.median)


def layer(mesh: Mesh, case: tuple[str, str]) -> Workload:
    """On a rank: one phase of a layer in one mode."""
    mode, phase = case
    flags = FLAGS | MODES[mode] | {"micro_batch": BATCH, "global_batch": BATCH}
    attention = AttentionLayer(mesh, SlowKernels(HOP), **flags)
    before = None if phase == "forward" else attention.forward
    return Workload(getattr(attention, phase), attention.mesh, before)


def predict(case: tuple[str, str], found: Found) -> float:
    """Seconds: what a layer takes without a limit, and what of its messages is exposed."""
    mode, phase = case
    computes, on_cable = [PHASES[phase] * seconds for seconds in hops(HOP)], dict(found.on_cable)
    if mode == "ring":  # each hop's messages behind its computation; in the backward, the way home behind nothing
        messages = len(computes) - 1 + (len(computes) if phase == "backward" else 0)
        each = sum(on_cable.values()) / messages
        later = [each * (1 + (phase == "backward" and hop > 0)) for hop in range(len(computes) - 1)]
        exposed = sum(max(0.0, sent - seconds) for sent, seconds in zip(later, computes))
        return found.free + exposed + (each if phase == "backward" else 0.0)
    behind = computes[0] if mode == "allgather" else 0.0  # its own block: all that needs nothing of the others
    return found.free + max(0.0, on_cable.pop("all_gather", 0.0) - behind) + sum(on_cable.values())
