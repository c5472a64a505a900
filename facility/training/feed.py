"""From a prepared dataset to the batches that one rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.settings import TrainingSettings

from .order import SampleOrder, slice_of
from .seeds import derive
from .tasks import Batch, Task


class Feed:
    """This rank's share of every batch, the same batch for any number of readers."""

    def __init__(
        self,
        dataset: Any,
        task: Task,
        settings: TrainingSettings,
        *,
        seed: int,
        facility: str,
        reader: int,
        readers: int,
    ) -> None:
        self.train, self.validation = dataset.split("train"), dataset.split("validation")
        self.task, self.settings, self.seed = task, settings, seed
        self.reader, self.readers = reader, readers
        if settings.batch_sequences < readers:
            raise ConfigurationError(
                f"training.batch_sequences is {settings.batch_sequences}, but {readers} ranks read data: "
                "each needs at least one sequence a step; raise the batch or use fewer ranks"
            )
        if not len(self.train) or not len(self.validation):
            raise InputError(
                f"the dataset holds {len(self.train)} training and {len(self.validation)} validation blocks; "
                "both need at least one: prepare more text or shorter blocks"
            )
        self.order = SampleOrder(sequences=len(self.train), seed=seed, facility=facility)
        largest = -(-settings.batch_sequences // readers)
        self.micro = settings.micro_batch_sequences or largest
        self.micro_batches = -(-largest // self.micro)

    def step(self, position: int) -> list[Batch | None]:
        """Micro-batches of the batch that begins at sequence `position`; None where this reader has one fewer."""
        count = self.settings.batch_sequences
        share = slice_of(np.arange(count), self.reader, self.readers)
        indices = self.order.take(position, count)
        batches: list[Batch | None] = []
        for piece in np.array_split(share, self.micro_batches):
            seeds = [derive(self.seed, "draw", position + int(i)) for i in piece]
            batches.append(self.task.batch(self.train, indices[piece], seeds) if len(piece) else None)
        # np.array_split puts the larger pieces first, so the first micro-batch of every reader holds a sequence.
        return batches

    def evaluation(self) -> Iterator[Batch | None]:
        """This reader's share of the validation split, in as many pieces as every other reader's."""
        total = len(self.validation)
        if self.settings.evaluation_sequences:
            total = min(total, self.settings.evaluation_sequences)
        rounds = -(-total // (self.micro * self.readers))
        for number in range(rounds):
            whole = np.arange(number * self.micro * self.readers, min(total, (number + 1) * self.micro * self.readers))
            share = whole[self.reader * self.micro : (self.reader + 1) * self.micro]
            if number == 0 and not len(
                share
            ):  # fewer sequences than readers: keep pace with one that counts for nothing
                batch = self.task.batch(self.validation, whole[:1], [0])
                batch.targets.fill_(-100)
                yield batch
                continue
            seeds = [derive(self.seed, "draw-validation", int(i)) for i in share]
            yield self.task.batch(self.validation, share, seeds) if len(share) else None
