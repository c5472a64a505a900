"""Second moments shared by facilities: validated with an update, averaged, and stored beside the next model.

They are small (see `facility.exchange.checkpoints.second_moments`), but only one update's and the running mean are in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.verify import read_second_moments
from facility.exchange.checkpoints.second_moments import Factors, mean_of, write_factors


def write_second_moments(aggregation: Aggregation, model: Path) -> None:
    """Write the weighted mean of the updates' second moments below `model`; nothing where no update brings any.

    A parameter's mean is over the updates that bring it: facilities that keep theirs personal take no part. Raises
    `UpdateRefused`.
    """
    steps: dict[str, float] = {}

    def each() -> Iterator[tuple[Mapping[str, Factors], float]]:
        for update, weight in zip(aggregation.opened, aggregation.weights, strict=True):
            found = read_second_moments(update.directory, update.checkpoint, update.facility)
            if found is not None:
                factors, steps[update.facility] = found
                yield {name: one for name, one in factors.items() if name in aggregation.floats}, weight

    if mean := mean_of(each()):
        write_factors(model, mean, steps=sum(steps.values()) / len(steps))
