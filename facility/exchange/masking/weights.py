"""What each facility counts in a mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def cap_weights(weights: Sequence[float], most: float) -> list[float]:
    """Shares of which none is above `most`, the rest in their proportions; they sum to 1.

    With so few updates that all would exceed it, the shares are equal; what is left for weights of 0 alone is theirs in
    equal parts.
    """
    if most * len(weights) <= 1:
        return [1 / len(weights)] * len(weights)
    over: set[int] = set()
    while True:
        left = 1 - most * len(over)
        mass = math.fsum(weight for i, weight in enumerate(weights) if i not in over)
        rest = len(weights) - len(over)
        shares = [
            most if i in over else left * (weight / mass if mass else 1 / rest) for i, weight in enumerate(weights)
        ]
        more = {i for i, share in enumerate(shares) if share > most} - over
        if not more:
            return shares
        over |= more


def scale_weights(claims: Mapping[str, float], most: float) -> dict[str, float]:
    """Weights of a roster, the largest of them 1, from what its members claim."""
    names = sorted(claims)
    total = math.fsum(claims.values())
    shares = cap_weights([claims[name] / total for name in names], most)
    return {name: share / max(shares) for name, share in zip(names, shares, strict=True)}
