"""What memory a pass needs in which every row has a gradient of its own."""

from __future__ import annotations

import dataclasses

from torch import nn

from facility.exchange.memory.records import gradient_bytes, rows_of
from facility.exchange.messages.settings import TrainingSettings
from facility.training.parallel.arrange import Layout


def memory_of_records(layout: Layout, model: nn.Module, settings: TrainingSettings) -> tuple[Layout, dict[str, int]]:
    """The layout with the rows that a pass really has, and the bytes of their gradients and of the sum of all."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rows = rows_of(settings.micro_batch_sequences, trained)
    shape = dataclasses.replace(layout.shape, micro_batch_sequences=rows)
    return dataclasses.replace(layout, shape=shape), {"gradients of records": gradient_bytes(trained, rows)}
