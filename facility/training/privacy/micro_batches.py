"""What a rank holds in a pass in which every row has a gradient of its own."""

from __future__ import annotations

import dataclasses

from torch import nn

from facility.exchange.memory.rank import RankLayout
from facility.exchange.memory.records import rows_of
from facility.exchange.messages.settings import TrainingSettings


def layout_of_records(rank: RankLayout, model: nn.Module, settings: TrainingSettings, *, ranks: int) -> RankLayout:
    """The rank's layout with the rows that a pass really has."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rows = rows_of(settings.micro_batch_sequences, trained, settings.batch_sequences / ranks)
    return dataclasses.replace(rank, sequences=rows, records=True)
