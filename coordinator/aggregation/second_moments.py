"""Second moments shared by facilities: validated with an update, averaged, and stored beside the next model.

They are small (see `facility.exchange.checkpoints.second_moments`), but only one update's and the running mean are in
memory at a time.

Every facility's next steps are divided by their root, whatever the clipping of steps makes of an update. So among three
facilities and more one's are scaled down where what its gradients added is more than `LARGEST` times the median of
all, parameter by parameter, and raised where less is left of the received ones than can be
(`coordinator.aggregation.moment_limits`). Between two facilities that differ by more there is no way to
say which is wrong: moments of such a parameter are not sent, and each facility keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from coordinator.aggregation.moment_limits import (
    LEAST_FACILITIES,
    believed,
    kept_by_all,
    least_share,
    limit_of,
    recorded,
)
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.verify import read_second_moments
from facility.exchange.checkpoints.second_moments import (
    Factors,
    has_factors,
    kept_of,
    mean_of,
    read_factors,
    write_factors,
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on the second moments that facilities send in one round, by parameter."""

    most: dict[str, float] = field(default_factory=dict)
    """Largest mean of second moments that a facility may send; no bound for parameters that are not here."""
    apart: frozenset[str] = frozenset()
    """Parameters whose second moments are not sent: the two facilities that bring them differ too much."""
    received: Mapping[str, Factors] = field(default_factory=dict)
    """Second moments that the round began with."""
    share: float = 0.0
    """Least part of each of `received` that must be left in what a facility sends."""

    def held(self, name: str, one: Factors) -> Factors:
        """A facility's second moments of a parameter within the limits; themselves where they are."""
        if (before := self.received.get(name)) is not None:
            one = one.at_least(before, self.share)
        return one.at_most(self.most[name]) if name in self.most else one


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
            sent = {name: one for name, one in factors.items() if name not in limits.apart}
            bounded = {name: limits.held(name, one) for name, one in sent.items()}
            if changed := sum(bounded[name] is not one for name, one in sent.items()):
                scaled[facility] = changed
            yield bounded, weight

    mean = mean_of(each())
    least = ", by what its gradients add, or less than is left of those that it received"
    aggregation.moments = recorded("second_moments", scaled=scaled, apart=len(limits.apart), least=least)
    if mean:
        write_factors(model, mean, steps=median(steps))


def _found(aggregation: Aggregation) -> Iterator[tuple[str, dict[str, Factors] | None, float]]:
    """(facility, factors of federated parameters, steps) by update; factors are None where it brings none."""
    for update in aggregation.opened:
        found = read_second_moments(update.directory, update.checkpoint, update.facility)
        factors, seen = found if found is not None else (None, 0.0)
        federated = {name: one for name, one in (factors or {}).items() if name in aggregation.floats}
        yield update.facility, None if factors is None else federated, seen


def _limits(aggregation: Aggregation) -> Limits:
    """The bounds of this round; a parameter that a single facility brings has none."""
    means: dict[str, list[tuple[float, int]]] = {}
    kept: list[float] = []
    for update, (_, factors, _) in zip(aggregation.opened, _found(aggregation), strict=True):
        for name, one in (factors or {}).items():
            means.setdefault(name, []).append((one.mean, len(kept)))
        if factors is not None:
            kept.append(kept_of(update.directory))
    received = _received(aggregation) if kept else {}
    share, shares = kept_by_all(kept), believed(kept)
    found = {
        name: limit_of(
            [size for size, _ in sizes],
            received[name].mean if name in received else 0.0,
            [shares[number] for _, number in sizes],
        )
        for name, sizes in means.items()
    }
    enough = len(kept) >= LEAST_FACILITIES
    return Limits(
        most={name: one.most for name, one in found.items() if one.most is not None},
        apart=frozenset(name for name, one in found.items() if one.apart),
        received=received if enough else {},
        share=least_share(share) if enough else 0.0,
    )


def _received(aggregation: Aggregation) -> dict[str, Factors]:
    """Second moments sent out with the model that the round began with; {} where it had none."""
    if not has_factors(aggregation.whole.directory):
        return {}
    return read_factors(
        aggregation.whole.directory, {name: entry.shape for name, entry in aggregation.whole.tensors.items()}
    )[0]
