"""Who talks to whom: the ranks of a run as a grid, and the groups of one of them."""

from common.experiments.tables import print_table
from common.process_groups import Degrees, all_groups

DEGREES = Degrees(dp=2, pp=2, cp=2, tp=2, ep=4, zero_replicas=4, experts=True)
RANK = 5  # whose groups are shown


def grid(quick: bool) -> None:
    """16 ranks on two nodes as a grid, the groups of one rank, and how often a step uses them."""
    rows = []
    for name, groups in all_groups(DEGREES).items():
        mine = next(ranks for ranks in groups if RANK in ranks)
        rows.append((name, ", ".join(map(str, mine))))
    print_table(f"the groups of rank {RANK}", ("", "ranks"), rows)
