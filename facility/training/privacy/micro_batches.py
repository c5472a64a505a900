"""How many rows a micro-batch has where every row has a gradient of its own, and what memory those need."""

from __future__ import annotations

import dataclasses

from torch import nn

from facility.exchange.messages.settings import TrainingSettings
from facility.training.parallel.arrange import Layout

GRADIENT_BYTES = 256 << 20
"""Gradients of one micro-batch's rows, where `training.micro_batch_sequences` does not say how many rows it has."""
MOST_ROWS = 32
"""Most rows of a micro-batch of a size that is not given."""


def rows_of(asked: int, trained: int) -> int:
    """Rows of a micro-batch: each has a gradient of every trained parameter in float32."""
    return asked or max(1, min(MOST_ROWS, GRADIENT_BYTES // (4 * max(1, trained))))


def memory_of_records(layout: Layout, model: nn.Module, settings: TrainingSettings) -> tuple[Layout, dict[str, int]]:
    """The layout with the rows that a pass really has, and the bytes of their gradients and of the sum of all."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rows = rows_of(settings.micro_batch_sequences, trained)
    shape = dataclasses.replace(layout.shape, micro_batch_sequences=rows)
    return dataclasses.replace(layout, shape=shape), {"gradients of records": 4 * trained * (rows + 1)}
