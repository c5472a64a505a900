"""What the facilities' own gradients were in a round, row by row, from the second moments that their updates bring.

A facility returns kept * v + (1 - kept) * g, with v the shared second moments that it began with, g the mean square of
its gradients and kept the share that it states (`facility.exchange.checkpoints.second_moments.kept_share`). Row means
are sent, so the row means of g are what is left. One tensor is read at a time.

A late update began with an earlier v. Once the present one is in its place (`coordinator.aggregation.rebase_moments`),
its g is found like any other; where that cannot be, nothing is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.aggregation.moment_limits import without_received
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.rules.contract import RowSquares
from coordinator.aggregation.updates import Update
from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.second_moments import FOLDER, has_factors, kept_of, rebased_of, rows_in
from facility.exchange.errors import CheckpointError, UpdateRefused


def squared_gradients(aggregation: Aggregation) -> RowsOfUpdates | None:
    """Squared gradients of the round's updates; None where one brings no second moments as row and column means."""
    if aggregation.request.unmasking is not None:
        return None
    if not all(has_factors(update.directory) for update in aggregation.opened):
        return None
    shapes = {name: entry.shape for name, entry in aggregation.floats.items()}
    return RowsOfUpdates(aggregation.opened, aggregation.whole, shapes)


class RowsOfUpdates:
    """A rule's `SquaredGradients`."""

    def __init__(self, updates: Sequence[Update], sent: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`sent`: the model that the round began with; `shapes`: of the federated tensors."""
        self._updates = [
            (one, open_checkpoint(one.directory / FOLDER), kept_of(one.directory), rebased_of(one.directory))
            for one in updates
        ]
        self._received = open_checkpoint(sent.directory / FOLDER) if has_factors(sent.directory) else None
        self._shapes = shapes

    def of(self, tensor: str) -> RowSquares | None:
        """None where an update brings none of it. Raises `UpdateRefused` for what no second moments are."""
        shape = self._shapes[tensor]
        received = None if self._received is None else rows_in(self._received, tensor)
        found = []
        for update, moments, kept, rebased in self._updates:
            try:
                rows = rows_in(moments, tensor)
            except CheckpointError as error:
                raise UpdateRefused(update.facility, f"its second moments cannot be used: {error}") from None
            if rows is None:
                return None
            if len(rows) != (shape[0] if shape else 1):
                raise UpdateRefused(update.facility, f"its second moments of {tensor!r} do not fit its shape {shape}")
            if update.staleness and kept > 0 and tensor not in rebased:  # an unknown part of it was received
                rows = np.zeros_like(rows)
            elif received is not None:
                rows = without_received(rows, received, kept)
            found.append(rows)
        return RowSquares(np.stack(found), math.prod(shape[1:]))
