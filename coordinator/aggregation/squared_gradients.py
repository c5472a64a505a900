"""What the facilities' own gradients were in a round, row by row, from the second moments that their updates bring.

A facility returns kept * v + (1 - kept) * g, with v the shared second moments that it began with and g the mean square
of its gradients (`coordinator.aggregation.moment_limits`). Of g the row means are known, as those of v are. Each
facility's are held to the limits of `coordinator.aggregation.second_moments` before. One tensor is read at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coordinator.aggregation.moment_limits import kept_by_all
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.rules.contract import RowSquares
from coordinator.aggregation.second_moments import Limits, limits_of
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.second_moments import FOLDER, Factors, has_factors, kept_of, rows_in


class RowsOfUpdates:
    """A rule's `SquaredGradients`."""

    def __init__(self, directories: Sequence[Path], limits: Limits, shapes: dict[str, tuple[int, ...]]) -> None:
        """`shapes`: of the federated tensors."""
        self._files = [open_checkpoint(directory / FOLDER) for directory in directories]
        self._kept = kept_by_all([kept_of(directory) for directory in directories])
        self._limits, self._shapes = limits, shapes

    def of(self, tensor: str) -> RowSquares | None:
        found = [rows_in(one, tensor) for one in self._files]
        if tensor in self._limits.apart or any(rows is None for rows in found):
            return None
        shape = self._shapes[tensor]
        rows = [self._limits.held(tensor, Factors(one)).rows for one in found if one is not None]
        values = np.stack([self._fresh(tensor, one) for one in rows])
        return RowSquares(values, max(1, math.prod(shape) // max(1, values.shape[1])))

    def _fresh(self, tensor: str, rows: Array) -> Array:
        """Without the share of those that the round began with."""
        before = self._limits.received.get(tensor)
        if before is None or not self._kept < 1:
            return rows
        return np.maximum(0.0, (rows - self._kept * before.rows) / (1 - self._kept))


def squared_gradients(aggregation: Aggregation) -> RowsOfUpdates | None:
    """Those of the round; None where an update brings no second moments as row and column means.

    Raises `UpdateRefused`.
    """
    opened = aggregation.opened
    if aggregation.request.unmasking is not None or not all(has_factors(one.directory) for one in opened):
        return None
    limits = limits_of(aggregation)
    received = {name: Factors(one.rows) for name, one in limits.received.items()}
    shapes = {name: entry.shape for name, entry in aggregation.floats.items()}
    return RowsOfUpdates([one.directory for one in opened], dataclasses.replace(limits, received=received), shapes)
