"""Which sequences are read: every one once an epoch, whatever reads them, and of validation data some of each part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from facility.sync.runtime.sampling import ReplicaOrder
from facility.training.data.loader import DataLoader, Shape
from facility.training.data.order import evenly_spread
from facility.training.data.tasks import IGNORED, Batch

SEQUENCES = 37


class Numbers:
    """A task whose targets are the numbers of the sequences."""

    def batch(self, dataset: Any, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        numbers = torch.from_numpy(np.asarray(indices, dtype=np.int64).copy())[:, None]
        return Batch(inputs={"input_ids": numbers.clone()}, targets=numbers)


def loader(
    ranks: int, rank: int, batch: int, micro: int, *, evaluated: int = 0, apart: ReplicaOrder | None = None
) -> DataLoader:
    shape = Shape(
        bounds=tuple(batch * r // ranks for r in range(ranks + 1)),
        micro_batch_sequences=micro,
        micro_batches=(-(-batch // (ranks * micro)),) * ranks,
        fixed=False,
    )
    dataset: Any = SimpleNamespace(split=lambda name: np.zeros((SEQUENCES, 4)), directory=Path("data"))
    task: Any = Numbers()
    more: dict[str, Any] = {"evaluation_sequences": evaluated, "data_rank": rank, "data_ranks": ranks}
    return DataLoader(dataset, task, shape, seed=3, facility="here", apart=apart, **more)


def read(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch.targets[:, 0] if number != IGNORED]


@pytest.mark.parametrize("plan", [[(1, 4, 2)] * 37, [(2, 4, 1)] * 10 + [(3, 5, 2)] * 14 + [(4, 38, 3)]])
def test_every_sequence_once_an_epoch_whatever_the_ranks(plan: list[tuple[int, int, int]]):
    """Jobs of one round may have another number of ranks, and rounds another batch: the position goes on."""
    position, seen = 0, []
    for ranks, batch, micro in plan:
        for rank in range(ranks):
            seen += read(loader(ranks, rank, batch, micro).step(position))
        position += batch
    epochs, more = divmod(position, SEQUENCES)
    counts = Counter(Counter(seen)[number] for number in range(SEQUENCES))
    assert len(seen) == position and counts == Counter({epochs: SEQUENCES - more, epochs + 1: more})


@pytest.mark.parametrize("replica", [0, 1])
def test_an_order_of_a_replicas_own_goes_on_where_it_was_whatever_the_batch_becomes(replica: int):
    """Where a round had another batch than those before, it began some sequences earlier, which were read again."""
    apart = ReplicaOrder(policy="strided", sequences=SEQUENCES, replica=replica, replicas=2, seed=3)
    position, seen = 0, []
    for batch in [4] * 3 + [10] * 5 + [6] * 7:
        seen += read(loader(2, replica, batch, 1, apart=apart).step(position))
        position += batch
    assert seen == apart.take(0, position // 2).tolist()


@pytest.mark.parametrize("evaluated", [0, 5, 36, 37, 90])
def test_a_part_of_the_validation_data_is_spread_over_all(evaluated: int):
    """The first of them were images of one class, or blocks of one file: accuracies and losses of nothing else."""
    asked = min(evaluated or SEQUENCES, SEQUENCES)
    wanted = [number * SEQUENCES // asked for number in range(asked)]
    for blocks in (False, True):
        found = []
        for rank in range(3):
            one = loader(3, rank, 6, 2, evaluated=evaluated)
            found += read([batch for _, batch in one.blocks()] if blocks else one.evaluation())
        assert sorted(found) == wanted == evenly_spread(SEQUENCES, asked).tolist()
