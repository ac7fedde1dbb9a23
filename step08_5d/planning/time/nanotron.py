"""Terms that describe one implementation on one cluster: nanotron, as the playbook's authors ran it.

Its runs cannot be told from data sheets. Collectives there become much slower with the number of nodes, and a layer of
a pipeline has a least time that no FLOPs, bytes or launches explain. Three numbers say how, besides those of a profile,
and a table of bandwidths that its authors measured. They were fitted to 1,532 runs (`published/runs.py`); other systems
are faster than all three.
"""

from typing import NamedTuple

from common.costs.networks import NETWORK, bus_bandwidth
from common.costs.vocabulary import Message
from step08_5d.cost import Layout

# Operations of a ring's hop, forward and backward, in those of a layer: a dry run counts 97 and 576
RING_HOP = 0.17


class NanotronTerms(NamedTuple):
    """The defaults are those of all published runs, rounded to two digits.

    Once there were seven. Four of them were powers, fitted to 0.96, 0.64, 0.55 and 0.62. As 1 and three times 1/2 they
    rank unseen runs just as well.
    """

    launch: float = 3.7e-3  # seconds, in which the CPU launches a layer's forward and backward
    far_start: float = 3.4e-4  # seconds until a collective between two nodes begins to move bytes; n times for n + 1
    paced: float = 7.1e-3  # seconds that a pipeline's layer takes at least, with the messages of its tensor ranks

    def collective(self, message: Message, nodes: int, together: int, far: float, gpus: int) -> tuple[float, float]:
        """Return the seconds until a message between nodes begins to move bytes, and its bytes/s.

        It moves them as fast as the playbook's authors measured for whole nodes on cards of 50 GB/s. A group that has
        r = `together` of a node's g = `gpus` ranks reaches (r/g)^(1/2) of that. far: bytes/s of a card.
        """
        op = message.op if message.op in ("all_reduce", "reduce_scatter") else "all_gather"
        whole_nodes = bus_bandwidth(op, nodes * gpus) * far / NETWORK
        return self.far_start * (nodes - 1), whole_nodes * (together / gpus) ** 0.5

    def least(self, layout: Layout, nodes: int) -> float:
        """Seconds that a layer takes at least, forward and backward, for a micro-batch. nodes: of its tensor ranks.

        Without a pipeline, the CPU launches a layer in this time. Of a ring of cp ranks it launches cp hops. In one, it
        grows with the square root of the tensor ranks, and of their nodes.
        """
        least, hops = self.launch, layout.cp if layout.cp > 1 else 0
        if layout.pp > 1:
            least = max(least, self.paced * (layout.tp * nodes) ** 0.5)
        return least * (1 + RING_HOP * hops)


NANOTRON = NanotronTerms()
PAUSE = 0.3  # seconds by which the messages of a late pipeline are late there: the median, printed by `published`


def lateness(layout: Layout, pause: float) -> float:
    """Return the seconds that a step takes more if each message between stages is late by `pause`.

    A stage in the middle exchanges four of them per micro-batch, one after the other; with two stages, each has two.
    All of them count, also those that a bubble might hide: so do the published runs that are late.
    """
    if layout.pp == 1:
        return 0.0
    return pause * 2 * layout.stages * min(2, layout.pp * layout.stages - 1) * layout.micro_batches
