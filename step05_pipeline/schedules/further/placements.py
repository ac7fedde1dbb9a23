"""Which rank holds which stage, if not rank after rank."""

from step05_pipeline.schedules.actions import Placement, looped


def v_shaped(ranks: int, chunks: int) -> Placement:
    """Down and up again: 0 1 2 3 3 2 1 0. The first and the last stage share a rank."""
    return (tuple(range(ranks)) + tuple(reversed(range(ranks))),)


def bidirectional(ranks: int, chunks: int) -> Placement:
    """Two copies of the model, one in each direction."""
    return tuple(range(ranks)), tuple(reversed(range(ranks)))


PLACEMENTS = {"looped": looped, "v": v_shaped, "bidirectional": bidirectional}
