"""Experts that are equally busy, so that formulas which assume that are exact."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_in_turn(router, scores: torch.Tensor) -> torch.Tensor:
    """In place of `Router.choose`: the tokens of a rank take experts in turn, so that all of them get equally many."""
    places = torch.arange(scores[..., 0].numel()).view(*scores.shape[:-1], 1) * router.shape.top_k
    return (places + torch.arange(router.shape.top_k)) % router.shape.experts


@contextmanager
def choosing(router: type, evenly: bool = True) -> Iterator[None]:
    """In this block experts are chosen in turn or, if not `evenly`, by the router (a class)."""
    chosen = router.choose
    try:
        router.choose = choose_in_turn if evenly else chosen
        yield
    finally:
        router.choose = chosen
