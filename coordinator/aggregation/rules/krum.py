"""Krum and multi-Krum: updates with close neighbours are believed.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries: Byzantine tolerant
gradient descent", NeurIPS 2017, arXiv 1703.02757, section 4: the score of an update is the sum of its squared distances
to its n - f - 2 closest others; Krum takes the one with the least, multi-Krum the mean of the m = n - f with the least.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError


def squared_distances(gram: Array) -> Array:
    """Squared L2 distances between the updates, from their inner products."""
    norms = gram.diagonal()
    return np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0)


def scores(distances: Array, byzantine: int) -> Array:
    """Krum's score of each update; `distances` are squared."""
    neighbours = max(1, len(distances) - byzantine - 2)
    others = [np.sort(np.delete(row, i)) for i, row in enumerate(distances)]
    return np.array([row[:neighbours].sum() for row in others])


def select(gram: Array, byzantine: int, *, multiple: bool) -> list[int]:
    """Indices of the chosen updates, in their order; ties go to the earlier one."""
    count = len(gram)
    if count < 2 * byzantine + 3:
        raise InputError(
            f"Krum with {byzantine} hostile updates needs at least {2 * byzantine + 3} updates (2 f + 3), found {count}"
        )
    ranked = np.argsort(scores(squared_distances(gram), byzantine), kind="stable")
    return sorted(int(i) for i in ranked[: count - byzantine if multiple else 1])
