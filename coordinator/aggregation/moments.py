"""Moments averaged value by value: piece by piece, and stored beside the next model.

Only pieces of one parameter are in memory at a time. Second moments are held to the limits of
`coordinator.aggregation.second_moments`, with the mean of all values in place of that of the row means. First moments
move every facility's next steps, so one facility's are scaled down where their norm is more than `LARGEST` times the
median of all, parameter by parameter; of two that differ by more, neither is sent.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from coordinator.aggregation.moment_limits import (
    LEAST_FACILITIES,
    believed,
    kept_by_all,
    least_share,
    limit_of,
    recorded,
)
from coordinator.aggregation.round import Aggregation
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.moments import (
    FIRST,
    Moment,
    Rows,
    StoredMoments,
    has_moments,
    shapes_in,
    write_moments,
)
from facility.exchange.errors import CheckpointError, UpdateRefused


@contextmanager
def refused(facility: str) -> Iterator[None]:
    """Moments that cannot be read are their facility's fault."""
    try:
        yield
    except CheckpointError as error:
        raise UpdateRefused(facility, f"its moments cannot be used: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One facility's part in the mean of one moment."""

    facility: str
    stored: StoredMoments
    weight: float
    size: float
    """Mean of a second moment, norm of a first one."""
    scale: float = 1.0
    """By which it is held to the limit."""


@dataclass(kw_only=True)
class Averaging:
    """The moments of a round's updates."""

    members: list[tuple[str, StoredMoments, float]]
    """Facility, its moments, and its weight."""
    received: StoredMoments | None
    """Moments that the round began with."""
    scaled: dict[str, int] = field(default_factory=dict)
    """Parameters that were scaled, by facility."""
    apart: int = 0

    @cached_property
    def kept(self) -> float:
        """The share of received second moments that is left."""
        return 0.0 if self.received is None else kept_by_all([stored.kept for _, stored, _ in self.members])

    @cached_property
    def shares(self) -> list[float]:
        """The share of received second moments that is left at each member, as `believed` has it."""
        stated = [stored.kept for _, stored, _ in self.members]
        return [0.0] * len(stated) if self.received is None else believed(stated)

    def before(self, moment: Moment) -> float:
        """The mean of the received second moment; 0 where none was received in this form."""
        return self.received.size_of(moment) if self._received(moment) and self.received is not None else 0.0

    def _received(self, moment: Moment) -> bool:
        return self.received is not None and self.received.has(moment)

    def common(self) -> list[Moment]:
        """Every moment, in the form that most updates have it in."""
        found: dict[tuple[str, bool], Counter[Moment]] = {}
        for _, stored, _ in self.members:
            for key, moment in stored.moments.items():
                found.setdefault(key, Counter())[moment] += 1
        return [found[key].most_common(1)[0][0] for key in sorted(found)]

    def held(self, moment: Moment) -> list[Member]:
        """Who takes part in the mean of a moment, each within the limits; empty: it is not sent."""
        found, kept = [], []
        for (facility, stored, weight), share in zip(self.members, self.shares, strict=True):
            if stored.has(moment):
                with refused(facility):
                    size = stored.size_of(moment)
                found.append(Member(facility=facility, stored=stored, weight=weight, size=size))
                kept.append(0.0 if moment.form == FIRST else share)
        limit = limit_of([one.size for one in found], 0.0 if moment.form == FIRST else self.before(moment), kept)
        if limit.apart:
            self.apart += 1
            return []
        if (most := limit.most) is None:
            return found
        for one in found:
            if one.size > most:
                self.scaled[one.facility] = self.scaled.get(one.facility, 0) + 1
        return [dataclasses.replace(one, scale=min(1.0, most / one.size if one.size else 1.0)) for one in found]

    def mean(self, moment: Moment, members: list[Member]) -> Rows:
        """What reads the weighted mean's rows."""
        total = sum(one.weight for one in members)
        floor = least_share(self.kept) if len(members) >= LEAST_FACILITIES and moment.form != FIRST else 0.0
        least = self.received if floor > 0 and self._received(moment) else None

        def rows(first: int, count: int) -> Array:
            limit = least.read(moment, first, count) * np.float32(floor) if least is not None else None
            mean: Array = np.zeros((), np.float64)
            for one in members:
                values = one.stored.read(moment, first, count)
                values = values if limit is None else np.maximum(values, limit)
                mean = mean + values * (one.weight / total * one.scale)
            return mean.astype(np.float32)

        return rows


def write_mean_moments(aggregation: Aggregation, model: Path) -> None:
    """Write the weighted mean of the updates' moments below `model`; nothing where no update brings any.

    A moment's mean is over the updates that bring it, in the form that most of them have. Raises `UpdateRefused`.
    """
    members = []
    for update, weight in zip(aggregation.opened, aggregation.weights, strict=True):
        if has_moments(update.directory):
            with refused(update.facility):
                stored = StoredMoments(update.directory, shapes_in(update.checkpoint))
            members.append((update.facility, stored, weight))
    if not members:
        return
    base = aggregation.whole
    received = StoredMoments(base.directory, shapes_in(base)) if has_moments(base.directory) else None
    here = Averaging(members=members, received=received)
    federated = [moment for moment in here.common() if moment.name in aggregation.floats]
    means = {moment: here.mean(moment, held) for moment in federated if (held := here.held(moment))}
    write_moments(model, means, steps=median(stored.steps for _, stored, _ in members))
    aggregation.moments |= recorded("moments", scaled=here.scaled, apart=here.apart)
