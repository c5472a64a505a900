"""Rows of a pass in which every record has a gradient of its own, as differential privacy needs, and their memory."""

from __future__ import annotations

GRADIENT_BYTES = 256 << 20
"""Gradients of one micro-batch's rows, where `training.micro_batch_sequences` does not say how many rows it has."""
MOST_ROWS = 32
"""Most rows of a micro-batch of a size that is not given."""


def rows_of(asked: int, trained: int) -> int:
    """Rows of a micro-batch: each has a gradient of every trained parameter in float32."""
    return asked or max(1, min(MOST_ROWS, GRADIENT_BYTES // (4 * max(1, trained))))


def gradient_bytes(trained: int, rows: int) -> int:
    """Bytes of the rows' gradients and of the sum of all records."""
    return 4 * trained * (rows + 1)
