"""Habits: what an implementation makes of a cluster. Physics (`speed.py`) is the same for all of them.

A profile is six numbers. `published/` fits some of them to runs that somebody has published, and shows how far off they
are on sources that a fit has not seen. The others were set, because runs hardly tell them apart: with network shares
from 0.4 to 0.8, small operations from 1 to 3 or starts from 0 to 100 us, the error on unseen sources is the same.
"""

from typing import NamedTuple

from step08_5d.planning.time.nanotron import NANOTRON, NanotronTerms


class Profile(NamedTuple):
    """Six numbers of an implementation."""

    name: str
    products: float  # share of the speed of a lone product (`Machine.products`) that a layer's products reach
    attention: float  # the same of attention (`Machine.attention`)
    hides: float  # share of a message that hides, if what may run meanwhile takes long enough
    small: float = 2.0  # bytes that small operations move, in those of `speed.small_bytes`
    network: float = 0.6  # share of the data sheet's bandwidths that messages reach
    start: float = 2e-5  # seconds until a message begins to move bytes
    own: NanotronTerms | None = None  # more terms, which describe this implementation only
    gradient: int | None = None  # bytes of an element in sums of gradients; None: as in step 8, those of float32


def widest_gradient(profiles: tuple[Profile, ...]) -> int | None:
    """Return the bytes with which sums of gradients fit by each of these profiles; None: those of step 8."""
    widths = [each.gradient for each in profiles]
    return None if None in widths else max(widths)


PROFILES = {
    each.name: each
    for each in (
        Profile("nanotron", products=0.57, attention=0.13, hides=0.0, network=1.0, own=NANOTRON),
        Profile("fsdp", products=0.87, attention=0.087, hides=0.47),
        Profile("megatron", products=0.78, attention=0.13, hides=0.75),
    )
}
# The fast end of most ranges: small operations are fused completely, messages and attention are as good as any, and
# products so fast that nine tenths of the runs of fsdp and megatron are slower
TUNED = Profile("tuned", products=0.91, attention=0.13, hides=0.75, small=1.0)
RANGE = (*PROFILES.values(), TUNED)  # a time goes from the slowest of these to the fastest
ENDS = (RANGE[0], TUNED)  # which these mostly are
