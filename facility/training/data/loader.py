"""From a prepared dataset to the batches that one rank reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from facility.dataset import PreparedDataset
from facility.exchange.errors import InputError
from facility.exchange.grid import micro_batches_of
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.seeds import derive_seed
from facility.sync.runtime.sampling import ReplicaOrder
from facility.training.data.order import SampleOrder, evenly_spread
from facility.training.data.tasks import IGNORED, Batch, Task


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a batch is cut among the data-parallel ranks."""

    bounds: tuple[int, ...]
    """Reader r takes sequences bounds[r] to bounds[r + 1] of every batch."""
    micro_batch_sequences: int
    micro_batches: tuple[int, ...]
    """Forward passes a step, by data-parallel rank; the same for all unless a plan says otherwise (pipelines only)."""
    fixed: bool
    """Every micro-batch holds exactly `micro_batch_sequences`; what is missing counts for nothing (pipelines)."""

    @property
    def batch_sequences(self) -> int:
        return self.bounds[-1]


def even_shape(settings: TrainingSettings, data_ranks: int, *, stages: int, interleaved: bool) -> Shape:
    """An equal share for every data-parallel rank, in micro-batches as `micro_batches_of` says."""
    batch = settings.batch_sequences
    micro, count = micro_batches_of(settings, data_ranks, stages, interleaved=interleaved)
    return Shape(
        bounds=tuple(batch * r // data_ranks for r in range(data_ranks + 1)),
        micro_batch_sequences=micro,
        micro_batches=(count,) * data_ranks,
        fixed=stages > 1,
    )


class DataLoader:
    """This rank's share of every batch, the same batch for any number of data-parallel ranks."""

    def __init__(
        self,
        dataset: PreparedDataset,
        task: Task,
        shape: Shape,
        *,
        seed: int,
        facility: str,
        evaluation_sequences: int,
        data_rank: int,
        data_ranks: int,
        apart: ReplicaOrder | None = None,
    ) -> None:
        self.dataset, self.task, self.shape, self.seed = dataset, task, shape, seed
        self.data_rank, self.data_ranks, self.apart = data_rank, data_ranks, apart
        self.evaluates = (data_rank, data_ranks)
        """Which share of the validation split this rank takes, of how many."""
        sequences, validation = len(dataset.split("train")), len(dataset.split("validation"))
        if not sequences or not validation:
            raise InputError(
                f"{dataset.directory} holds {sequences} training and {validation} validation blocks; "
                "both need at least one: prepare more text or shorter blocks"
            )
        self.order = SampleOrder(sequences=sequences, seed=seed, facility=facility)
        self.evaluation_sequences = evaluation_sequences
        self.evaluated = min(validation, evaluation_sequences or validation)
        self.asked = evenly_spread(validation, self.evaluated)
        """The validation sequences that are evaluated."""

    def _batch(self, split: str, indices: Sequence[int] | np.ndarray, seeds: list[int]) -> Batch:
        """Sequences of a split; an empty share becomes one sequence that counts for nothing."""
        size = self.shape.micro_batch_sequences if self.shape.fixed else max(1, len(indices))
        blank = size - len(indices)
        filled = np.concatenate([np.asarray(indices, dtype=np.int64), np.zeros(blank, dtype=np.int64)])
        batch = self.task.batch(self.dataset, split, filled, seeds + [0] * blank)
        if blank:
            batch.targets[len(indices) :] = IGNORED
        return batch

    def step(self, position: int) -> list[Batch]:
        """Micro-batches of the batch that begins at sequence `position`."""
        indices = self._indices(position)
        share = np.arange(self.shape.bounds[self.data_rank], self.shape.bounds[self.data_rank + 1])
        batches = []
        for piece in np.array_split(share, self.shape.micro_batches[self.data_rank]):
            seeds = [derive_seed(self.seed, "draw", position + int(i)) for i in piece]
            batches.append(self._batch("train", indices[piece], seeds))
        return batches

    def _indices(self, position: int) -> np.ndarray:
        """The batch's sequences; a replica with an order of its own fills its part of the batch from that."""
        if self.apart is None:
            return self.order.take(position, self.shape.batch_sequences)
        shards = self.data_ranks // self.apart.replicas
        first = self.shape.bounds[self.apart.replica * shards]
        count = self.shape.bounds[(self.apart.replica + 1) * shards] - first
        indices = np.zeros(self.shape.batch_sequences, dtype=np.int64)
        indices[first : first + count] = self.apart.take(position * count // self.shape.batch_sequences, count)
        return indices

    def evaluation(self) -> Iterator[Batch]:
        """This rank's share of the validation split, in as many pieces as that of every other."""
        micro, rank, ranks = self.shape.micro_batch_sequences, *self.evaluates
        for begin in range(0, self.evaluated, micro * ranks):
            mine = self.asked[begin + rank * micro : begin + (rank + 1) * micro].tolist()
            yield self._batch("validation", mine, [derive_seed(self.seed, "validation", i) for i in mine])

    def blocks(self) -> Iterator[tuple[int, Batch]]:
        """Validation blocks of this rank, one at a time, with number; one past the last comes with an empty batch."""
        rank, ranks = self.evaluates
        for begin in range(0, self.evaluated, ranks):
            mine = self.asked[begin + rank : begin + rank + 1].tolist()
            yield begin + rank, self._batch("validation", mine, [derive_seed(self.seed, "validation", i) for i in mine])

    def over(self, dataset: PreparedDataset) -> DataLoader:
        """A loader of this rank's share of the validation split of another dataset."""
        other = copy.copy(self)
        other.dataset = dataset
        blocks = len(dataset.split("validation"))
        other.evaluated = min(blocks, self.evaluation_sequences or blocks)
        other.asked = evenly_spread(blocks, other.evaluated)
        return other
