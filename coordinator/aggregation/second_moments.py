"""Second moments shared by facilities: validated with an update, averaged, and stored beside the next model.

They are small (see `facility.exchange.checkpoints.second_moments`), but only one update's and the running mean are in
memory at a time.

Every facility's next steps are divided by their root, whatever the clipping of steps makes of an update. So one
facility's are scaled down to `LARGEST` times the median of all, parameter by parameter. Four languages, two of them
known to the model, made them differ by up to 7 after 30 steps (a vector of norms; matrices by up to 4).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.verify import read_second_moments
from facility.exchange.checkpoints.second_moments import Factors, mean_of, write_factors

log = logging.getLogger(__name__)
LARGEST = 10.0
"""Times the median facility's mean of a parameter's second moments."""
LEAST_FACILITIES = 3
"""Of which a median says who is out of line."""
KEY = "second_moments_scaled"
"""In the round's details: how many parameters' were scaled down, by facility."""


def write_second_moments(aggregation: Aggregation, model: Path) -> None:
    """Write the weighted mean of the updates' second moments below `model`; nothing where no update brings any.

    A parameter's mean is over the updates that bring it: facilities that keep theirs personal take no part. Raises
    `UpdateRefused`.
    """
    limits = _limits(aggregation)
    steps: list[float] = []
    scaled: dict[str, int] = {}

    def each() -> Iterator[tuple[Mapping[str, Factors], float]]:
        for (facility, factors, seen), weight in zip(_found(aggregation), aggregation.weights, strict=True):
            if factors is None:
                continue
            steps.append(seen)
            bounded = {name: one.at_most(limits[name]) if name in limits else one for name, one in factors.items()}
            if changed := sum(bounded[name] is not one for name, one in factors.items()):
                scaled[facility] = changed
            yield bounded, weight

    mean = mean_of(each())
    aggregation.moments = {KEY: scaled} if scaled else {}
    for facility, count in scaled.items():
        log.warning(
            "second moments of %d parameters of %s are more than %g times the median facility's: scaled down to that",
            count,
            facility,
            LARGEST,
        )
    if mean:
        write_factors(model, mean, steps=median(steps))


def _found(aggregation: Aggregation) -> Iterator[tuple[str, dict[str, Factors] | None, float]]:
    """Of each update its facility, the factors of federated parameters (None: it brings none) and its steps."""
    for update in aggregation.opened:
        found = read_second_moments(update.directory, update.checkpoint, update.facility)
        factors, seen = found if found is not None else (None, 0.0)
        federated = {name: one for name, one in (factors or {}).items() if name in aggregation.floats}
        yield update.facility, None if factors is None else federated, seen


def _limits(aggregation: Aggregation) -> dict[str, float]:
    """The largest mean of a parameter's second moments; a median of zero limits nothing."""
    if len(aggregation.opened) < LEAST_FACILITIES:
        return {}
    means: dict[str, list[float]] = {}
    for _, factors, _ in _found(aggregation):
        for name, one in (factors or {}).items():
            means.setdefault(name, []).append(one.mean)
    return {
        name: LARGEST * middle
        for name, found in means.items()
        if len(found) >= LEAST_FACILITIES and (middle := median(found)) > 0
    }
